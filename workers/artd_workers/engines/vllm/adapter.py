"""vLLM's control routes as an `Adapter`.

It translates the contract of `engines.adapter` to a vLLM server's HTTP; its capability row gives the differences of versions.
It remembers which rendezvous file this engine has joined, which offer it has opened, and whether the last pause kept requests
with their cache. Every route is called with a deadline. A call that waits in vLLM's worker carries its own, because the
executor of vLLM 0.25 ignores that of /collective_rpc.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from artd_schema.data.manifest import WeightEntry
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import InFlight
from artd_schema.wire.direct import EngineTable
from artd_schema.wire.worker import Transfer
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import DiskLoad, EngineError, EngineTimeout, Fence, capabilities
from artd_workers.engines.http import call
from artd_workers.engines.vllm.weights import stock_calls
from artd_workers.transfer.nccl.stock import await_id

from . import guard
from .versions import VERSIONS

_RESET_TRIES, _RESET_PAUSE_S = 20, 0.1
_SHOWN = 200
"""Characters of an unexpected answer that an error shows."""
_OFFER_POLL_S, _STAGE_POLL_S = 0.005, 0.01
_INNER = 0.9
"""Share of the remaining time that a wait in the worker gets, so that it gives up first and its reason comes back."""
_LORA_GAUGE = re.compile(r"^vllm:lora_requests_info\{(?P<labels>.*)\}\s+(?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class VllmAdapter:
    """The `Adapter` of a vLLM server, which must be healthy when this is made.

    `socket`: the server's Unix socket. `owner`: the value of the owner header for vLLM's own routes (see `guard`; None = this
    process's spawn).
    """

    versions = VERSIONS

    def __init__(self, socket: Path, deadline: Deadline, owner: str | None = None) -> None:
        self._socket = str(socket)
        self._headers = {guard.HEADER: guard.own() if owner is None else owner}
        self._joined = ""
        self._opened: Path | None = None
        self._kept = False
        reply = self._call("GET", "/version", deadline=deadline)
        if not isinstance(reply, dict) or "version" not in reply:
            raise EngineError(f"GET /version answered {reply!r}: this is not a vLLM server")
        self.version = str(reply["version"])
        self.capabilities = capabilities(self.versions, self.version)

    def healthy(self, deadline: Deadline) -> bool:
        try:
            self._call("GET", "/health", deadline=deadline)
        except EngineError:
            return False
        return True

    def pause(self, drain_s: float, deadline: Deadline, in_flight: InFlight = "drain") -> bool:
        self._kept = in_flight == "keep"
        if in_flight != "drain":
            # vLLM's documentation says that clear_cache has no effect here, but its code drops the cache of running requests.
            self._stop("keep", deadline, clear=not self._kept)
            return False
        if drain_s > 0:
            try:
                self._stop("wait", Deadline(drain_s))
                return False
            except EngineTimeout:
                pass  # requests are still running after drain_s: abort them
        self._stop("abort", deadline)
        return True

    def resume(self, deadline: Deadline) -> None:
        self._call("POST", "/resume", deadline=deadline)

    def begin(self, fence: Fence, deadline: Deadline) -> None:
        self._rpc("artd_begin", {"fence": fence.as_json()}, deadline)

    def join(self, rendezvous: str, deadline: Deadline, transfer: Transfer = "gloo") -> None:
        if rendezvous == self._joined:
            return
        if transfer == "stock":
            self._join_stock(Path(rendezvous), deadline)
        else:
            info = {"rendezvous": rendezvous, "timeout_s": deadline.left}
            self._call("POST", "/init_weight_transfer_engine", {"init_info": info}, deadline=deadline)
        self._joined = rendezvous

    def receive(
        self, fence: Fence, table: Sequence[WeightEntry], deadline: Deadline, transfer: Transfer = "gloo"
    ) -> dict[str, float]:
        if transfer == "stock":
            self._rpc("artd_expect", {"fence": fence.as_json(), "table": rows(table)}, deadline)
            body = stock_calls.update_body(table)
        else:
            body = {"update_info": {"fence": fence.as_json(), "table": rows(table), "timeout_s": deadline.left}}
        self._call("POST", "/start_weight_update", deadline=deadline)
        self._call("POST", "/update_weights", body, deadline=deadline)
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

    def direct_table(self, deadline: Deadline) -> EngineTable:
        (found,) = self._rpc("artd_direct_table", {}, deadline)
        try:
            return msgspec.convert(found, EngineTable)
        except msgspec.ValidationError as error:
            raise EngineError(f"artd_direct_table answered with something that is not a table: {error}") from None

    def direct_open(self, offer: Path, deadline: Deadline) -> None:
        if offer == self._opened:
            return
        while not offer.exists():
            if deadline.passed:
                raise EngineTimeout(
                    f"the trainer left no offer in {offer} within {deadline.seconds:.1f} s: see its log"
                )
            time.sleep(_OFFER_POLL_S)
        self._opened = None
        arguments = {"offer": str(offer), "timeout_s": _INNER * deadline.left, "owner": self._headers[guard.HEADER]}
        self._rpc("artd_direct_open", arguments, deadline)
        self._opened = offer

    def direct_expect(self, weights: Path, deadline: Deadline) -> None:
        self._rpc("artd_direct_expect", {"weights": str(weights), "owner": self._headers[guard.HEADER]}, deadline)

    def direct_room(self, deadline: Deadline) -> bool:
        (found,) = self._rpc("artd_direct_room", {}, deadline)
        return found.get("room") is True

    def direct_stage(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        self._rpc("artd_direct_stage", {"fence": fence.as_json(), "timeout_s": _INNER * deadline.left}, deadline)
        while not (figures := self._figures("artd_direct_staged", {}, deadline)):
            if deadline.passed:
                raise EngineTimeout(f"artd_direct_stage: not all was there within {deadline.seconds:.1f} s")
            time.sleep(_STAGE_POLL_S)
        return figures

    def direct_pull(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        arguments = {"fence": fence.as_json(), "timeout_s": _INNER * deadline.left}
        return self._figures("artd_direct_pull", arguments, deadline)

    def direct_swap(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        return self._figures("artd_direct_swap", {"fence": fence.as_json()}, deadline)

    def finish(self, name: str, deadline: Deadline) -> None:
        if self.capabilities.weight_version:
            self._call("POST", "/update_weight_version", {"new_version": name}, deadline=deadline)
        label = {"owner": self._headers[guard.HEADER], "name": name, "cleared": not self._kept}
        self._rpc("artd_label", label, deadline)
        if self._kept:
            return
        for _ in range(_RESET_TRIES):
            reply = self._call("POST", "/reset_prefix_cache", deadline=deadline)
            if not isinstance(reply, dict) or reply.get("success") is not False:
                return
            time.sleep(_RESET_PAUSE_S)  # blocks of aborted requests are freed within a step or two
        raise EngineError(
            "POST /reset_prefix_cache: blocks are still held while paused, so old prefixes would outlive the push"
        )

    def load_adapter(self, name: str, folder: Path, deadline: Deadline) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        self._call("POST", "/v1/load_lora_adapter", body, deadline=deadline, text=True)

    def check_adapter(self, folder: Path, table: Sequence[WeightEntry], deadline: Deadline) -> dict[str, float]:
        return self._figures("artd_check_adapter", {"folder": str(folder), "table": rows(table)}, deadline)

    def unload_adapter(self, name: str, deadline: Deadline) -> None:
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, deadline=deadline, text=True)

    def in_flight(self, name: str, deadline: Deadline) -> bool:
        page = str(self._call("GET", "/metrics", deadline=deadline, text=True))
        if "vllm:" not in page:
            raise EngineError(f"GET /metrics answered {page[:_SHOWN]!r}, which has no metric of vLLM's")
        return name in active_adapters(page)

    def score(self, model: str, prompts: Sequence[Sequence[int]], deadline: Deadline) -> list[list[float]]:
        body = {  # vLLM uses no cached prefix for a request that wants the prompt's logprobs
            "model": model,
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        reply = self._call("POST", "/v1/completions", body, deadline=deadline)
        try:
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        except (KeyError, TypeError):
            raise EngineError(f"/v1/completions answered {str(reply)[:_SHOWN]}, which has no choices") from None
        if len(choices) != len(prompts):
            raise EngineError(f"/v1/completions answered {len(choices)} of {len(prompts)} canary prompts")
        return [_scores(choice["prompt_logprobs"], prompt) for choice, prompt in zip(choices, prompts, strict=True)]

    def warm(self, deadline: Deadline) -> dict[str, float]:
        return self._figures("artd_warm", {"timeout_s": _INNER * deadline.left}, deadline)

    def capture_routes(self, shape: RouteShape, deadline: Deadline) -> None:
        if self.capabilities.routes == "hooks":
            values = {"layers": shape.layers, "topk": shape.topk, "experts": shape.experts}
            self._rpc("artd_capture_routes", values, deadline)

    def abort_all(self, deadline: Deadline) -> None:
        if self.capabilities.abort_route:
            self._call("POST", "/abort_requests", {}, deadline=deadline)

    def _stop(self, mode: str, deadline: Deadline, clear: bool = True) -> None:
        query = {"mode": mode, "clear_cache": "true" if clear else "false"}
        self._call("POST", "/pause", query=query, deadline=deadline)

    def _join_stock(self, rendezvous: Path, deadline: Deadline) -> None:
        try:
            unique_id = await_id(rendezvous, deadline.left)
        except (TimeoutError, ValueError) as error:
            raise EngineError(str(error)) from None
        with stock_calls.meet(unique_id, deadline.left) as meeting:
            self._call("POST", "/init_weight_transfer_engine", stock_calls.init_body(meeting), deadline=deadline)

    def _close(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        return self._figures("artd_finish", {"fence": fence.as_json()}, deadline)

    def _figures(self, method: str, arguments: dict[str, Any], deadline: Deadline) -> dict[str, float]:
        (figures,) = self._rpc(method, arguments, deadline)
        return {key: float(value) for key, value in figures.items()}

    def _rpc(self, method: str, arguments: dict[str, Any], deadline: Deadline) -> list[Any]:
        body = {"method": method, "args": [], "kwargs": arguments, "timeout": deadline.longest}
        try:
            reply = self._call("POST", "/collective_rpc", body, deadline=deadline)
        except EngineTimeout:
            raise EngineTimeout(f"{method}: no answer within {deadline.seconds:.1f} s") from None
        results = reply.get("results") if isinstance(reply, dict) else None
        if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], dict):
            raise EngineError(f"/collective_rpc {method} answered {reply!r}, expected one result of one worker")
        return results

    def _call(
        self, method: str, route: str, body: Any = None, *, deadline: Deadline, query: dict[str, str] | None = None,
        text: bool = False,
    ) -> Any:  # fmt: skip
        """Call a route. `text`: accept any answer; otherwise it must be a JSON object, or empty."""
        path = f"{route}?{urlencode(query)}" if query else route
        reply = call(self._socket, method, path, body, deadline=deadline, headers=self._headers)
        if not text and not isinstance(reply, dict | None):
            raise EngineError(f"{method} {route} answered {str(reply)[:_SHOWN]!r}: this is not an answer of vLLM")
        return reply


def rows(table: Sequence[WeightEntry]) -> list[list[Any]]:
    """Return a weight table as JSON: [name, dtype, shape, sha256 or sum64] per tensor."""
    return [
        [entry.name, entry.dtype, list(entry.shape), entry.sha256 if entry.sum64 is None else entry.sum64]
        for entry in table
    ]


def active_adapters(metrics: str) -> set[str]:
    """Return the adapter names that run or wait, from a /metrics page.

    The gauge has one series for each combination of names ever seen, whose value is a time: the latest one is current.
    """
    series = [(float(match["value"]), dict(_LABEL.findall(match["labels"]))) for match in _LORA_GAUGE.finditer(metrics)]
    if not series:
        return set()
    labels = max(series, key=lambda item: item[0])[1]
    names = f"{labels.get('running_lora_adapters', '')},{labels.get('waiting_lora_adapters', '')}"
    return {name for name in names.split(",") if name}


def _scores(prompt_logprobs: Any, prompt: Sequence[int]) -> list[float]:
    """Return the logprob of each given token but the first. vLLM gives a list: null, then {token id: {logprob, ...}} per token."""
    if not isinstance(prompt_logprobs, list) or len(prompt_logprobs) != len(prompt):
        raise EngineError("/v1/completions gave no logprob per canary token")
    try:
        return [float(row[str(token)]["logprob"]) for row, token in zip(prompt_logprobs[1:], prompt[1:], strict=True)]
    except (KeyError, TypeError) as error:
        raise EngineError(f"/v1/completions gave prompt logprobs in another form than expected: {error!r}") from None
