"""Weights into vLLM's model, in vLLM's worker: the layerwise reload, checked, and the `artd_gloo` transfer backend.

Purpose: every byte that reaches the model is the byte that the committed weight table names, and every tensor arrives.
Owner of: the transfer group with the trainer, the reload in progress and its figures. Invariants: the model is only ever
written between `Reload.start` and `Reload.finish` (CPU linears are repacked: writing parameters in place is wrong).
Runs with vLLM 0.32 on CPU; imported before the model is built.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ..base import Fence
from ..fence import Gate
from ..gloo import ENGINE, broadcast, join
from .moe import forget_kernels, incomplete

TIED_HEAD = "lm_head.weight"


class WeightError(Exception):
    """Received weights are not those of the committed table, or do not cover the model."""


@dataclass
class Entry:
    """One row of the weight table as it crosses JSON."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


def entries(rows: list[list[Any]]) -> list[Entry]:
    """Decode [[name, dtype, shape, sha256], ...]."""
    return [Entry(name, dtype, tuple(shape), sha) for name, dtype, shape, sha in rows]


class Hasher:
    """sha256 of tensors in a thread beside the load (hashing releases the interpreter lock); owns that thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="artd-hash")
        self._pending: list[tuple[Entry, Future[str]]] = []
        self.bytes = 0

    def add(self, entry: Entry, tensor: torch.Tensor) -> None:
        self.bytes += tensor.numel() * tensor.element_size()
        self._pending.append((entry, self._pool.submit(sha256, tensor)))

    def finish(self) -> None:
        """Raise WeightError, naming the first tensor whose bytes are not the table's."""
        wrong = [entry.name for entry, result in self._pending if result.result() != entry.sha256]
        if wrong:
            raise WeightError(f"{len(wrong)} tensors arrived with other bytes than committed, the first is {wrong[0]}")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def sha256(tensor: torch.Tensor) -> str:
    """Hex digest of a contiguous CPU tensor's bytes."""
    return hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy()).hexdigest()


class Reload:
    """One replacement of a model's weights through vLLM's layerwise reload."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._config = model_config
        self._expected: set[str] = set()
        self.seconds: dict[str, float] = {}
        self.bytes = 0

    def start(self) -> None:
        self._expected = {name for name, _ in self._model.named_parameters()}
        forget_kernels(self._model)
        initialize_layerwise_reload(self._model)

    def load(self, table: list[Entry], source: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Feed the model from `source`, which must yield the table's tensors in its order. Raises WeightError."""
        began = time.perf_counter()
        hasher = Hasher()
        try:
            loaded = self._model.load_weights(self._checked(table, source, hasher))
            hasher.finish()
        finally:
            hasher.close()
        self.bytes = hasher.bytes
        if missing := sorted(self._expected - set(loaded or ()) - {TIED_HEAD}):
            raise WeightError(f"{len(missing)} parameters of the model got no weights, the first is {missing[0]}")
        if partly := incomplete(self._model):
            raise WeightError(
                f"{len(partly)} layers of the model got only some of their weights, the first is {partly[0]}"
            )
        self.seconds["load"] = time.perf_counter() - began - self.seconds["transfer"]

    def finish(self) -> None:
        finalize_layerwise_reload(self._model, self._config)

    def _checked(
        self, table: list[Entry], source: Iterator[tuple[str, torch.Tensor]], hasher: Hasher
    ) -> Iterator[tuple[str, torch.Tensor]]:
        transfer = 0.0
        for entry in table:
            began = time.perf_counter()
            name, tensor = next(source, ("", None))
            transfer += time.perf_counter() - began
            if tensor is None or name != entry.name:
                raise WeightError(f"the weight table has {entry.name}, the source has {name or 'no more'}")
            found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if found != (entry.dtype, entry.shape):
                raise WeightError(f"{name} is {found}, the weight table says {(entry.dtype, entry.shape)}")
            hasher.add(entry, tensor)
            self.seconds["transfer"] = transfer
            yield name, tensor
        if extra := next(source, None):
            raise WeightError(f"the source has {extra[0]}, which the weight table does not")


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine."""

    rendezvous: str
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of /update_weights: fence, weight table rows, seconds for the whole transfer."""

    fence: dict[str, Any]
    table: list[list[Any]]
    timeout_s: float


@dataclass
class Session:
    """What the worker's extension and its transfer backend share: one per worker process."""

    gate: Gate
    figures: dict[str, float] = field(default_factory=dict)


def make_backend(session: Session) -> type[WeightTransferEngine]:
    """The transfer backend class of this worker, bound to its session."""

    class GlooTransfer(WeightTransferEngine[JoinInfo, UpdateInfo]):
        """vLLM's four transfer calls over the group of `gloo.py`, this engine being rank 1."""

        init_info_cls = JoinInfo
        update_info_cls = UpdateInfo
        supports_draft_weight_update = False
        _group: Any = None
        _reload: Reload | None = None

        def init_transfer_engine(self, init_info: JoinInfo) -> None:
            session.gate.require_open()
            self._group = None
            self._group = join(init_info.rendezvous, ENGINE, init_info.timeout_s)

        def start_weight_update(self) -> None:
            session.gate.require_open()
            self._reload = Reload(self.model, self.model_config)
            self._reload.start()

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # The base class ends with an accelerator's synchronise, and there is none.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: UpdateInfo) -> None:
            session.gate.check(Fence(**update_info.fence))
            if self._group is None or self._reload is None:
                raise WeightError("an update was sent before the group was joined and the update started")
            table = entries(update_info.table)
            self._reload.load(table, self._receive(table, update_info.timeout_s))

        def finish_weight_update(self) -> None:
            session.gate.require_open()
            assert self._reload is not None
            began = time.perf_counter()
            self._reload.finish()
            seconds = self._reload.seconds
            seconds["load"] += time.perf_counter() - began
            session.figures = seconds | {"bytes": float(self._reload.bytes)}
            self._reload = None

        def shutdown(self) -> None:
            self._group = None

        def _receive(self, table: list[Entry], timeout_s: float) -> Iterator[tuple[str, torch.Tensor]]:
            end = time.monotonic() + timeout_s
            for entry in table:
                tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
                broadcast(self._group, tensor, max(0.001, end - time.monotonic()))
                yield entry.name, tensor

    return GlooTransfer
