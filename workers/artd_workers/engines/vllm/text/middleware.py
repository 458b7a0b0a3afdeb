"""Runs in vLLM's API server (`--middleware`): `/artd/stream` forwards a generate request and adds the client's text to
each event.

The request's body is `generate` (a request to /inference/v1/generate), `chat` or `completion` (the client's body) and
`logprobs`. The reply is that of the server's own route, with `shown` in each choice (see `Speaker.show`). A detokenizer
and a parser live as long as their stream. The server's own derender cannot be used for streams, because it would replay
the whole answer for every event. This middleware runs before every other one. It imports vLLM when it is called.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from artd_workers.engines.vllm.guard import App, Receive, Send

from . import STREAM
from .merge import keep_routes
from .speaker import Speaker

MIDDLEWARE = f"{__name__}.Text"
_GENERATE = "/inference/v1/generate"
_DONE = b"[DONE]"
log = logging.getLogger("vllm.artd")
Json = dict[str, Any]


class Text:
    """Pure ASGI."""

    def __init__(self, app: App) -> None:
        from vllm.outputs import RequestOutput

        keep_routes(RequestOutput)
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != STREAM:
            await self._app(scope, receive, send)
            return
        body = json.loads(await _whole(receive))
        generate = body["generate"] | {"stream": True}
        inner = scope | {"path": _GENERATE, "raw_path": _GENERATE.encode(), "headers": _headers(scope["headers"])}
        derenderer = _derenderer(scope["app"].state)
        speaker = Speaker(derenderer, generate, body.get("chat"), body.get("completion"), bool(body.get("logprobs")))
        await self._app(inner, _replay_body(json.dumps(generate).encode(), receive), _Shown(send, speaker))


class _Shown:
    """The server's `send`, with what the client sees in each event."""

    def __init__(self, send: Send, speaker: Speaker) -> None:
        self._send = send
        self._speaker = speaker
        self._streams = False
        self._held = b""
        self._failed = False

    async def __call__(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and self._streams:
            message = message | {"body": self._events(message.get("body", b""))}
        await self._send(message)

    def _events(self, part: bytes) -> bytes:
        *lines, self._held = (self._held + part).split(b"\n")
        return b"".join(self._line(line) + b"\n" for line in lines)

    def _line(self, line: bytes) -> bytes:
        data = line[5:].strip() if line.startswith(b"data:") else b""
        if not data or data == _DONE or self._failed:
            return b"" if self._failed and data and data != _DONE else line
        event = json.loads(data)
        try:
            for choice in event.get("choices") or ():
                choice["shown"] = self._speaker.show(choice)
        except Exception as error:  # a parser's fault must not end the connection without a word
            log.exception("the text of a stream cannot be made")
            self._failed = True
            event = {"error": {"message": f"its text cannot be made: {type(error).__name__}: {error}", "code": 500}}
        return b"data: " + json.dumps(event, ensure_ascii=False).encode(errors="replace")


def _derenderer(state: Any) -> Any:
    """Return vLLM's derenderer, which 0.25 keeps by itself and 0.32 in its derender route."""
    found = getattr(state, "online_derenderer", None)
    return found if found is not None else state.serving_derender.online_derenderer


async def _whole(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that has this body, and then what happens to the connection."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> dict[str, Any]:
        return left.pop() if left else await receive()

    return replay


def _headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name != b"content-length"]
