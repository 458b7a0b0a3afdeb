"""vLLM's own NCCL transfer backend, behind the gate and with every tensor checked before it is loaded.

vLLM's calls carry neither fence nor hashes; the connection, the bodies and the layerwise reload stay vLLM's. Nothing is
received outside an open update. A tensor that the update does not expect, or with other bytes than committed, is never loaded.
An update ends only when all tensors have come. It is imported on CUDA only, before the model is built (vLLM 0.25).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from .hashing import WeightError
from .load import Checking, Update
from .reload import incomplete


def make_checked(update: Update) -> type[NCCLWeightTransferEngine]:
    """Return the backend class of this worker, bound to its updates."""

    class CheckedNccl(NCCLWeightTransferEngine):
        """vLLM's backend with the gate and the checks."""

        model: Any

        def init_transfer_engine(self, init_info: Any) -> None:
            update.gate.require_open()
            super().init_transfer_engine(init_info)

        def start_weight_update(self) -> None:
            update.gate.require_open()
            super().start_weight_update()

        def receive_weights(self, update_info: Any) -> None:
            update.gate.require_open()
            began = time.perf_counter()
            model = self.model
            self.model = Checking(model, update)
            try:
                with torch.no_grad():
                    super().receive_weights(update_info)
            finally:
                self.model = model
            update.figures["transfer"] = update.figures.get("transfer", 0.0) + time.perf_counter() - began

        def finish_weight_update(self) -> None:
            update.gate.require_open()
            began = time.perf_counter()
            if update.wanted:
                raise WeightError(f"{len(update.wanted)} tensors have not come, the first is {min(update.wanted)}")
            if partly := incomplete(self.model):
                raise WeightError(f"{len(partly)} layers got only some of their weights, the first is {partly[0]}")
            super().finish_weight_update()
            update.figures["load"] = time.perf_counter() - began

    return CheckedNccl
