"""artd in vLLM's API server (`--middleware`): vLLM's own control routes obey only their harness.

These routes carry no fence. A harness that was stopped and replaced, and wakes up, could otherwise pause or resume an engine
that is not its own, relabel its weights or take its adapters. The calls that artd adds by /collective_rpc have fences
(`gate.py`); within one spawn there is one harness, whose pushes are in order. A guarded route without the right header is
refused before vLLM sees it; everything else passes unchanged. The guard also counts the requests that wait for the engine, for
the watch of its progress (`work`). It imports only the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

HEADER = "x-artd-owner"
ROUTES = frozenset(
    (
        "/pause", "/resume", "/abort_requests", "/reset_prefix_cache", "/update_weight_version",
        "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    )
)  # fmt: skip
GENERATING = frozenset(("/inference/v1/generate", "/v1/completions", "/v1/chat/completions"))
IN_FLIGHT = "/artd/in_flight"
"""The route that returns how many generating requests wait for the engine."""
MIDDLEWARE = f"{__name__}.Guard"
OK, CONFLICT = 200, 409
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


def owner(instance: str, spawn: int) -> str:
    """Return the header of calls to this spawn's server."""
    return f"{instance}/{spawn}"


def own(environ: Mapping[str, str] = os.environ) -> str:
    """Return the header of this process's spawn: the same in the harness and in its server."""
    return owner(environ.get("ARTD_INSTANCE", ""), int(environ["ARTD_SPAWN"]))


def refusal(route: str, told: str) -> str:
    """Return why a call is refused, "" when it is not. `told`: the value of its header."""
    if route not in ROUTES or told == own():
        return ""
    return f"{route} for {told or 'nobody'}, but this engine belongs to instance and spawn {own()}"


class Guard:
    """The ASGI middleware. It never touches a body that passes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._in_flight = 0

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            told = dict(scope["headers"]).get(HEADER.encode(), b"").decode("latin-1")
            if why := refusal(scope["path"], told):
                await _answer(send, CONFLICT, {"error": {"message": why}})
                return
            if scope["path"] == IN_FLIGHT:
                await _answer(send, OK, {"requests": self._in_flight})
                return
            if scope["path"] in GENERATING:
                self._in_flight += 1
                try:
                    await self._app(scope, receive, send)
                finally:
                    self._in_flight -= 1
                return
        await self._app(scope, receive, send)


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
