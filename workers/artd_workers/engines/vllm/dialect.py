"""vLLM's HTTP as the gateway speaks it: render, generate and derender of its scale-out server, and artd's extension by /collective_rpc.

Runs in the gateway, without torch or vLLM: see `gateway.dialect`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

import msgspec

from artd_schema.codec import UNREADABLE
from artd_schema.data.trajectory import Sampling
from artd_schema.run.engines import VLLM
from artd_workers.gateway.dialect import Client, Dialect, Json, Origin, Piece, Scored, Span, Taken
from artd_workers.gateway.engine import npy
from artd_workers.gateway.errors import ApiError, EngineFailure, invalid
from artd_workers.gateway.request.kinds import Kind

from . import stops
from .text import STREAM

_TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser")
_NO_PARSER = (
    "this run's engine has no tool parser: its model's chat template writes no tool calls that artd knows;"
    " make the run with engine={'tool_parser': NAME}, and if need be 'chat_template'"
)
_GENERATE, _RPC = "/inference/v1/generate", "/collective_rpc"
_FIELD = "routed_experts"
_OMITTED = {"max_tokens": 16}
"""Its render leaves out parameters at the default of its `SamplingParams`, and its generate takes an absent max_tokens
for "no limit": a client's 16 would become the rest of the context (seen with 0.32.0)."""


class VllmDialect:
    """See `gateway.dialect.Dialect`."""

    fields = frozenset(
        [
            "add_generation_prompt",
            "add_special_tokens",
            "allowed_token_ids",
            "bad_words",
            "cache_salt",
            "chat_template_kwargs",
            "continue_final_message",
            "documents",
            "ignore_eos",
            "include_reasoning",
            "include_stop_str_in_output",
            "length_penalty",
            "logprob_token_ids",
            "min_p",
            "min_tokens",
            "priority",
            "prompt_logprobs",
            "repetition_detection",
            "repetition_penalty",
            "response_format",
            "session_id",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "stop_token_ids",
            "structured_outputs",
            "thinking_token_budget",
            "top_k",
            "truncate_prompt_tokens",
            "truncation_side",
            "vllm_xargs",
            "watermarking",
        ]
    )
    grammar: Sequence[str] = ("structured_outputs",)
    floor = VLLM.floor
    reshaping: Sequence[str] = (
        "structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "thinking_token_budget",
        "watermarking", "trace_decode_token_ids", "extra_args",
    )  # fmt: skip
    overflow: Mapping[str, str] = MappingProxyType({
        "context length": "",
        "max_tokens must be at least 1, got 0": "the prompt fills the model's whole context length: ",
        "cannot be greater than max_model_len": "more output than the model's context length: ",
    })  # fmt: skip
    hints: Mapping[int, str] = MappingProxyType({403: " (was it started with --enable-scale-out?)"})

    async def render(self, client: Client, kind: Kind, body: Json) -> list[Json]:
        path = kind.path + "/render"
        try:
            told = await client.post(path, body)
        except ApiError as error:
            if any(flag in error.message for flag in _TOOL_FLAGS):
                raise invalid(_NO_PARSER, param="tools", code="no_tool_parser") from error
            raise
        requests = [told] if kind.chat else told
        if not isinstance(requests, list) or not requests:
            raise EngineFailure(client.name, f"{path} answered {type(told).__name__}, not generate requests")
        for request in requests:
            if not isinstance(request, dict) or not request.get("token_ids") or "sampling_params" not in request:
                raise EngineFailure(client.name, f"{path} answered without token_ids and sampling_params")
        return requests

    def sampling(self, params: Json) -> Sampling:
        given = {name: params[name] for name in Sampling.__struct_fields__ if params.get(name) is not None}
        stop = given.get("stop", ())
        try:
            found = msgspec.convert(given | {"stop": (stop,) if isinstance(stop, str) else stop}, Sampling)
        except msgspec.ValidationError as error:
            raise invalid(f"sampling parameters: {error}", code="invalid_sampling") from None
        return msgspec.structs.replace(found, top_k=max(found.top_k, 0))

    def to_generate(self, request: Json, *, model: str, request_id: str, salt: str) -> Json:
        params = request["sampling_params"]
        return request | {
            "model": model,
            "request_id": request_id,
            "sampling_params": _OMITTED | params | {"logprobs": params.get("logprobs") or 0},
            "cache_salt": f"{salt}:{request.get('cache_salt') or ''}",
            "stream": False,
        }

    async def generate(self, client: Client, request: Json) -> Any:
        return await client.post(_GENERATE, request, unbounded=True)

    async def stream(
        self, client: Client, kind: Kind, body: Json, request: Json, *, logprobs: bool
    ) -> AsyncGenerator[Piece, None]:
        asked = {"generate": request, "chat" if kind.chat else "completion": body, "logprobs": logprobs}
        async with aclosing(client.events(STREAM, asked)) as events:
            async for data in events:
                event = _decode_event(client, data)
                for choice in event.get("choices") or ():
                    yield Piece(choice["index"], choice, choice.pop("shown", {}))

    def join(self, fragments: Sequence[Json]) -> Json:
        # only the last fragment has what concerns the whole choice: versions, routes, its end
        whole = dict(fragments[-1])
        whole["token_ids"] = [token for one in fragments for token in one.get("token_ids") or ()]
        content = [entry for one in fragments for entry in (one.get("logprobs") or {}).get("content") or ()]
        return whole | {"logprobs": {"content": content}}

    async def derender(
        self, client: Client, kind: Kind, body: Json, requests: Sequence[Json], replies: Sequence[Json],
        *, response_id: str, logprobs: bool,
    ) -> Any:  # fmt: skip
        generated = [
            stops.for_derender(reply, request["sampling_params"], response_id, logprobs=logprobs)
            for request, reply in zip(requests, replies, strict=True)
        ]
        prompts = [request["token_ids"] for request in requests]
        counts = [len(prompt) for prompt in prompts]
        if kind.chat:
            of_kind = {"generate_response": generated[0], "prompt_tokens": counts[0],
                       "prompt_token_ids": prompts[0], "chat_request": body}  # fmt: skip
        else:
            of_kind = {"generate_responses": generated, "prompt_tokens": counts,
                       "prompt_token_ids": prompts, "completion_request": body}  # fmt: skip
        shown = await client.post(kind.path + "/derender", {"model": body["model"]} | of_kind)
        if kind.chat and isinstance(shown, dict):
            params = requests[0]["sampling_params"]
            for choice, source in zip(shown.get("choices") or (), replies[0]["choices"], strict=False):
                # vLLM's parsers would take the choice's only token, a stop token, for text
                if stops.says_nothing(source, params):
                    choice["message"] = {"role": "assistant", "content": ""}
        return shown

    def cut_text(self, text: str, choice: Json, params: Json) -> str:
        return stops.cut_text(text, choice, params)

    def ended_by_text(self, choice: Json) -> bool:
        return isinstance(choice.get("stop_reason"), str)

    def logprobs(self, choice: Json) -> list[Scored]:
        return [_score(entry) for entry in (choice.get("logprobs") or {}).get("content") or ()]

    def alternatives(self, choice: Json) -> list[list[Scored]]:
        return [[_score(one) for one in entry.get("top_logprobs") or ()] for entry in choice["logprobs"]["content"]]

    def spans(self, choice: Json) -> list[Span]:
        told = choice.get("weight_versions") or ()
        return [Span(one["version"], one["start"], one["end"]) for one in told if one["end"] > one["start"]]

    async def trace(self, client: Client, keys: Sequence[str]) -> dict[str, Origin]:
        # No read deadline: the worker answers when the push under way is over, and the harness watches that.
        body = _call("artd_take_sampled", {"choices": list(keys)})
        told: dict[str, Origin] = await client.post(_RPC, body, unbounded=True, read=_reader(Origin))
        return told

    def take_field(self, choice: Json) -> Any:
        return choice.pop(_FIELD, None)

    def field_start(self, request: Json) -> int:
        start: int = request["sampling_params"].get("routed_experts_prompt_start", 0)
        return start

    def read_field(self, field: Any) -> npy.Ids:
        if not isinstance(field, str):
            raise ValueError(f"{type(field).__name__}, where base64 of a .npy file was expected")
        try:
            return npy.read(base64.b64decode(field, validate=True))
        except binascii.Error as error:
            raise ValueError(f"no base64: {error}") from error

    async def take_experts(self, client: Client, ids: Sequence[str], timeout_s: float) -> dict[str, Taken]:
        body = _call("artd_take_routes", {"request_ids": list(ids)}, timeout_s)
        taken: dict[str, Taken] = await client.post(_RPC, body, read=read_taken)
        return taken

    async def drop_experts(self, client: Client, ids: Sequence[str], timeout_s: float) -> None:
        await client.post(_RPC, _call("artd_drop_routes", {"request_ids": list(ids)}, timeout_s))


