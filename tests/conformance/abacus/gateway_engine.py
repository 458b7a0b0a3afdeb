"""The abacus on a Unix socket for the gateway: scripted like `FakeEngine`, but with its own message forms."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from artd_workers.gateway.engine import npy
from tests.gateway.fake_engine import FakeEngine, Json


class FakeAbacus(FakeEngine):
    kind = "abacus"
    without_model = ("/abacus/who", "/abacus/rods", "/abacus/forget")

    def _app(self) -> Starlette:
        self._answers = {
            "/abacus/tokens": self._tokens, "/abacus/draw": self._draw, "/abacus/text": self._text,
            "/abacus/watch": self._watch, "/abacus/who": self._who, "/abacus/rods": self._rods, "/abacus/forget": self._forget,
        }  # fmt: skip
        return Starlette(routes=[Route(path, self._endpoint(path), methods=["POST"]) for path in self._answers])

    def salts(self) -> list[str]:
        return [body["salt"] for body in self.bodies("/draw")]

    async def _tokens(self, request: Request, body: Json) -> Any:
        told = await (self._render_chat if body["chat"] else self._render_completions)(request, body["body"])
        if isinstance(told, Response):
            return told
        prompts = [told] if body["chat"] else told
        return {"prompts": [{"ids": one["token_ids"], "draw": one["sampling_params"]} for one in prompts]}

    async def _draw(self, request: Request, body: Json) -> Any:
        asked = {"model": body["model"], "request_id": body["name"], "token_ids": body["ids"],
                 "sampling_params": body["draw"]}  # fmt: skip
        told = await self._generate(request, asked)
        return {"beads": [self._bead(one) for one in told["choices"]]}

    async def _watch(self, request: Request, body: Json) -> Response:
        generate = {
            "model": body["model"],
            "request_id": body["name"],
            "token_ids": body["ids"],
            "sampling_params": body["draw"],
        }
        events = self._events({"generate": generate, "chat": body["body"], "logprobs": body["scores"]})
        return StreamingResponse(self._paced(request, self._beads(events)), media_type="text/event-stream")

    async def _beads(self, events: AsyncIterator[Json]) -> AsyncIterator[Json]:
        async for event in events:
            if "error" in event:
                yield {"fault": event["error"]["message"], "status": event["error"]["code"]}
                return
            one = event["choices"][0]
            shown = one.pop("shown")
            one["weight_versions"] = one["weight_versions"] or []
            yield self._bead(one) | {"said": shown.get("content", ""), "spelt": shown.get("logprobs", [])}

    def _bead(self, one: Json) -> Json:
        scores = [
            [[s["token_id"], s["logprob"]] for s in entry["top_logprobs"]] for entry in one["logprobs"]["content"]
        ]
        weights = [[span["start"], span["end"], span["version"]] for span in one["weight_versions"]]
        bead = {"at": one["index"], "ids": one["token_ids"], "why": one["finish_reason"], "scores": scores,
                "hit": one["stop_reason"] if isinstance(one["stop_reason"], str) else "", "weights": weights}  # fmt: skip
        if one["routed_experts"]:
            ids = npy.read(base64.b64decode(one["routed_experts"]))
            bead["rods"] = [ids.layers, ids.topk, base64.b64encode(ids.data).decode()]
        return bead

    async def _text(self, request: Request, body: Json) -> Any:
        of_prompts = [
            {"request_id": body["name"], "choices": [
                {"index": index, "token_ids": ids, "finish_reason": why, "logprobs": None} for index, (ids, why) in enumerate(drawn)
            ]} for drawn in body["drawn"]
        ]  # fmt: skip
        asked = {"model": body["model"], "chat_request": body["body"], "completion_request": body["body"]}
        if body["chat"]:
            return await self._derender_chat(request, asked | {"generate_response": of_prompts[0], "prompt_tokens": 0})
        return await self._derender_completions(
            request, asked | {"generate_responses": of_prompts, "prompt_tokens": []}
        )

    async def _who(self, request: Request, body: Json) -> Any:
        told = {key: self._sampled(key) for key in body["keys"]}
        return {key: [one["policy"], one["cache"]] for key, one in told.items() if one is not None}

    async def _rods(self, request: Request, body: Json) -> Any:
        return {
            key: [base64.b64encode(one["routes"]).decode(), one["start"], one["rows"]]
            for key, one in self._take(body["names"]).items()
        }

    async def _forget(self, request: Request, body: Json) -> Any:
        self._take(body["names"])
        return {}

    def _take(self, names: list[str]) -> dict[str, Json]:
        return {key: self.captured.pop(key) for key in list(self.captured) if key.partition("#")[0] in names}
