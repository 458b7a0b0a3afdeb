"""A streamed answer while it comes: the client is shown each piece at once, and the whole is kept for the ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from artd_workers.gateway.dialect import Origin, Piece
from artd_workers.gateway.engine.capture import Capture

from .message import Message
from .reply import notes
from .request import Entered, Generated, Json


class Sink(Protocol):
    """The client's end of a stream: a writer of its API."""

    async def open(self, head: Json) -> None:
        """Begin. head: `id`, `created`, `model`, `prompt_token_ids` (one list for each prompt), `n` choices of each,
        `artd` where there are notes."""

    async def show(self, index: int, delta: Json, token_ids: Sequence[int]) -> None:
        """Show what one event adds to a choice. delta: as `Piece.shown`, with the gateway's tool-call ids."""

    async def close(self, head: Json, choices: Sequence[Json]) -> None:
        """End. head: as of a whole reply, with `usage`; choices: whole ones, each with `finish_reason`."""


class Live:
    """One streamed answer. shown_any: whether anything has been shown."""

    def __init__(self, at: Entered, sink: Sink) -> None:
        self.at = at
        self.shown_any = False
        self._sink = sink
        self._n: int = at.requests[0]["sampling_params"].get("n", 1)
        self._start = time.monotonic()
        self._seconds = 0.0
        self._created = int(time.time())
        self._fragments: list[dict[int, list[Json]]] = [{} for _ in at.requests]
        self._messages: list[dict[int, Message]] = [{} for _ in at.requests]

    async def run(self) -> list[Json]:
        """Show everything; return the replies, one for each prompt, as `Dialect.generate` does. Raises EngineFailure, ApiError."""
        async with aclosing(self._pieces()) as pieces:
            async for request, piece in pieces:
                if piece.index not in self._messages[request]:
                    self._messages[request][piece.index] = Message()
                    self._fragments[request][piece.index] = []
                self._fragments[request][piece.index].append(piece.choice)
                await self._show(request, piece)
        self._seconds = time.monotonic() - self._start
        return [self._reply(request) for request in range(len(self.at.requests))]

    def collect(self, replies: list[Json], captures: list[Capture | None], told: list[Origin | None]) -> Generated:
        """Return what came out, for `describe`."""
        at = self.at
        choices = [
            self._messages[request][choice["index"]].choice(at.job.kind, choice)
            for request, reply in enumerate(replies)
            for choice in reply["choices"]
        ]
        shown = {"object": at.job.kind.object, "created": self._created, "choices": choices}
        seconds = self._seconds or time.monotonic() - self._start
        return Generated(
            at.job, at.place, at.client.dialect, at.requests, replies, captures, told, shown, seconds, at.dropped
        )

    def part(self) -> list[Json]:
        """Return replies of what has come until now: the choices with tokens."""
        replies = [self._reply(request) for request in range(len(self.at.requests))]
        return [{"choices": [choice for choice in one["choices"] if choice["token_ids"]]} for one in replies]

    # ---- inside -----------------------------------------------------------------------------------------------------

    async def _show(self, request: int, piece: Piece) -> None:
        tokens = piece.choice.get("token_ids") or ()
        if not tokens and not piece.shown:
            return
        if not self.shown_any:
            self.shown_any = True
            prompts = [one["token_ids"] for one in self.at.requests]
            await self._sink.open({
                "id": self.at.job.response_id, "created": self._created, "model": self.at.place.served.name,
                "prompt_token_ids": prompts, "n": self._n,
                **notes(self.at.dropped),
            })  # fmt: skip
        delta = self._messages[request][piece.index].add(piece.shown)
        await self._sink.show(request * self._n + piece.index, delta, tokens)

    def _reply(self, request: int) -> Json:
        """Return the reply to one prompt. A choice that ended without a finish reason was aborted: not every engine says so."""
        found = self._fragments[request]
        none: Json = {"token_ids": [], "finish_reason": "abort"}
        choices = [self._join(found[index]) if index in found else none | {"index": index} for index in range(self._n)]
        return {"choices": choices}

    def _join(self, fragments: list[Json]) -> Json:
        whole = self.at.client.dialect.join(fragments)
        return whole | {"finish_reason": whole.get("finish_reason") or "abort"}

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield (prompt, piece) of all prompts as they come; the first failure ends all."""
        if len(self.at.requests) == 1:
            async with aclosing(self._stream(0)) as stream:
                async for piece in stream:
                    yield 0, piece
            return
        queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue(_AHEAD)
        tasks = [asyncio.create_task(self._feed(request, queue)) for request in range(len(self.at.requests))]
        try:
            left = len(tasks)
            while left:
                request, found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield request, found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, request: int, queue: asyncio.Queue[tuple[int, Piece | BaseException | None]]) -> None:
        try:
            async with aclosing(self._stream(request)) as stream:
                async for piece in stream:
                    await queue.put((request, piece))
            await queue.put((request, None))
        except Exception as error:
            await queue.put((request, error))

    async def _stream(self, request: int) -> AsyncGenerator[Piece, None]:
        at = self.at
        kind, logprobs = at.job.kind, at.job.kind.wants_logprobs(at.job.body)
        found = at.client.dialect.stream(at.client, kind, at.upstream, at.requests[request], logprobs=logprobs)
        async with aclosing(found) as stream:
            async for piece in stream:
                yield piece


_AHEAD = 64
"""Events of several prompts that wait for the client."""
