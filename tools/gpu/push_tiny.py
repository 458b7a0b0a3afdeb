"""An engine for `tools.gpu.push --tiny`: the same extension over modules with vLLM's names, in this process, on a CPU."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from artd_workers.engines.gate import Gate
from artd_workers.engines.pull.session import Session
from artd_workers.engines.vllm.direct.extension import DirectExtension
from artd_workers.engines.vllm.direct.survey import parameters
from tests.direct_rig import MemoryPort, engine_model, engine_table, fused
from tools.gpu.push_engine import ProbeCalls
from tools.gpu.push_truth import eager, logprobs

_EXPERTS = re.compile(r"routed_experts\.(\w+)$")
_STACKED = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}


class TinyEngine(ProbeCalls, DirectExtension):
    """`logprobs` are sums over its weights; `scored` is Hugging Face's model; streams have tokens while it is not paused. Its
    "stock loader" fuses by hand."""

    def __init__(self, config: dict[str, Any]) -> None:
        sys.setswitchinterval(1e-4)  # the trainer's feed is in this process: a pull that polls would starve it
        self._config, self._awake = config, threading.Event()
        self._awake.set()
        self._steps: list[tuple[float, float, int, int]] = []
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
        self._awake.clear()

    def resume(self) -> None:
        self._awake.set()
        self._steps.append((time.perf_counter(), 0.001, 4, 4))

    def stop(self) -> None:
        assert self._artd_session is not None
        self._artd_session.close()

    def logprobs(self, prompts: list[list[int]], tokens: int = 16) -> list[float]:
        return [float(tensor.double().sum()) for tensor in parameters(self._model).values()]

    def scored(self, prompts: list[list[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
        """What Hugging Face's model computes with the engine's tensors, an answer being the likeliest tokens."""
        model, out = hugging_face(self._config, parameters(self._model)), []
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(tokens):
                with torch.no_grad():
                    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            out.append((ids, logprobs(model, ids)))
        return out

    def stream(self, prompt: list[int], tokens: int) -> TinyStream:
        return TinyStream(self._awake, tokens)

    def sleep(self, level: int) -> None:
        if level == 2:
            self.probe_spoil()

    def wake(self) -> None:
        return

    def probe_watch(self) -> dict[str, Any]:
        steps, self._steps = self._steps, []
        return {"steps": steps, "kernels": []}

    def artd_warm(self, timeout_s: float) -> dict[str, float]:
        return {"forms": 0, "run": 0, "kernels": 0, "seconds": 0.0}

    def probe_pool(self) -> dict[str, int]:
        return {"": len(self._table.tensors)}

    def probe_held(self) -> dict[str, int]:
        return {}

    def probe_load(self, folder: str) -> dict[str, Any]:
        hf = load_file(Path(folder) / "model.safetensors")
        own = parameters(self._model)
        for name, tensor in fused(hf, self._model).items():
            own[name].copy_(tensor)
        return {"loaded": len(hf)}


class TinyStream(threading.Thread):
    """A token every two milliseconds; `at`: clock readings of them."""

    def __init__(self, awake: threading.Event, tokens: int) -> None:
        super().__init__(daemon=True)
        self._awake, self._tokens, self._ended = awake, tokens, threading.Event()
        self.at: list[float] = []
        self.start()

    def stop(self) -> None:
        self._ended.set()
        self.join(30)

    def run(self) -> None:
        while len(self.at) < self._tokens and not self._ended.wait(0.002):
            self._awake.wait(30)
            self.at.append(time.perf_counter())


def hugging_face(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """transformers' model with an engine's tensors, unfused by hand. Raises KeyError for one that it does not know."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**config, **eager(config))
    model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
    own, head = dict(model.named_parameters()), config["head_dim"]
    sizes = [head * config[f"num_{kind}_heads"] for kind in ("attention", "key_value", "key_value")]
    for name, tensor in tensors.items():
        if "qkv_proj" in name:
            parts = zip("qkv", tensor.split(sizes), strict=True)
            one = {name.replace("qkv_proj", f"{x}_proj"): part for x, part in parts}
        elif "gate_up_proj" in name:
            halves = zip(("gate", "up"), tensor.chunk(2), strict=True)
            one = {name.replace("gate_up_proj", f"{x}_proj"): part for x, part in halves}
        else:
            one = {_EXPERTS.sub(lambda found: _STACKED[found[1]], name): tensor}
        for key, part in one.items():
            own.pop(key).data.copy_(part)
    assert not own, f"the engine has nothing for {list(own)[:3]}"
    return model
