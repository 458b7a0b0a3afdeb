"""Requests below `/rollouts/NAME/`, and those with a header that names a rollout."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from artd_schema.wire.rollout_names import HEADERS, RETRIES, ROOT, name_fault
from artd_workers.gateway.errors import invalid

_NAME = "artd rollout"
"""In the ASGI scope: the name in the request's path."""


class UnderRollouts:
    """Serves the tree of `app` below each rollout's path too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(ROOT):
            name, slash, rest = scope["path"].removeprefix(ROOT).partition("/")
            if slash:
                path = f"/{rest}"
                scope = {**scope, "path": path, "raw_path": path.encode(), _NAME: name}
        await self._app(scope, receive, send)


def rollout_of(request: Request) -> str:
    """Return the name of the rollout that a request belongs to, "" for none. Raises ApiError 400."""
    named = [("path", request.scope.get(_NAME)), *((f"header {name}", request.headers.get(name)) for name in HEADERS)]
    where, name = next(((where, name) for where, name in named if name is not None), ("", ""))
    if where and (fault := name_fault(name)):
        raise invalid(f"{where}: {fault}", code="invalid_rollout")
    return name


def repeats(headers: Mapping[str, str]) -> bool:
    """Return whether the client says that it has sent this very request before."""
    given = headers.get(RETRIES, "")
    return given.isdecimal() and int(given) > 0
