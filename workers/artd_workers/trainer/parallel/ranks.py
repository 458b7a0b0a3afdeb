"""The processes that train one model together: how they meet, hear what to do, and agree on what went wrong.

Purpose: `joined` makes the process groups; `Ranks` carries rank 0's orders as msgspec bytes, and makes the channels on which ranks speak
beside their jobs. Owner of: no state beside torch's and Megatron's groups. Invariants: nothing is pickled; what a method says to do "together" every rank does, in the same order.
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
"""Between jobs the other ranks wait for the next order: as long as it takes."""


class RankError(RuntimeError):
    """What went wrong on another rank."""


@dataclass
class Ranks:
    """This process among those that train together. broken: they are no longer in step, and only a fresh start helps."""

    parallel: Parallel = ALONE
    rank: int = 0
    broken: bool = False
    _orders: dist.ProcessGroup | None = field(default=None, repr=False)
    _beside: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def alone(self) -> bool:
        return self.parallel.world == 1

    @property
    def first(self) -> bool:
        """Whether this is the process that speaks to the daemon and writes files."""
        return self.rank == 0

    def send_order(self, data: bytes) -> None:
        """Send rank 0's bytes to all others, who `hear` them."""
        if not self.alone:
            dist.broadcast(torch.tensor(len(data)), 0, group=self._orders)
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._orders)

    def receive_order(self) -> bytes:
        """What rank 0 tells next."""
        size = torch.zeros((), dtype=torch.int64)
        dist.broadcast(size, 0, group=self._orders)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._orders)
        return data.numpy().tobytes()

    def pids(self) -> list[int]:
        """Process numbers of ranks 1 and up, together."""
        found = [torch.zeros((), dtype=torch.int64) for _ in range(self.parallel.world)]
        dist.all_gather(found, torch.tensor(os.getpid()), group=self._orders)
        return [int(pid) for pid in found[1:]]

    def poll(self, asked: Callable[[], bool]) -> RankZeroPoll:
        """What rank 0's `asked` says, on every rank, together; for one step."""
        return RankZeroPoll(self, asked)

    def all_reduce_min(self, value: float) -> float:
        """The smallest of all ranks' values, together."""
        if self.alone:
            return value
        word = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(word, dist.ReduceOp.MIN, group=self._orders)
        return float(word)

    def broadcast(self, value: int) -> int:
        """What it is on rank 0, together."""
        if self.alone:
            return value
        word = torch.tensor(value)
        dist.broadcast(word, 0, group=self._orders)
        return int(word)

    def all_reduce(self, numbers: torch.Tensor) -> torch.Tensor:
        """int64 on the CPU, of one shape on all ranks -> their sum modulo 2^64, together."""
        if not self.alone:
            dist.all_reduce(numbers, group=self._orders)
        return numbers

    def all_gather(self, data: bytes) -> list[bytes]:
        """What each rank says, by rank, together."""
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
        """What the first rank says that says anything, "" when none does, together."""
        return next((one.decode() for one in self.all_gather(text.encode()) if one), "")

    def channel(self, other: int, take: Callable[[bytes | None], None]) -> Channel:
        """One end of what rank 0 and another say beside their jobs; both make theirs, once. take: as of `Channel`."""
        return Channel(self._beside, other, take)

    @contextmanager
    def share_errors(self) -> Iterator[None]:
        """A part of a job that each rank does by itself, and that may fail on one alone: then all raise. Together."""
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
        """A part of a job in which ranks work together. same: what is raised on all of them or on none."""
        try:
            yield
        except same:
            raise
        except BaseException:
            self.broken = not self.alone
            raise


class RankZeroPoll:
    """What rank 0's `asked` says, looked at again and again in a step, by all ranks as often and in the same order.

    A call gives what rank 0 said at the call before it (False at first), so that no rank waits for the slowest at every row: it
    is heard while the row is computed. `now` waits, and gives what was ever said.
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
    """Meet the other ranks in a folder and make Megatron's groups. Blocks until all are there."""
    meet(parallel.world, rank, folder, cuda)
    return make_groups(parallel, rank)


def meet(world: int, rank: int, folder: Path, cuda: bool) -> None:
    """Meet the other ranks in a folder; GPU number `rank` is this process's. Blocks until all are there."""
    if cuda:
        torch.cuda.set_device(rank)
    else:
        # Megatron asks CUDA for the device of its buffers: ranks without a GPU, which are for tests, have none to name.
        torch.cuda.current_device = _no_gpu
    # Its fork does nothing: no forward here draws random numbers.
    initialize_rng_tracker(inference_rng_tracker=True)
    store = dist.FileStore(str(folder / "ranks"), world)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=world)


def make_groups(parallel: Parallel, rank: int) -> Ranks:
    """Make Megatron's groups among ranks that have met."""
    parallel_state.initialize_model_parallel(
        parallel.tp, parallel.pp, expert_model_parallel_size=parallel.ep, expert_tensor_parallel_size=parallel.etp
    )
    pipeline.open_connections(parallel)
    context.make_groups(parallel)
    orders, beside = (dist.new_group(backend="gloo", timeout=FOREVER) for _ in range(2))
    return Ranks(parallel, rank, _orders=orders, _beside=beside)


def _no_gpu() -> Any:
    return torch.device("cpu")
