"""vLLM's wire, as the suite sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from artd_workers.deadline import Deadline
from artd_workers.engines.http import call

from .speech import Speech

SPEECH = Speech(
    methods={
        "pause": ("/pause",),
        "resume": ("/resume",),
        "begin": ("artd_begin",),
        "join": ("/init_weight_transfer_engine",),
        "receive": ("/start_weight_update", "/update_weights", "/finish_weight_update", "artd_finish"),
        "load_merged": ("artd_load_merged", "artd_finish"),
        "finish": ("/update_weight_version", "artd_label", "/reset_prefix_cache"),
        "load_adapter": ("/v1/load_lora_adapter",),
        "check_adapter": ("artd_check_adapter",),
        "unload_adapter": ("/v1/unload_lora_adapter",),
        "in_flight": ("/metrics",),
        "score": ("/v1/completions",),
        "warm": ("artd_warm",),
        "capture_routes": ("artd_capture_routes",),
        "abort_all": ("/abort_requests",),
        "direct_table": ("artd_direct_table",),
        "direct_open": ("artd_direct_open",),
        "direct_expect": ("artd_direct_expect",),
        "direct_room": ("artd_direct_room",),
        "direct_stage": ("artd_direct_stage", "artd_direct_staged"),
        "direct_pull": ("artd_direct_pull",),
        "direct_swap": ("artd_direct_swap",),
    },
    pushes={
        "disk": {
            "pause": ("/pause",),
            "transfer": ("artd_begin", "artd_finish", "artd_load_merged"),
            "load": ("/update_weight_version", "artd_label", "/reset_prefix_cache"),
            "resume": ("/resume",),
            "verify": ("/v1/completions",),
        },
        "gloo": {
            "transfer": (
                "artd_begin", "/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update", "artd_finish",
                "/update_weights",
            ),
        },
        "stock": {
            "transfer": (
                "artd_begin", "/init_weight_transfer_engine", "artd_expect", "/start_weight_update", "/finish_weight_update",
                "artd_finish", "/update_weights",
            ),
        },
        "in_place": {"open": ("artd_direct_expect", "artd_direct_open"), "transfer": ("artd_direct_pull",)},
        "staged": {
            "open": ("artd_direct_open", "artd_direct_expect"),
            "stage": ("artd_direct_staged", "artd_direct_stage"),
            "transfer": ("artd_direct_swap",),
        },
        "lora": {"load": ("/v1/load_lora_adapter",), "verify": ("artd_check_adapter", "/v1/completions")},
    },
    texts=("load_adapter", "unload_adapter"),
    version="/version",
    health="/health",
    quiet=("/health", "/metrics"),
    optional={"weight_version": "/update_weight_version", "abort_route": "/abort_requests"},
    score="logprob",
    fine={"results": [{}]},
    held={"success": False},
    release=lambda version: {"version": version},
    stranger=({"release": "0.32.0"}, "not a vLLM server"),
)  # fmt: skip


class VllmClient:
    """See `speech.Client`."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def _ask(self, route: str, body: Any = None, method: str = "POST", timeout_s: float = 60.0) -> Any:
        return call(self._socket, method, route, body, deadline=Deadline(timeout_s))

    def complete(self, model: str, tokens: int, prompt: Sequence[int]) -> str:
        body = {"model": model, "prompt": [list(prompt)], "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "prompt_logprobs": None}  # fmt: skip
        return str(self._ask("/v1/completions", body)["choices"][0]["finish_reason"])

    def scores(self, model: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        body = {"model": model, "prompt": [list(p) for p in prompts], "max_tokens": 1, "temperature": 1.0,
                "prompt_logprobs": 0}  # fmt: skip
        choices = sorted(self._ask("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
        return [
            [row[str(token)]["logprob"] for row, token in zip(one["prompt_logprobs"][1:], prompt[1:], strict=True)]
            for one, prompt in zip(choices, prompts, strict=True)
        ]

    def running(self) -> float:
        return self._metric("vllm:num_requests_running")

    def paused(self) -> bool:
        return bool(self._ask("/is_paused", method="GET")["is_paused"])

    def prefix_hits(self) -> float:
        return self._metric("vllm:prefix_cache_hits_total")

    def label(self) -> str:
        return str(self._ask("/weight_info", method="GET")["weight_version"])

    def relabel(self, owner: str) -> None:
        label = {"owner": owner, "name": "another", "cleared": True}
        self._ask("/collective_rpc", {"method": "artd_label", "args": [], "kwargs": label})

    def generate(self, model: str, request: str, tokens: int, **sampling: Any) -> list[dict[str, Any]]:
        body = {"model": model, "token_ids": [5, 6, 7, 8, 9], "request_id": request, "cache_salt": request,
                "sampling_params": {"logprobs": 0, "max_tokens": tokens, "ignore_eos": True, **sampling}}  # fmt: skip
        choices = self._ask("/inference/v1/generate", body)["choices"]
        return sorted(choices, key=lambda choice: choice["index"])

    def sampled(self, *choices: str) -> dict[str, Any]:
        body = {"method": "artd_take_sampled", "args": [], "kwargs": {"choices": list(choices)}}
        found: dict[str, Any] = self._ask("/collective_rpc", body)["results"][0]
        return found

    def _metric(self, name: str) -> float:
        page = str(self._ask("/metrics", method="GET")).splitlines()
        return sum(float(line.split()[-1]) for line in page if line.startswith((f"{name}{{", f"{name} ")))
