"""`/inference/v1/generate`: tokens in, tokens out, for clients that render and parse themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from artd_workers.gateway.engine import npy
from artd_workers.gateway.errors import ApiError, invalid
from artd_workers.gateway.http.streamed import Channel, event
from artd_workers.gateway.request.fields import refusal
from artd_workers.gateway.request.kinds import COMPLETION
from artd_workers.gateway.request.live import Sink

from .base import Ask, Json

_KIND = replace(COMPLETION, prefix="gen")
_SAME = ("model", "cache_salt", "priority")
_READ = ("token_ids", "sampling_params", "stream", "request_id", "return_token_ids", "output_mode")
_START = "routed_experts_prompt_start"
_NO_EFFECT = ("skip_special_tokens", "detokenize", "output_kind", "skip_clone", "logprobs", _START)
"""Of `sampling_params`: what concerns text, or how the engine hands tokens over."""


class GenerateApi:
    """See `Api`."""

    path = "/inference/v1/generate"

    def parse(self, body: Json) -> Ask:
        """See `Api.parse`."""
        if body.get("stream"):
            raise invalid(
                "`stream` is not supported here: leave it out, or stream chat or completions",
                param="stream",
                code="unsupported",
            )
        for name, value in body.items():
            if name not in (*_SAME, *_READ) and value is not None:
                raise refusal(name)
        tokens = body.get("token_ids")
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            raise invalid("`token_ids` must be a list of token ids, at least one", param="token_ids")
        params = body.get("sampling_params") or {}
        asked = {name: value for name, value in params.items() if name not in _NO_EFFECT and value is not None}
        asked |= {name: body[name] for name in _SAME if body.get(name) is not None}
        asked |= {"prompt": tokens, "return_token_ids": True, "logprobs": params.get("logprobs") or 0}
        return Ask(_KIND, asked, caps=True)

    def reply(self, body: Json, head: Json, choices: Sequence[Json]) -> Json:
        """See `Api.reply`."""
        start = (body.get("sampling_params") or {}).get(_START) or 0
        told = [_choice(choice, start) for choice in choices]
        return {"request_id": head["id"], "model": head["model"], "created": head["created"], "choices": told, "usage": head["usage"],
                "prompt_token_ids": choices[0]["prompt_token_ids"], "output_mode": "tokens"}  # fmt: skip

    def writer(self, body: Json, channel: Channel) -> Sink:
        """See `Api.writer`."""
        raise AssertionError("parse refuses streams")

    def error_event(self, error: ApiError) -> bytes:
        """See `Api.error_event`."""
        return event(error.body())


def _choice(choice: Json, start: int) -> Json:
    best = choice.get("generation_top_log_probs")
    content = [
        {
            "token": f"token_id:{token}",
            "logprob": value,
            "top_logprobs": [_entry(*one) for one in best[at]] if best else [_entry(token, value)],
        }
        for at, (token, value) in enumerate(
            zip(choice["generation_token_ids"], choice["generation_log_probs"], strict=True)
        )
    ]
    shown = {"index": choice["index"], "token_ids": choice["generation_token_ids"], "logprobs": {"content": content},
             "finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason"), "routed_experts": None}  # fmt: skip
    if routed := choice.get("routed_experts"):
        shown["routed_experts"] = {"data": _rows_from(routed, choice["routed_experts_start"], start), "start": start}
    return shown


def _entry(token: int, logprob: float) -> Json:
    return {"token": f"token_id:{token}", "logprob": logprob}


def _rows_from(array: bytes, first: int, start: int) -> bytes:
    """Return a .npy array of rows, whose first is that of token `first`, without those before token `start`."""
    ids = npy.read(array)
    row = ids.layers * ids.topk * ids.width
    data = ids.data[max(start - first, 0) * row :]
    return npy.write(npy.Ids(len(data) // row, ids.layers, ids.topk, ids.width, data))
