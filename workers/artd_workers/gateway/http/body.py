"""Reads bodies with a size limit, and ends work when its client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from artd_schema.codec import UNREADABLE
from artd_workers.gateway.errors import ApiError, invalid

Result = TypeVar("Result")


async def read_body(request: Request, limit: int, pause_s: float) -> bytes:
    """Return the request's body. pause_s: the longest wait for its next part. Raises ApiError 413 over `limit` bytes and 408 after such a
    wait, and ClientDisconnect."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(int(announced), limit)
    body = bytearray()
    parts = aiter(request.stream())
    while (part := await _next(parts, pause_s)) is not None:
        body += part
        if len(body) > limit:
            raise _too_large(len(body), limit)
    return bytes(body)


def json_object(body: bytes) -> dict[str, Any]:
    """Return a body as a JSON object. Raises ApiError 400 when it is none."""
    try:
        value = msgspec.json.decode(body)
    except UNREADABLE as error:
        raise invalid(f"the body is no valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


async def _next(parts: AsyncIterator[bytes], pause_s: float) -> bytes | None:
    try:
        async with asyncio.timeout(pause_s):
            return await anext(parts, None)
    except TimeoutError:
        message = f"the request's body stopped for {pause_s:.0f} s before it was whole; send it again"
        raise ApiError(408, "body_timeout", message) from None


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` and return its result. The body must have been read.

    When the client goes first, cancel `work`, which closes its call to the engine, so that the engine aborts the request.
    Raises ClientDisconnect then."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_await_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _await_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body has {size} bytes or more, the limit is {limit}")
