"""Serves HTTP: routes, the bearer check, error replies."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from artd_schema.data.trajectory import Split
from artd_schema.wire.rollout_names import ROOT
from artd_workers.gateway.apis.base import Api
from artd_workers.gateway.apis.generate import GenerateApi
from artd_workers.gateway.apis.messages import MessagesApi
from artd_workers.gateway.apis.openai import OpenAiApi
from artd_workers.gateway.apis.parse import parse
from artd_workers.gateway.apis.responses import ResponsesApi
from artd_workers.gateway.apis.shapes import error_body
from artd_workers.gateway.apis.tokenize import to_render
from artd_workers.gateway.errors import ApiError, invalid
from artd_workers.gateway.limits import Limits
from artd_workers.gateway.request.asked import Asking
from artd_workers.gateway.request.deliver import encode
from artd_workers.gateway.request.flow import Flow
from artd_workers.gateway.request.kinds import CHAT, COMPLETION
from artd_workers.gateway.request.request import Job
from artd_workers.gateway.routing import Table

from .auth import check_bearer
from .body import json_object, read_body, while_connected
from .patience import REFUSED
from .rollout import UnderRollouts, repeats, rollout_of
from .streamed import Channel, Streamed, Whole

SPLIT_HEADER = "x-artd-split"
_CLIENT_GONE = 499
_SPLITS = ("train", "eval")
MESSAGES = MessagesApi()
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/inference/v1/generate", "/tokenize", "/v1/models",
)  # fmt: skip


class _Guard:
    """Checks the bearer token before anything else looks at a request, unknown paths included."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.lower(): value for name, value in scope["headers"]}
            try:
                key = headers.get(b"x-api-key")  # as older Anthropic clients send it
                given = headers.get(b"authorization") or (b"Bearer " + key if key else b"")
                check_bearer(given, self._token)
            except ApiError as error:
                scope[REFUSED] = True
                await _reply(scope["path"], error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_app(table: Table, flow: Flow, asking: Asking, limits: Limits, token: str) -> ASGIApp:
    """Return the ASGI application."""
    started = int(time.time())

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_model(table, name, started) for name in table.models()]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in table.models():
            known = ", ".join(table.models()) or "none (no run exists)"
            raise ApiError(404, "model_not_found", f"model {name!r} is not live; known names: {known}", param="model")
        return _json(_model(table, name, started))

    async def read(request: Request) -> bytes:
        return await read_body(request, min(limits.body, limits.max_message), limits.body_s)

    def generates(api: Api) -> Route:
        async def endpoint(request: Request) -> Response:
            split, rollout = _split(request), rollout_of(request)
            raw = await read(request)
            body = json_object(raw)
            ask = parse(api, body)
            content = (api.path.encode(), split.encode(), raw)
            asked = asking.begin(rollout, content, repeats(request.headers)) if rollout else None
            job = Job(ask.kind, ask.body, split, ask.caps, asked)

            def end(whole: bool) -> None:
                if asked is not None:
                    asking.end(asked, whole)

            if body.get("stream"):

                def work(channel: Channel) -> Coroutine[Any, Any, None]:
                    return flow.stream(job, api.writer(body, channel))

                return Streamed(request, work, api.error_event, limits.read_s, end)
            try:
                reply = await while_connected(request, flow.answer(job))
                content_of = await encode(reply, api.reply(body, reply.head, reply.choices))
            except BaseException:
                end(False)
                raise
            return Whole(request, content_of, end)

        return Route(api.path, endpoint, methods=["POST"])

    async def count_tokens(request: Request) -> Response:
        ask = parse(MESSAGES, json_object(await read(request)))
        tokens, _ = await while_connected(request, flow.tokens(ask.kind, ask.body))
        return _json({"input_tokens": len(tokens)})

    async def tokenize(request: Request) -> Response:
        kind, body = to_render(json_object(await read(request)))
        tokens, longest = await while_connected(request, flow.tokens(kind, body))
        return _json({"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": None})

    routes = [
        *(generates(api) for api in (OpenAiApi(CHAT), OpenAiApi(COMPLETION), ResponsesApi(), MESSAGES, GenerateApi())),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]
    handlers: dict[Any, Any] = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientDisconnect: _client_gone,
        Exception: _explain_unexpected,
    }
    return UnderRollouts(_Guard(Starlette(routes=routes, exception_handlers=handlers), token))


def _split(request: Request) -> Split:
    split = request.headers.get(SPLIT_HEADER, "train")
    if split not in _SPLITS:
        raise invalid(f"header {SPLIT_HEADER} is {split!r}: must be one of {', '.join(_SPLITS)}", code="invalid_split")
    return cast(Split, split)


def _model(table: Table, name: str, created: int) -> dict[str, Any]:
    length = table.context_of(name)
    model = {"id": name, "object": "model", "created": created, "owned_by": "artd"}
    return model if length is None else model | {"max_model_len": length}


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _reply(path: str, error: ApiError) -> Response:
    return Response(error_body(path, error), status_code=error.status, headers=error.headers())


async def _api_error(request: Request, error: ApiError) -> Response:
    return _reply(request.url.path, error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        paths = ", ".join(PATHS)
        return _reply(
            request.url.path,
            ApiError(
                404, "unknown_path", f"no such path: {request.url.path}; there are {paths}, also below {ROOT}NAME"
            ),
        )
    if error.status_code == 405:
        message = f"{request.method} is not allowed for {request.url.path}"
        return _reply(request.url.path, ApiError(405, "method_not_allowed", message))
    return _reply(request.url.path, ApiError(error.status_code, "http_error", str(error.detail)))


async def _client_gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _explain_unexpected(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this reply, so that the log has its stack."""
    what = f"the gateway failed: {type(error).__name__}: {error}; its log: artctl logs gateway"
    return _reply(request.url.path, ApiError(500, "internal", what))
