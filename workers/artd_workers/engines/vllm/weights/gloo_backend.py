"""The `artd_gloo` transfer backend: vLLM's four transfer calls, with tensors that the trainer broadcasts over gloo.

It owns the transfer group with the trainer and the reload in progress. The model is written only between `Reload.start` and
`Reload.finish`, within an open update. It runs with vLLM 0.32 on CPU, and is imported before the model is built.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from artd_workers.engines.adapter import Fence
from artd_workers.transfer.gloo import ENGINE, broadcast, join

from .hashing import Entry, WeightError, entries
from .load import Update
from .reload import Reload


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """The body of /init_weight_transfer_engine."""

    rendezvous: str
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The body of /update_weights: fence, rows of the weight table, seconds for the whole transfer."""

    fence: dict[str, Any]
    table: list[list[Any]]
    timeout_s: float


def make_backend(update: Update) -> type[WeightTransferEngine]:
    """Return the transfer backend class of this worker, bound to its updates."""

    class GlooTransfer(WeightTransferEngine[JoinInfo, UpdateInfo]):
        """vLLM's four transfer calls over the group of `gloo.py`, in which this engine is rank 1."""

        init_info_cls = JoinInfo
        update_info_cls = UpdateInfo
        supports_draft_weight_update = False
        _group: Any = None
        _reload: Reload | None = None

        def init_transfer_engine(self, init_info: JoinInfo) -> None:
            update.gate.require_open()
            self._group = None
            self._group = join(init_info.rendezvous, ENGINE, init_info.timeout_s)

        def start_weight_update(self) -> None:
            update.gate.require_open()
            self._reload = Reload(self.model, self.model_config)
            self._reload.start()

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # The base class ends with synchronising an accelerator, and there is none.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: UpdateInfo) -> None:
            update.gate.check(Fence(**update_info.fence))
            if self._group is None or self._reload is None:
                raise WeightError("an update was sent before the group was joined and the update started")
            table = entries(update_info.table)
            self._reload.load(table, self._receive(table, update_info.timeout_s))

        def finish_weight_update(self) -> None:
            update.gate.require_open()
            assert self._reload is not None
            began = time.perf_counter()
            self._reload.finish()
            seconds = self._reload.seconds
            seconds["load"] += time.perf_counter() - began
            update.figures = seconds | {"bytes": float(self._reload.bytes)}
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