DIALECT: Dialect = VllmDialect()


def _decode_event(client: Client, data: bytes) -> Json:
    """Decode one event of a stream. Raises EngineFailure, and ApiError if the engine reports an error: a stream has
    status 200 by then."""
    try:
        event = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise EngineFailure(client.name, f"{STREAM} sent an event that is not JSON: {error}") from error
    if not isinstance(event, dict):
        raise EngineFailure(client.name, f"{STREAM} sent an event that is not a JSON object")
    if told := event.get("error"):
        status = told.get("code")
        raise client.error(
            STREAM, status if isinstance(status, int) else 500, str(told.get("message")), told.get("param")
        )
    return event


def _score(entry: Json) -> Scored:
    return _token_of(entry), entry["logprob"]


def _token_of(entry: Json) -> int | None:
    """Return the token that a logprob belongs to. Versions before 0.32 give it only as text: `token_id:17`."""
    if "token_id" in entry:
        token: int | None = entry["token_id"]
        return token
    number = str(entry.get("token", "")).removeprefix("token_id:")
    return int(number) if number.isdecimal() else None


# ---- artd's extension in its worker ---------------------------------------------------------------------------------


class _Reply(msgspec.Struct):
    """The reply of `/collective_rpc`: one result for each worker of the engine, all equal."""

    results: list[dict[str, msgspec.Raw]]


_reply = msgspec.json.Decoder(_Reply)


def _call(method: str, arguments: Json, timeout_s: float | None = None) -> Json:
    body: Json = {"method": method, "args": [], "kwargs": arguments}
    return body if timeout_s is None else body | {"timeout": timeout_s}


def _reader(form: type) -> Callable[[bytes], dict[str, Any]]:
    """Return a reader of replies whose results have the type `form`. It decodes choice by choice, because msgspec holds
    the GIL for a whole call, and the event loop must run in between if a thread does this. The reader raises
    codec.UNREADABLE."""
    one: msgspec.json.Decoder[Any] = msgspec.json.Decoder(form)

    def read(content: bytes) -> dict[str, Any]:
        results = _reply.decode(content).results
        return {key: one.decode(raw) for key, raw in results[0].items()} if results else {}

    return read


read_taken = _reader(Taken)
