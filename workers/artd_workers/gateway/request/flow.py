"""One request from body to reply: place → render → generate → ask who sampled it, take routed experts → derender → ledger.

A request whose tokens have come out of an engine is never generated again; what ends the reply exists for the client only once the ledger
has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import msgspec

from artd_schema.data.trajectory import Turn
from artd_workers.gateway.balance.balance import Work
from artd_workers.gateway.balance.prefixes import Prefix
from artd_workers.gateway.dialect import Origin
from artd_workers.gateway.engine import origins
from artd_workers.gateway.engine.capture import Capture
from artd_workers.gateway.engine.client import EngineClient, Engines
from artd_workers.gateway.engine.experts import Experts
from artd_workers.gateway.errors import ApiError, EngineFailure, abort_error
from artd_workers.gateway.ledger import Ledger, refuse_too_large
from artd_workers.gateway.limits import Limits
from artd_workers.gateway.routing import Place, Table

from . import turns
from .asked import Asking
from .deliver import Entry, describe, record
from .fields import cap_tokens, for_engine, refuse_unknown
from .kinds import Kind
from .live import Live, Sink
from .parts import Parts
from .reply import Reply, cut_choice
from .request import Entered, Generated, Job, Json, Rendered
from .sense import drop_grammar, refuse_senseless
from .stored import restore, show

Result = TypeVar("Result")
Attempt = Callable[[Job, Place], Awaitable[Result]]


class Flow:
    def __init__(self, table: Table, engines: Engines, ledger: Ledger, limits: Limits, asking: Asking) -> None:
        self._asking = asking
        self._table = table
        self._engines = engines
        self._ledger = ledger
        self._limits = limits
        self._experts = Experts(limits)
        self._parts = Parts(table, ledger, limits)

    async def answer(self, job: Job) -> Reply:
        """Return the answer to one request, already in the ledger. Raises ApiError."""
        job.kind.check(job.body)
        if columns := await self._recall(job):
            return restore(job, columns, self._table.routes_of(job.body["model"]))

        async def attempt(job: Job, place: Place) -> Reply:
            entry = await describe(await self._generate(job, place), self._table, self._limits)
            await self._record(job, entry)
            return entry.reply

        return await self._attempts(attempt, job)

    async def stream(self, job: Job, sink: Sink) -> None:
        """Show `sink` one request's answer as it comes; it closes once the ledger has the entry. Raises ApiError, also after the
        sink was opened."""
        job.kind.check(job.body)
        if columns := await self._recall(job):
            await show(job, columns, restore(job, columns, self._table.routes_of(job.body["model"])), sink)
            return

        async def attempt(job: Job, place: Place) -> None:
            await self._stream(job, place, sink)

        await self._attempts(attempt, job)

    async def tokens(self, kind: Kind, body: Json) -> tuple[list[int], int]:
        """Return the prompt that a request would have, and the context's length. Nothing is sampled. Raises ApiError."""
        kind.check(body)
        place = await self._table.place(body["model"])
        client = self._client(place)
        refuse_unknown(kind.chat, body, client.dialect.fields)
        upstream = for_engine(body, place.engine.base_model)
        upstream = {
            name: value for name, value in upstream.items() if name not in ("max_tokens", "max_completion_tokens")
        }
        try:
            requests = await client.dialect.render(client, kind, upstream)
        except EngineFailure as failure:
            raise _bad_gateway(failure) from failure
        return requests[0]["token_ids"], place.engine.max_model_len

    async def _recall(self, job: Job) -> list[Turn]:
        """Return the turns of a reply that the client asks for again, because it never had it; none when a new one is to be sampled."""
        if job.asked is None or not job.asked.repeats:
            return []
        turns = await self._asking.recall(self._table.run_of(job.body["model"]), job.asked)
        return [msgspec.msgpack.decode(turn, type=Turn) for turn in turns]

    async def _record(self, job: Job, entry: Entry) -> None:
        await self._asking.write(job.asked, entry.exchange, record(entry, self._ledger))

    async def _attempts(self, attempt: Attempt[Result], job: Job) -> Result:
        """Make an attempt, and another one if the first engine failed before its first token and another one serves the same, or the daemon
        has changed the routes."""
        avoid = ""
        for last in (False, True):
            place = await self._table.place(job.body["model"], avoid)
            try:
                return await attempt(replace(job, response_id=job.kind.response_id()), place)
            except EngineFailure as failure:
                if last or not failure.retriable or not await self._may_go_on(place, failure.engine):
                    raise _bad_gateway(failure) from failure
                avoid = failure.engine
        raise AssertionError("the last attempt returns or raises")

    async def _may_go_on(self, place: Place, failed: str) -> bool:
        """Return whether another attempt may do better."""
        return self._table.has_other(place, failed) or await self._table.newer(place, self._limits.retry_s)

    async def _stream(self, job: Job, place: Place, sink: Sink) -> None:
        live: Live | None = None
        try:
            async with self._enter(job, place) as at:
                live = Live(at, sink)
                with self._experts.dropped_on_error(at.client, at.place.engine.routes, at.requests):
                    replies = await live.run()
                    captures, told = await self._ask_engine(at, replies)
            made = live.collect(replies, captures, told)
            entry = await describe(made, self._table, self._limits)
        except BaseException as error:
            if live is not None and live.shown_any:
                if isinstance(error, EngineFailure):
                    error.retriable = False
                self._parts.keep(live)
            raise
        await self._record(job, entry)
        await sink.close(entry.reply.head, entry.reply.choices)

    # ---- the engine's part ------------------------------------------------------------------------------------------

    async def _generate(self, job: Job, place: Place) -> Generated:
        async with self._enter(job, place) as at:
            start = time.monotonic()
            with self._experts.dropped_on_error(at.client, at.place.engine.routes, at.requests):
                replies = await self._gather(at.client, at.requests)
                seconds = time.monotonic() - start
                captures, told = await self._ask_engine(at, replies)
            shown = await self._derender(at, replies)
        return Generated(
            job, at.place, at.client.dialect, at.requests, replies, captures, told, shown, seconds, at.dropped
        )

    async def _ask_engine(self, at: Entered, replies: list[Json]) -> tuple[list[Capture | None], list[Origin | None]]:
        """Check the replies, and ask the engine which experts and which weights made them. Raises EngineFailure, ApiError."""
        self._check(at.place, at.requests, replies)
        self._table.learn(at.place, at.work, [choice["token_ids"] for choice in replies[0]["choices"]])
        needed = at.job.split == "train"
        told = await self._origins(at, replies, needed)
        return await self._experts.take(at.client, at.place.engine.routes, at.requests, replies, needed), told

    @asynccontextmanager
    async def _enter(self, job: Job, place: Place) -> AsyncIterator[Entered]:
        """Render a request and have it inside an engine for the block. Any engine of the run renders; the tokens then decide which one
        generates."""
        made, by = await self._render(job, place), place.engine.socket
        while (visit := self._table.enter(self._table.settle(place, made.work), made.work)) is None:
            place = await self._table.place(job.body["model"], place.avoid)
            if place.engine.socket != by:
                made, by = await self._render(job, place), place.engine.socket
        place = visit.place
        try:
            client = self._client(place)
            requests = [self._request(client, job, place, request, i) for i, request in enumerate(made.requests)]
            yield Entered(job, place, client, made.upstream, requests, made.dropped, made.work)
        finally:
            self._table.leave(visit)

    async def _render(self, job: Job, place: Place) -> Rendered:
        # By the base model's name: an adapter may be unloaded as soon as its last token is out.
        refuse_senseless(job.body)
        client = self._client(place)
        dialect = client.dialect
        refuse_unknown(job.kind.chat, job.body, dialect.fields)
        upstream = for_engine(job.body, place.engine.base_model)
        if job.caps:
            cap_tokens(upstream, place.engine.max_model_len)
        requests = await dialect.render(client, job.kind, upstream)
        dropped = False
        for request in requests:
            count, limit = len(request["token_ids"]), place.engine.max_model_len
            if count >= limit:
                message = f"the prompt has {count} tokens, the model's context length is {limit}: shorten it"
                raise ApiError(400, "context_length_exceeded", message)
            sampling = dialect.sampling(request["sampling_params"])  # refused before the engine works for it
            if job.split == "train":
                dropped |= place.engine.grammar == "drop" and drop_grammar(dialect, request)
                turns.refuse_untrainable(dialect, request["sampling_params"], sampling, job.body)
        shape = place.engine.routes if job.split == "train" else None
        refuse_too_large(job.body, requests, shape, place.engine.max_model_len, self._limits)
        return Rendered(upstream, requests, dropped, self._work(place, requests))

    def _work(self, place: Place, requests: list[Json]) -> Work:
        prompts = [request["token_ids"] for request in requests]
        prefix = Prefix().extend(prompts[0]) if self._table.has_choice(place) else Prefix()
        return Work(prefix, sum(map(len, prompts)))

    def _request(self, client: EngineClient, job: Job, place: Place, request: Json, index: int) -> Json:
        """Return a generate request with our id, and a prefix cache of its own for each policy epoch. The name does not keep old entries apart: merged
        weights change under one, and after a rollback an adapter of another lineage has the name of an old one, by which alone some
        engines key their cache."""
        name, salt = f"{job.response_id}-{index}", str(place.served.epoch)
        return client.dialect.to_generate(request, model=place.upstream, request_id=name, salt=salt)

    async def _gather(self, client: EngineClient, requests: list[Json]) -> list[Json]:
        """Generate for all prompts at once; the first failure cancels the others, and is raised when they have ended."""
        # No asyncio.TaskGroup: before Python 3.13 one that fails leaves a cancel request on this task, which the
        # asyncio.timeout of 3.11.2 then takes for the client's going.
        calls = [asyncio.create_task(client.dialect.generate(client, request)) for request in requests]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _check(self, place: Place, requests: list[Json], replies: list[Json]) -> None:
        """Sort the choices and refuse replies that a push cut off or that are not whole."""
        engine = place.engine.engine
        for request, answer in zip(requests, replies, strict=True):
            wanted = request["sampling_params"].get("n", 1)
            if not isinstance(answer, dict) or len(answer.get("choices") or ()) != wanted:
                raise EngineFailure(engine, f"generate did not answer with {wanted} choices", retriable=False)
            answer["choices"].sort(key=lambda choice: choice["index"])
        choices = [choice for answer in replies for choice in answer["choices"]]
        if any(choice.get("finish_reason") == "abort" for choice in choices):
            if not any(choice.get("token_ids") for choice in choices):
                raise EngineFailure(engine, "aborted the request before its first token")
            raise abort_error(f"engine {engine} aborted the request for a push", self._limits.retry_after_s)
        if not all(choice.get("token_ids") for choice in choices):
            raise EngineFailure(engine, "generate answered with a choice without tokens", retriable=False)

    async def _origins(self, at: Entered, replies: list[Json], needed: bool) -> list[Origin | None]:
        if at.place.engine.mode == "lora":
            return [None] * sum(len(answer["choices"]) for answer in replies)
        # Looked at when the replies are there: if nothing was held until then, no push came across them.
        return await origins.ask(at.client, at.requests, replies, self._table.moved(at.place), needed)

    async def _derender(self, at: Entered, replies: list[Json]) -> Json:
        job, client = at.job, at.client
        try:
            shown = await client.dialect.derender(
                client, job.kind, at.upstream, at.requests, replies,
                response_id=job.response_id, logprobs=job.kind.wants_logprobs(job.body),
            )  # fmt: skip
        except EngineFailure as failure:
            failure.retriable = False
            raise
        except ApiError as error:
            raise EngineFailure(client.name, f"refused to derender: {error.message}", retriable=False) from error
        wanted = sum(len(answer["choices"]) for answer in replies)
        if not isinstance(shown, dict) or len(shown.get("choices") or ()) != wanted:
            raise EngineFailure(client.name, f"derender did not answer with {wanted} choices", retriable=False)
        sources = [(q["sampling_params"], c) for q, a in zip(at.requests, replies, strict=True) for c in a["choices"]]
        for choice, (params, source) in zip(shown["choices"], sources, strict=True):
            cut_choice(client.dialect, job.kind, choice, source, params)
        return shown

    def _client(self, place: Place) -> EngineClient:
        return self._engines.client(place.engine.engine, place.engine.socket, place.engine.kind)


def _bad_gateway(failure: EngineFailure) -> ApiError:
    return ApiError(502, "engine_failed", f"{failure}; its log: artctl logs {failure.engine}")
