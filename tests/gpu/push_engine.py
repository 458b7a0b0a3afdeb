"""In the engine's worker, for `tests.gpu.push` alone: spoil the weights, load them by vLLM's own road, count what is held."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from artd_workers.engines.direct.session import Session
from artd_workers.engines.vllm.direct.survey import parameters


class ProbeCalls:
    """Beside artd's extension; `self` is vLLM's worker."""

    _artd_session: Session | None

    def probe_spoil(self) -> dict[str, Any]:
        """NaN into every tensor that the kernels read."""
        for tensor in parameters(self.model_runner.get_model()).values():  # type: ignore[attr-defined]
            tensor.fill_(torch.nan)
        return {}

    def probe_load(self, folder: str) -> dict[str, Any]:
        """The stock loader, by Hugging Face names, from safetensors files."""

        def tensors():
            for path in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(path, framework="pt", device="cpu") as file:
                    yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

        with torch.no_grad():
            loaded = self.model_runner.get_model().load_weights(tensors())  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        return {"loaded": len(loaded or ())}

    def probe_forgive(self) -> dict[str, Any]:
        """The script restarts no engine after each refused push: forget that the weights are unknown."""
        assert self._artd_session is not None
        self._artd_session._gate._open = None
        return {}

    def probe_held(self) -> dict[str, int]:
        """Bytes of the GPU in use, descriptors, mappings."""
        free, total = torch.cuda.mem_get_info()
        maps = Path("/proc/self/maps").read_text().count("\n")
        return {"gpu_bytes": total - free, "descriptors": len(os.listdir("/proc/self/fd")), "mappings": maps}

    def probe_addresses(self) -> dict[str, Any]:
        """Addresses of the tensors, in the table's order."""
        found = parameters(self.model_runner.get_model())  # type: ignore[attr-defined]
        return {"addresses": [tensor.data_ptr() for tensor in found.values()]}
