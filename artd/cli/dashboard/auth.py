"""Who may read the dashboard: whoever has its token, in the link that it printed, in a cookie, or as a bearer token."""

from __future__ import annotations

import hmac

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "artd_dashboard"
OPEN = ("/healthz", "/readyz")
"""Paths that need no token: they say whether artd is well, and nothing else."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}
"""On every answer. What models and users wrote is text: no page of this origin runs a script that is not a file of artd."""


class Guard:
    """ASGI middleware: it checks the token, and puts HEADERS on every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._choose(Request(scope))
        await answer(scope, receive, send_with_headers)

    def _choose(self, request: Request) -> ASGIApp:
        if given := request.query_params.get("token"):
            return self._enter(request, given)
        if request.url.path in OPEN or self._may_read(request):
            return self._app
        return PlainTextResponse("open the link that `artd dashboard` printed: it has the token\n", 401)

    def _enter(self, request: Request, given: str) -> RedirectResponse | PlainTextResponse:
        """Swap the token of a link for a cookie, so that it does not stay in the address bar."""
        if not self._is_token(given):
            return PlainTextResponse("the token is wrong: open the link that `artd dashboard` printed last\n", 401)
        answer = RedirectResponse(request.url.path, 303)
        answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
        return answer

    def _may_read(self, request: Request) -> bool:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        return self._is_token(request.cookies.get(COOKIE, "")) or (
            scheme.lower() == "bearer" and self._is_token(bearer.strip())
        )

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())
