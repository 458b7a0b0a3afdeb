"""vLLM's control routes as an `Adapter`.

Purpose: translate the contract of `base.py` to a vLLM server's HTTP; version differences come from its capability row.
Owner of: which rendezvous file this engine has joined. Invariants: no route is called without a deadline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from artd_schema.manifest import WeightEntry
from artd_schema.trajectory import RouteShape

from ..base import VLLM, Deadline, DiskLoad, EngineError, EngineTimeout, Fence, capabilities
from ..http import call

_RESET_TRIES = 20
_LORA_GAUGE = re.compile(r"^vllm:lora_requests_info\{(?P<labels>.*)\}\s+(?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class VllmAdapter:
    """See `base.Adapter`. socket: the server's Unix socket; the server must be healthy when this is made."""

    def __init__(self, socket: Path, deadline: Deadline) -> None:
        self._socket = str(socket)
        self._joined = ""
        reply = self._call("GET", "/version", deadline=deadline)
        if not isinstance(reply, dict) or "version" not in reply:
            raise EngineError(f"GET /version answered {reply!r}: this is no vLLM server")
        self.version = str(reply["version"])
        self.capabilities = capabilities(VLLM, self.version)

    def healthy(self, deadline: Deadline) -> bool:
        try:
            self._call("GET", "/health", deadline=deadline)
        except EngineError:
            return False
        return True

    def pause(self, drain_s: float, deadline: Deadline) -> bool:
        if drain_s > 0:
            try:
                self._call("POST", "/pause", query={"mode": "wait", "clear_cache": "true"}, deadline=Deadline(drain_s))
                return False
            except EngineTimeout:
                pass  # requests are still running after drain_s: abort them
        self._call("POST", "/pause", query={"mode": "abort", "clear_cache": "true"}, deadline=deadline)
        return True

    def resume(self, deadline: Deadline) -> None:
        self._call("POST", "/resume", deadline=deadline)

    def begin(self, fence: Fence, deadline: Deadline) -> None:
        self._rpc("artd_begin", {"fence": fence.as_json()}, deadline)

    def join(self, rendezvous: str, deadline: Deadline) -> None:
        if rendezvous == self._joined:
            return
        info = {"rendezvous": rendezvous, "timeout_s": deadline.left}
        self._call("POST", "/init_weight_transfer_engine", {"init_info": info}, deadline=deadline)
        self._joined = rendezvous

    def receive(self, fence: Fence, table: Sequence[WeightEntry], deadline: Deadline) -> dict[str, float]:
        self._call("POST", "/start_weight_update", {} if self.capabilities.start_body else None, deadline=deadline)
        info = {"fence": fence.as_json(), "table": rows(table), "timeout_s": deadline.left}
        self._call("POST", "/update_weights", {"update_info": info}, deadline=deadline)
        self._call("POST", "/finish_weight_update", deadline=deadline)
        return self._close(fence, deadline)

    def load_merged(
        self, fence: Fence, table: Sequence[WeightEntry], load: DiskLoad, deadline: Deadline
    ) -> dict[str, float]:
        arguments = {
            "fence": fence.as_json(),
            "base": None if load.base is None else str(load.base),
            "checkpoint": str(load.checkpoint),
            "scale": load.scale,
            "dtype": load.dtype,
            "table": rows(table),
        }
        self._rpc("artd_load_merged", arguments, deadline)
        return self._close(fence, deadline)

    def finish(self, name: str, deadline: Deadline) -> None:
        if self.capabilities.weight_version:
            self._call("POST", "/update_weight_version", {"new_version": name}, deadline=deadline)
        for _ in range(_RESET_TRIES):
            reply = self._call("POST", "/reset_prefix_cache", deadline=deadline)
            if not isinstance(reply, dict) or reply.get("success") is not False:
                return
        raise EngineError(
            "POST /reset_prefix_cache: blocks are still held while paused, so old prefixes would outlive the push"
        )

    def load_adapter(self, name: str, folder: Path, deadline: Deadline) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        self._call("POST", "/v1/load_lora_adapter", body, deadline=deadline)

    def unload_adapter(self, name: str, deadline: Deadline) -> None:
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, deadline=deadline)

    def in_flight(self, name: str, deadline: Deadline) -> bool:
        return name in active_adapters(str(self._call("GET", "/metrics", deadline=deadline)))

    def score(self, model: str, prompts: Sequence[Sequence[int]], deadline: Deadline) -> list[list[float]]:
        body = {
            "model": model,
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        reply = self._call("POST", "/v1/completions", body, deadline=deadline)
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        if len(choices) != len(prompts):
            raise EngineError(f"/v1/completions answered {len(choices)} of {len(prompts)} canary prompts")
        return [_scores(choice["prompt_logprobs"], prompt) for choice, prompt in zip(choices, prompts, strict=True)]

    def capture_routes(self, shape: RouteShape, deadline: Deadline) -> None:
        if self.capabilities.routes == "hooks":
            values = {"layers": shape.layers, "topk": shape.topk, "experts": shape.experts}
            self._rpc("artd_capture_routes", values, deadline)

    def abort_all(self, deadline: Deadline) -> None:
        if self.capabilities.abort_route:
            self._call("POST", "/abort_requests", {}, deadline=deadline)

    def _close(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        (figures,) = self._rpc("artd_finish", {"fence": fence.as_json()}, deadline)
        return {key: float(value) for key, value in figures.items()}

    def _rpc(self, method: str, arguments: dict[str, Any], deadline: Deadline) -> list[Any]:
        body = {"method": method, "args": [], "kwargs": arguments, "timeout": deadline.left}
        reply = self._call("POST", "/collective_rpc", body, deadline=deadline)
        results = reply.get("results") if isinstance(reply, dict) else None
        if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], dict):
            raise EngineError(f"/collective_rpc {method} answered {reply!r}, expected one result of one worker")
        return results

    def _call(
        self, method: str, route: str, body: Any = None, *, deadline: Deadline, query: dict[str, str] | None = None
    ) -> Any:
        path = f"{route}?{urlencode(query)}" if query else route
        return call(self._socket, method, path, body, deadline=deadline)


def rows(table: Sequence[WeightEntry]) -> list[list[Any]]:
    """A weight table as JSON: [name, dtype, shape, sha256] per tensor."""
    return [[entry.name, entry.dtype, list(entry.shape), entry.sha256] for entry in table]


def active_adapters(metrics: str) -> set[str]:
    """Adapter names that run or wait, from a /metrics page.

    The gauge has one series per combination of names ever seen and its value is a time: the latest one is the truth.
    """
    series = [(float(match["value"]), dict(_LABEL.findall(match["labels"]))) for match in _LORA_GAUGE.finditer(metrics)]
    if not series:
        return set()
    labels = max(series, key=lambda item: item[0])[1]
    names = f"{labels.get('running_lora_adapters', '')},{labels.get('waiting_lora_adapters', '')}"
    return {name for name in names.split(",") if name}


def _scores(prompt_logprobs: Any, prompt: Sequence[int]) -> list[float]:
    """Logprob of each given token but the first. vLLM: a list, null first, then {token id: {logprob, ...}} per token."""
    if not isinstance(prompt_logprobs, list) or len(prompt_logprobs) != len(prompt):
        raise EngineError("/v1/completions gave no logprob per canary token")
    try:
        return [float(row[str(token)]["logprob"]) for row, token in zip(prompt_logprobs[1:], prompt[1:], strict=True)]
    except (KeyError, TypeError) as error:
        raise EngineError(f"/v1/completions gave prompt logprobs in another form than expected: {error!r}") from None
