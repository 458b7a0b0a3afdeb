"""The ranks that train one model: how they meet, receive orders, and agree on errors.

`join_ranks` creates the process groups. `Ranks` broadcasts rank 0's orders as msgspec bytes, offers the collectives,
and makes the channels that work while ranks are inside a job. Nothing is pickled. Every rank calls the same
collectives in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from . import context, pipeline
from .channel import Channel
from .layout import ALONE, Parallel

FOREVER = timedelta(days=3650)
"""Timeout of an order: between jobs the other ranks wait for as long as it takes."""


class RankError(RuntimeError):
    """An error on another rank."""


@dataclass
class Ranks:
    """The processes that train one model, as this one sees them. `broken`: the ranks are out of step, and only a restart helps."""

    parallel: Parallel = ALONE
    rank: int = 0
    broken: bool = False
    _orders: dist.ProcessGroup | None = field(default=None, repr=False)
    _beside: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self.parallel.world == 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which speaks to the daemon and writes files."""
        return self.rank == 0

    def send_order(self, data: bytes) -> None:
        """Send rank 0's bytes to every other rank. Collective: rank 0 calls this, the others `receive_order`."""
        if not self.alone:
            dist.broadcast(torch.tensor(len(data)), 0, group=self._orders)
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._orders)

    def receive_order(self) -> bytes:
        """Return the next bytes that rank 0 sends."""
        size = torch.zeros((), dtype=torch.int64)
        dist.broadcast(size, 0, group=self._orders)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._orders)
        return data.numpy().tobytes()

    def pids(self) -> list[int]:
        """Return the process ids of ranks 1 and up. Collective: every rank calls it."""
        found = [torch.zeros((), dtype=torch.int64) for _ in range(self.parallel.world)]
        dist.all_gather(found, torch.tensor(os.getpid()), group=self._orders)
        return [int(pid) for pid in found[1:]]

    def poll(self, asked: Callable[[], bool]) -> RankZeroPoll:
        """Make a poll of rank 0's `asked` for one step. Every rank makes its own, and calls it equally often."""
        return RankZeroPoll(self, asked)

    def all_reduce_min(self, value: float) -> float:
        """Return the smallest value of all ranks. Collective: every rank calls it."""
        if self.alone:
            return value
        word = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(word, dist.ReduceOp.MIN, group=self._orders)
        return float(word)

    def broadcast(self, value: int) -> int:
        """Return rank 0's value on every rank. Collective: every rank calls it."""
        if self.alone:
            return value
        word = torch.tensor(value)
        dist.broadcast(word, 0, group=self._orders)
        return int(word)

    def all_reduce(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum int64 tensors on the CPU, of the same shape on all ranks, modulo 2^64. The sum replaces `numbers`.
        Collective: every rank calls it.
        """
        if not self.alone:
            dist.all_reduce(numbers, group=self._orders)
        return numbers

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank. Collective: every rank calls it."""
        if self.alone:
            return [data]
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.parallel.world)]
        dist.all_gather(sizes, torch.tensor(len(data)), group=self._orders)
        longest = max(1, *(int(size) for size in sizes))
        own = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(found, own, group=self._orders)
        return [one[: int(size)].numpy().tobytes() for one, size in zip(found, sizes, strict=True)]

    def first_nonempty(self, text: str) -> str:
        """Return the non-empty text of the lowest rank that has one, or "". Collective: every rank calls it."""
        return next((one.decode() for one in self.all_gather(text.encode()) if one), "")

    def channel(self, other: int, take: Callable[[bytes | None], None]) -> Channel:
        """Return this process's end of the channel between rank 0 and another rank. Both sides call this once; `take`
        is as in `Channel`.
        """
        return Channel(self._beside, other, take)

    @contextmanager
    def share_errors(self) -> Iterator[None]:
        """Run a block that can fail on one rank alone, and let every rank raise when one has failed. A rank without
        an error of its own raises RankError. Collective: every rank enters it.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failed = self.first_nonempty("" if error is None else f"rank {self.rank}: {type(error).__name__}: {error}")
        if error is not None:
            raise error
        if failed:
            raise RankError(failed)

    @contextmanager
    def in_step(self, *same: type[Exception]) -> Iterator[None]:
        """Run a block in which the ranks call collectives. An exception marks the ranks as `broken`, unless its type
        is in `same`: those are raised on all ranks or on none.
        """
        try:
            yield
        except same:
            raise
        except BaseException:
            self.broken = not self.alone
            raise


class RankZeroPoll:
    """A question to rank 0, `asked`, that all ranks poll during a step, equally often and in the same order.

    A call returns whether rank 0 had said yes by the call before it (at first False). The answer arrives while a row
    is computed, so no rank waits for the slowest at every row.
    """

    def __init__(self, ranks: Ranks, asked: Callable[[], bool]) -> None:
        self._ranks, self._asked = ranks, asked
        self._under_way: tuple[dist.Work | None, torch.Tensor] | None = None
        self._said = False

    def __call__(self) -> bool:
        if self._ranks.alone:
            return self._asked()
        before, word = self._under_way, torch.tensor(int(self._ranks.first and self._asked()))
        self._under_way = dist.broadcast(word, 0, group=self._ranks._orders, async_op=True), word
        return self._has_said(before)

    def now(self) -> bool:
        """Wait for rank 0's answer, and return whether it has ever said yes. Collective: every rank calls it."""
        if self._ranks.alone:
            return self._asked()
        before, self._under_way = self._under_way, None
        self._has_said(before)
        return bool(self._ranks.broadcast(int(self._ranks.first and self._asked()))) or self._said

    def _has_said(self, before: tuple[dist.Work | None, torch.Tensor] | None) -> bool:
        if before is not None:
            work, word = before
            if work is not None:
                work.wait()
            self._said = self._said or bool(word)
        return self._said


def join_ranks(parallel: Parallel, rank: int, folder: Path, cuda: bool) -> Ranks:
    """Meet the other ranks in `folder` and create Megatron's groups. Collective: blocks until every rank has called
    it.
    """
    meet(parallel.world, rank, folder, cuda)
    return make_groups(parallel, rank)


def meet(world: int, rank: int, folder: Path, cuda: bool) -> None:
    """Meet the other ranks in `folder`; this process uses GPU number `rank`. Collective: blocks until every rank has
    called it.
    """
    if cuda:
        torch.cuda.set_device(rank)
    else:
        # Megatron asks CUDA for the device of its buffers. Ranks without a GPU exist only in tests, and have none.
        torch.cuda.current_device = _no_gpu
    # A tracker whose fork does nothing is enough: no forward here draws random numbers.
    initialize_rng_tracker(inference_rng_tracker=True)
    store = dist.FileStore(str(folder / "ranks"), world)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=world)


def make_groups(parallel: Parallel, rank: int) -> Ranks:
    """Create Megatron's groups among ranks that have met. Collective: every rank calls it."""
    parallel_state.initialize_model_parallel(
        parallel.tp, parallel.pp, expert_model_parallel_size=parallel.ep, expert_tensor_parallel_size=parallel.etp
    )
    pipeline.open_connections(parallel)
    context.make_groups(parallel)
    orders, beside = (dist.new_group(backend="gloo", timeout=FOREVER) for _ in range(2))
    return Ranks(parallel, rank, _orders=orders, _beside=beside)


def _no_gpu() -> Any:
    return torch.device("cpu")
