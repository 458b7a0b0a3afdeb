"""A scripted engine on a Unix socket that speaks vLLM 0.32's render, generate and derender. One token is one character.

What it says is scripted by attributes; what it was asked is in `calls`. Its JSON has the form seen on the real server.
With `routes` it captures routed experts as artd's worker extension does: `captured` is what nobody took or dropped yet.
`sampled` is what that extension tells of the weights that sampled the tokens, a choice each; None: it does not know.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from artd_schema.data.trajectory import RouteShape
from artd_workers.gateway.engine import npy
from tests.fakes.routes import rows_of

Json = dict[str, Any]


class QuietServer(uvicorn.Server):
    """uvicorn without signal handlers, as several run in one test process."""

    def install_signal_handlers(self) -> None:
        return

    async def main_loop(self) -> None:
        """uvicorn's own looks every 0.1 s whether it shall end."""
        while not self.should_exit:
            await asyncio.sleep(0.005)

    @asynccontextmanager
    async def running(self, **listen: Any) -> AsyncIterator[QuietServer]:
        task = asyncio.create_task(self._serve(**listen))
        while not self.started:
            assert not task.done(), "uvicorn did not start"
            await asyncio.sleep(0.005)
        try:
            yield self
        finally:
            self.should_exit = True
            with suppress(asyncio.CancelledError):
                await task

    async def shutdown(self, sockets: Any = None) -> None:
        """At once; uvicorn's own sleeps."""
        for server in self.servers:
            server.close()
        self.cut()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Break every connection, as a killed process does."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class FakeEngine:
    """texts: what the choices say, in turn; EOS is the character `$`. gate: generate waits for it. routes: capture
    experts in this shape; damage: a function that changes what is told of a choice's (or the reply's edit does). says: a
    function of the model's name that gives text and weight version instead."""

    kind = "vllm"
    without_model: tuple[str, ...] = ("/collective_rpc",)
    field = False
    """Whether its replies hold the experts, of all layers."""

    def __init__(self, socket: str, *, base_model: str = "tiny", max_model_len: int = 100) -> None:
        self.socket = socket
        self.base_model = base_model
        self.max_model_len = max_model_len
        self.texts = ["Paris$"]
        self.versions: list[tuple[str, float]] = [("default", 1.0)]
        self.abort: list[int] | None = None
        self.fail: dict[str, tuple[int, Any]] = {}
        self.edit: Any = None
        self.extra_params: Json = {}
        self.tool_calls: list[Json] = []
        self.models: set[str] = {base_model}
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.cancelled = 0
        self.calls: list[tuple[str, Any]] = []
        self.routes: RouteShape | None = None
        self.captured: dict[str, Json] = {}
        self.damage: Any = None
        self.sampled: list[Json | None] = []
        self.says: Any = None
        self.chunk = 2
        self.reasoning: str | None = None
        self.deltas: list[Json] = []
        self.step: Any = None
        self.open_streams = 0
        self.stream_error: Json | None = None
        self.server = QuietServer(uvicorn.Config(self._app(), uds=socket, log_level="critical", lifespan="off"))

    def bodies(self, suffix: str) -> list[Any]:
        return [body for path, body in self.calls if path.endswith(suffix)]

    def salts(self) -> list[str]:
        """What separates the prefix caches of the requests so far."""
        return [body["cache_salt"] for body in self.bodies("/generate")]

    def replace(self, path: str, answer: Any) -> None:
        """Answer calls of a path by another coroutine function of (request, body)."""
        self._answers[path] = answer

    def _app(self) -> Starlette:
        self._answers: dict[str, Any] = {
            "/v1/chat/completions/render": self._render_chat,
            "/v1/completions/render": self._render_completions,
            "/inference/v1/generate": self._generate,
            "/v1/chat/completions/derender": self._derender_chat,
            "/v1/completions/derender": self._derender_completions,
            "/collective_rpc": self._rpc,
            "/artd/stream": self._stream,
        }
        return Starlette(routes=[Route(path, self._endpoint(path), methods=["POST"]) for path in self._answers])

    def _endpoint(self, path: str) -> Any:
        async def endpoint(request: Request) -> Response:
            body = await request.json()
            self.calls.append((path, body))
            for suffix, (status, content) in self.fail.items():
                if path.endswith(suffix):
                    return content if isinstance(content, Response) else JSONResponse(content, status_code=status)
            asked = body.get("generate") or body
            if asked.get("model") not in self.models and path not in self.without_model:
                return _error(404, f"The model `{asked['model']}` does not exist.")
            result = await self._answers[path](request, body)
            return result if isinstance(result, Response) else JSONResponse(result)

        return endpoint

    # ---- render -----------------------------------------------------------------------------------------------------

    async def _render_chat(self, request: Request, body: Json) -> Any:
        prompt = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"]) + "<assistant>"
        asked = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        return self._rendered(prompt, body, asked, "chatcmpl-1")

    async def _render_completions(self, request: Request, body: Json) -> Any:
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        if prompts and isinstance(prompts[0], int):
            prompts = ["".join(map(chr, prompts))]
        rendered = [self._rendered(p, body, body.get("logprobs"), f"cmpl-1-{i}") for i, p in enumerate(prompts)]
        return next((r for r in rendered if isinstance(r, Response)), rendered)

    def _rendered(self, prompt: str, body: Json, logprobs: int | None, request_id: str) -> Any:
        left = self.max_model_len - len(prompt)
        if (body.get("max_tokens") or 0) > self.max_model_len:
            return _error(400, f"max_tokens={body['max_tokens']} cannot be greater than max_model_len=...")
        if left == 0:
            return _error(400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)")
        if left < 0:
            return _error(400, f"This model's maximum context length is {self.max_model_len} tokens. However, ...")
        params = {"n": body.get("n", 1), "temperature": body.get("temperature", 1.0), "top_p": body.get("top_p", 1.0),
                  "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
                  "stop": body.get("stop") or [], "stop_token_ids": body.get("stop_token_ids") or [],
                  "max_tokens": min(left, body.get("max_tokens") or left), "output_kind": 2, "skip_clone": True,
                  "bad_words": body.get("bad_words") or [], "skip_reading_prefix_cache": False}  # fmt: skip
        optional = {"seed": body.get("seed"), "logprobs": logprobs, "top_k": body.get("top_k")}
        params |= {name: value for name, value in optional.items() if value is not None} | self.extra_params
        if params["max_tokens"] == 16:  # vLLM leaves out its own default, and generate then sees no limit
            del params["max_tokens"]
        return {"request_id": request_id, "token_ids": [ord(c) for c in prompt], "token_offsets": None, "features": None,
                "sampling_params": params, "model": body["model"], "return_token_ids": None, "output_mode": "tokens",
                "stream": False, "stream_options": None, "cache_salt": None, "priority": 0}  # fmt: skip

    # ---- generate ---------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request, body: Json) -> Any:
        self._capture(body, [len(body["token_ids"])] * body["sampling_params"]["n"])
        self.entered.set()
        try:
            await self._wait(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.says is not None:
            text, version = self.says(body["model"])
            self.texts, self.versions = [text], [(version, 1.0)]
        choices = [self._choice(body, index) for index in range(body["sampling_params"]["n"])]
        self._capture(body, [len(body["token_ids"]) + len(choice["token_ids"]) - 1 for choice in choices])
        if self.field and self.routes is not None:
            for choice in choices:
                rows = self.captured.pop(f"{body['request_id']}#{choice['index']}")["routes"]
                shape = (len(rows) // self.routes.row_bytes, self.routes.layers, self.routes.topk, self.routes.width)
                choice["routed_experts"] = base64.b64encode(npy.write(npy.Ids(*shape, rows))).decode()
        total = sum(len(choice["token_ids"]) for choice in choices)
        count = len(body["token_ids"])
        reply = {"request_id": "generate-tokens-" + body["request_id"], "model": body["model"], "created": 1,
                 "usage": {"prompt_tokens": count, "completion_tokens": total, "total_tokens": count + total},
                 "prompt_logprobs": None, "prompt_token_ids": None, "output_mode": "tokens",
                 "choices": choices[::-1]}  # fmt: skip
        if self.edit is not None:
            self.edit(reply)
        return reply

    async def _stream(self, request: Request, body: Json) -> Response:
        """As the middleware in vLLM's API server does, `chunk` tokens an event, choices in turn. step: waited for before each event."""
        events = self._events(body)
        return StreamingResponse(self._paced(request, events), media_type="text/event-stream")

    async def _paced(self, request: Request, events: AsyncIterator[Json]) -> AsyncIterator[str]:
        self.open_streams += 1
        try:
            async for event in events:
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.open_streams -= 1

    async def _events(self, body: Json) -> AsyncIterator[Json]:
        generate = body["generate"]
        asked = body.get("chat") or body.get("completion") or {}
        self._capture(generate, [len(generate["token_ids"])] * generate["sampling_params"]["n"])
        self.entered.set()
        await self.gate.wait()
        if self.stream_error is not None:
            yield {"error": self.stream_error}
            return
        choices = [self._choice(generate, index) for index in range(generate["sampling_params"]["n"])]
        self._capture(generate, [len(generate["token_ids"]) + len(choice["token_ids"]) - 1 for choice in choices])
        for event in stream_events(choices, self.chunk, asked, generate["sampling_params"], body["logprobs"]):
            if self.deltas:
                number = generate.setdefault("said", 0)
                event["choices"][0]["shown"] = self.deltas[number] if number < len(self.deltas) else {}
                generate["said"] += 1
            if self.step is not None:
                await self.step()
            if self.edit is not None:
                self.edit(event)
            yield event

    async def _wait(self, request: Request) -> None:
        """Until the gate opens; when the client goes first, the request counts as cancelled, as vLLM would abort it."""
        gate, gone = asyncio.create_task(self.gate.wait()), asyncio.create_task(request.receive())
        done, pending = await asyncio.wait({gate, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if gate not in done:
            raise asyncio.CancelledError

    def _choice(self, body: Json, index: int) -> Json:
        params = body["sampling_params"]
        text, reason, stop_reason = self.texts[index % len(self.texts)], "length", None
        out = ""
        for char in text[: params.get("max_tokens", self.max_model_len - len(body["token_ids"]))]:
            out += char
            hit = next((stop for stop in params["stop"] if stop in out), None)
            if char == "$" or hit or ord(char) in params["stop_token_ids"]:
                reason, stop_reason = "stop", hit or (ord(char) if ord(char) in params["stop_token_ids"] else None)
                break
        if self.abort is not None:
            out, reason, stop_reason = out[: self.abort[index]], "abort", None
        tokens = [ord(char) for char in out]
        return {"index": index, "finish_reason": reason, "stop_reason": stop_reason, "token_ids": tokens,
                "routed_experts": None, "sampling_mask": None, "weight_versions": self._spans(len(tokens)),
                "logprobs": {"content": [_logprob(token, index) for token in tokens]}}  # fmt: skip

    def _spans(self, count: int) -> list[Json]:
        spans, start = [], 0
        for version, share in self.versions:
            end = min(count, math.ceil(count * share))
            spans.append({"version": version, "start": start, "end": end})
            start = end
        return spans

    # ---- routed experts ---------------------------------------------------------------------------------------------

    def _capture(self, body: Json, rows: list[int]) -> None:
        """So many rows of each choice; the choice's index is the salt."""
        if self.routes is None:
            return
        for index, count in enumerate(rows):
            found = {"routes": rows_of(self.routes, 0, count, index), "start": 0, "rows": count, "recomputed": []}
            self.captured[f"{body['request_id']}#{index}"] = found

    async def _rpc(self, request: Request, body: Json) -> Any:
        if body["method"] == "artd_take_sampled":
            told = {key: self._sampled(key) for key in body["kwargs"]["choices"]}
            return {"results": [{key: one for key, one in told.items() if one is not None}]}
        asked = set(body["kwargs"]["request_ids"])
        names = [name for name in self.captured if name.partition("#")[0] in asked]
        found = {name: self.captured.pop(name) for name in names}
        if body["method"] == "artd_drop_routes":
            return {"results": [None]}
        assert body["method"] == "artd_take_routes", body
        for told in found.values():
            if self.damage is not None:
                self.damage(told)
            told["routes"] = base64.b64encode(told["routes"]).decode()
        return {"results": [found]}

    def _sampled(self, key: str) -> Json | None:
        index = int(key.partition("#")[2])
        return self.sampled[index] if index < len(self.sampled) else None

    # ---- derender ---------------------------------------------------------------------------------------------------

    async def _derender_chat(self, request: Request, body: Json) -> Any:
        generated = body["generate_response"]
        choices = [
            {"index": choice["index"], "message": {"role": "assistant", "content": _text(choice, body["chat_request"]), "tool_calls": self.tool_calls, "reasoning": self.reasoning},
             "logprobs": choice["logprobs"] and {"content": [_shown(e) for e in choice["logprobs"]["content"]]},
             "finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
            for choice in generated["choices"]
        ]  # fmt: skip
        return _completion("chat.completion", generated["request_id"], body["model"], choices, body["prompt_tokens"])

    async def _derender_completions(self, request: Request, body: Json) -> Any:
        flat = [choice for generated in body["generate_responses"] for choice in generated["choices"]]
        choices = [
            {"index": index, "text": _text(choice, body["completion_request"]), "finish_reason": choice["finish_reason"],
             "stop_reason": choice.get("stop_reason"),
             "logprobs": choice["logprobs"] and {"token_logprobs": [e["logprob"] for e in choice["logprobs"]["content"]]}}
            for index, choice in enumerate(flat)
        ]  # fmt: skip
        first = body["generate_responses"][0]["request_id"]
        return _completion("text_completion", first, body["model"], choices, sum(body["prompt_tokens"]))


def logprob(token: int, index: int) -> float:
    """The logprob that this engine gives a token of a choice."""
    return -(token % 7 + 1) / 8 - index


def _logprob(token: int, index: int) -> Json:
    entry = {"token_id": token, "logprob": logprob(token, index), "rank": 1}
    return entry | {"top_logprobs": [entry]}


def stream_events(choices: list[Json], chunk: int, asked: Json, params: Json, logprobs: bool) -> Iterator[Json]:
    """The events of these choices, an event of each in turn. Markup: `(x)` is reasoning x, `[f:a]` a call of f with arguments a."""
    hold = max((len(stop) for stop in params["stop"]), default=1) - 1
    for start in range(0, max(len(choice["token_ids"]) for choice in choices) or 1, chunk):
        for choice in choices:
            tokens, end = choice["token_ids"], start + chunk
            if start >= max(len(tokens), 1):
                continue
            last = end >= len(tokens)
            ended = {} if last else {"finish_reason": None, "stop_reason": None, "weight_versions": None}
            part = (
                choice
                | {"token_ids": tokens[start:end], "logprobs": {"content": choice["logprobs"]["content"][start:end]}}
                | ended
            )
            before, now = (_said(tokens[:at], last and at == end, choice, asked, hold) for at in (start, end))
            part["shown"] = {"content": now[len(before) :]} if len(now) > len(before) else {}
            if logprobs:
                part["shown"]["logprobs"] = [_shown(entry) for entry in part["logprobs"]["content"]]
            yield {"request_id": "generate-tokens-x", "usage": None, "output_mode": "tokens", "choices": [part]}


def _said(tokens: list[int], last: bool, choice: Json, asked: Json, hold: int) -> str:
    text = "".join(map(chr, tokens))
    if not last:
        return text[: len(text) - hold] if hold else text
    if isinstance(choice["stop_reason"], str):
        return text[: text.find(choice["stop_reason"])]
    return text[:-1] if choice["finish_reason"] == "stop" else text


def _shown(entry: Json) -> Json:
    return {
        "token": entry.get("token") or chr(entry["token_id"]),
        "logprob": entry["logprob"],
        "bytes": None,
        "top_logprobs": [],
    }


def _text(choice: Json, asked: Json) -> str:
    assert choice["token_ids"], "vLLM refuses to derender a choice without tokens"
    text = "".join(chr(token) for token in choice["token_ids"])
    return text.replace("$", "") if asked.get("skip_special_tokens", True) else text


def _completion(kind: str, request_id: str, model: str, choices: list[Json], prompt_tokens: int) -> Json:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "total_tokens": 0}
    return {"id": request_id, "object": kind, "created": 2, "model": model, "choices": choices, "usage": usage,
            "prompt_logprobs": None, "kv_transfer_params": None}  # fmt: skip


def _error(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)


if __name__ == "__main__":
    import sys

    FakeEngine(sys.argv[1]).server.run()
