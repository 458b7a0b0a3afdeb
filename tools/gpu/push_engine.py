"""In the engine's worker, for `tools.gpu.push` alone: spoil the weights, load them by vLLM's own road, watch its steps, count what
is held."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from artd_workers.engines.pull.session import Session
from artd_workers.engines.vllm.direct.survey import parameters
from tools.gpu.held import held


class Watched:
    """Steps of the worker and Triton kernels made ready (compiled, or read from Triton's cache), by this machine's one clock.

    Owner of: both lists. The worker's `execute_model` and Triton's hook are wrapped for good.
    """

    def __init__(self, worker: Any) -> None:
        from triton import knobs

        self.steps: list[tuple[float, float, int, int]] = []
        self.kernels: list[tuple[float, str]] = []
        execute, after = worker.execute_model, knobs.runtime.jit_post_compile_hook

        def step(scheduled: Any) -> Any:
            began = time.perf_counter()
            found = execute(scheduled)
            tokens = scheduled.total_num_scheduled_tokens
            if tokens:
                self.steps.append((began, time.perf_counter() - began, tokens, len(scheduled.num_scheduled_tokens)))
            return found

        def compiled(**words: Any) -> Any:
            self.kernels.append((time.perf_counter(), getattr(words.get("fn"), "name", "?")))
            return after(**words) if after is not None else None

        worker.execute_model, knobs.runtime.jit_post_compile_hook = step, compiled

    def take(self) -> dict[str, Any]:
        found = {"steps": self.steps[:], "kernels": self.kernels[:]}
        self.steps.clear()
        self.kernels.clear()
        return found


class ProbeCalls:
    """Beside artd's extension; `self` is vLLM's worker."""

    _artd_session: Session | None
    _watched: Watched | None = None

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

    def probe_watch(self) -> dict[str, Any]:
        """What was seen since the last call: `steps` (clock, seconds in the call, tokens, requests), `kernels` (clock, name).
        The first call begins."""
        self._watched = self._watched or Watched(self)
        return self._watched.take()

    def probe_pool(self) -> dict[str, int]:
        """How many of the tensors lie in vLLM's sleep-mode pool, by the pool's tag; "" for those that do not."""
        from vllm.device_allocator.cumem import CuMemAllocator

        held = CuMemAllocator.get_instance().pointer_to_data
        areas = [(begin, begin + data.handle[1], data.tag) for begin, data in held.items()]
        found: dict[str, int] = {}
        for tensor in parameters(self.model_runner.get_model()).values():  # type: ignore[attr-defined]
            at = tensor.data_ptr()
            tag = next((tag for begin, end, tag in areas if begin <= at < end), "")
            found[tag] = found.get(tag, 0) + 1
        return found

    def probe_held(self) -> dict[str, Any]:
        """See `held`."""
        return held()

    def probe_addresses(self) -> dict[str, Any]:
        """Addresses of the tensors, in the table's order."""
        found = parameters(self.model_runner.get_model())  # type: ignore[attr-defined]
        return {"addresses": [tensor.data_ptr() for tensor in found.values()]}
