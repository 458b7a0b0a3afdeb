"""An engine for `tests.gpu.push --tiny`: the same extension over modules with vLLM's names, in this process, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from artd_workers.engines.direct.session import Session
from artd_workers.engines.fence import Gate
from artd_workers.engines.vllm.direct.extension import DirectExtension
from artd_workers.engines.vllm.direct.survey import parameters
from tests.direct_rig import MemoryPort, engine_model, engine_table
from tests.gpu.push_engine import ProbeCalls


class TinyEngine(ProbeCalls, DirectExtension):
    """It generates nothing: `logprobs` are sums over its weights. Its "stock loader" fuses by hand."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._model = engine_model(config, torch.bfloat16)
        self._table = engine_table(self._model)
        found = parameters(self._model)
        self._artd_session = Session(Gate("i", 1), MemoryPort(), tuple(found), tuple(found.values()))

    @property
    def model_runner(self) -> TinyEngine:
        return self

    def get_model(self) -> torch.nn.Module:
        return self._model

    def artd_direct_table(self) -> dict[str, Any]:
        return msgspec.to_builtins(self._table)

    def rpc(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def pause(self, keep_kv: bool = False) -> None:
        return

    def resume(self) -> None:
        return

    def stop(self) -> None:
        assert self._artd_session is not None
        self._artd_session.close()

    def logprobs(self, prompts: list[list[int]], tokens: int = 16) -> list[float]:
        return [float(tensor.double().sum()) for tensor in parameters(self._model).values()]

    def probe_held(self) -> dict[str, int]:
        return {}

    def probe_load(self, folder: str) -> dict[str, Any]:
        hf = load_file(Path(folder) / "model.safetensors")
        for name, tensor in parameters(self._model).items():
            stem, _, last = name.removesuffix(".weight").rpartition(".")
            if last == "qkv_proj":
                tensor.copy_(torch.cat([hf[f"{stem}.{x}_proj.weight"] for x in "qkv"]))
            elif last in ("w13_weight", "w2_weight"):
                stem, words = stem.removesuffix(".routed_experts"), ("gate", "up") if "13" in last else ("down",)
                for e, one in enumerate(tensor):
                    one.copy_(torch.cat([hf[f"{stem}.{e}.{x}_proj.weight"] for x in words]))
            else:
                tensor.copy_(hf[name])
        return {"loaded": len(hf)}
