"""In the engine's worker, for `tools.gpu.stock` alone: artd's extension, and vLLM's NCCL transfer without artd's checks."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from artd_workers.engines.vllm.direct.survey import parameters
from artd_workers.engines.vllm.extension import Extension


class Probe(Extension):
    """`self` is vLLM's worker."""

    _checked: type | None = None

    def probe_plain(self, plain: bool) -> dict[str, Any]:
        """From now on vLLM's own transfer backend as it comes, or artd's around it."""
        engine: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        self._checked = self._checked or type(engine)
        engine.__class__ = NCCLWeightTransferEngine if plain else self._checked
        return {}

    def probe_spoil(self) -> dict[str, Any]:
        """NaN into every tensor that the kernels read."""
        for tensor in parameters(self.model_runner.get_model()).values():  # type: ignore[attr-defined]
            tensor.fill_(torch.nan)
        return {}
