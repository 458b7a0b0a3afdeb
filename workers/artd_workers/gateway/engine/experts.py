"""Takes the experts that routed each token from the engine, for the ledger, or has the engine drop them.

What an engine captured leaves it once, with its response, or is dropped. A response that is to be trained on has the routes of its
tokens as the engine gave them, or is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from artd_schema.data.trajectory import RouteShape
from artd_workers.gateway.dialect import Taken
from artd_workers.gateway.errors import ApiError, EngineFailure
from artd_workers.gateway.limits import Limits

from .capture import Capture, Choice, captures_of
from .client import EngineClient

log = logging.getLogger("artd.gateway")
Json = dict[str, Any]
_IN_THREAD = 1 << 18
"""Bytes of routes from which on they are checked away from the event loop: about a millisecond's work."""


class Experts:
    """Asks engines for what they captured."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._dropping: set[asyncio.Task[None]] = set()

    async def take(
        self,
        client: EngineClient,
        shape: RouteShape | None,
        requests: Sequence[Json],
        replies: Sequence[Json],
        needed: bool,
    ) -> list[Capture | None]:
        """Return the checked routes of every choice, in order: from the choices themselves where the engine puts them there, else
        by asking for them. None where there are none: always without a shape, and where they are not needed.
        Raises EngineFailure."""
        choices = [
            Choice(request, choice, client.dialect.take_field(choice))
            for request, reply in zip(requests, replies, strict=True)
            for choice in reply["choices"]
        ]
        if shape is None:
            return [None] * len(choices)
        taken = {} if all(choice.field for choice in choices) else await self._ask(client, requests, needed)
        size = sum(len(found.routes) for found in taken.values()) + sum(len(choice.field or "") for choice in choices)
        if size < _IN_THREAD:
            return captures_of(client.name, client.dialect, choices, taken, shape, needed)
        return await asyncio.to_thread(captures_of, client.name, client.dialect, choices, taken, shape, needed)

    @contextlib.contextmanager
    def dropped_on_error(
        self, client: EngineClient, shape: RouteShape | None, requests: Sequence[Json]
    ) -> Iterator[None]:
        """Whatever ends the block early, the client's going included, has what was captured dropped. Nobody waits for it,
        and nothing of it fails the request."""
        try:
            yield
        except BaseException:
            if shape is not None:
                task = asyncio.get_running_loop().create_task(self._drop(client, _ids(requests)))
                self._dropping.add(task)
                task.add_done_callback(self._dropping.discard)
            raise

    async def _ask(self, client: EngineClient, requests: Sequence[Json], needed: bool) -> dict[str, Taken]:
        try:
            return await client.dialect.take_experts(client, _ids(requests), self._limits.call_s)
        except (EngineFailure, ApiError) as error:
            if needed:
                raise EngineFailure(
                    client.name, f"its routed experts cannot be had: {error}", retriable=False
                ) from error
            log.warning("engine %s: its routed experts cannot be had: %s", client.name, error)
            return {}

    async def _drop(self, client: EngineClient, ids: list[str]) -> None:
        try:
            await client.dialect.drop_experts(client, ids, self._limits.call_s)
        except Exception as error:  # the engine may be gone, and its client closed; then so are the routes
            log.info("engine %s: routed experts of %s were not dropped: %s", client.name, ", ".join(ids), error)


def _ids(requests: Sequence[Json]) -> list[str]:
    return [request["request_id"] for request in requests]
