"""One request from body to reply: place → render → generate → ask who sampled it, take routed experts → derender → ledger.

Owner of no state. Invariants: an engine is entered only between `Table.enter` and `Table.leave`; a request whose
tokens have come out of an engine is never generated again; the reply exists for the client only once the ledger has it.
"""

from __future__ import annotations

import asyncio
import time

from artd_schema.trajectory import Split
from artd_workers.gateway.dialect import Origin
from artd_workers.gateway.engine import origins
from artd_workers.gateway.engine.client import EngineClient, Engines
from artd_workers.gateway.engine.experts import Experts
from artd_workers.gateway.errors import ApiError, EngineFailure, aborted
from artd_workers.gateway.ledger import Ledger, refuse_too_large
from artd_workers.gateway.limits import Limits
from artd_workers.gateway.routing import Place, Table

from . import turns
from .deliver import deliver
from .kinds import Kind
from .request import Generated, Job, Json
from .sense import refuse_senseless


class Flow:
    def __init__(self, table: Table, engines: Engines, ledger: Ledger, limits: Limits) -> None:
        self._table = table
        self._engines = engines
        self._ledger = ledger
        self._limits = limits
        self._experts = Experts(limits)

    async def answer(self, kind: Kind, body: Json, split: Split) -> bytes:
        """The JSON reply to one request, already in the ledger. Errors: ApiError."""
        kind.check(body)
        try:
            return await self._attempt(kind, body, split)
        except _Retry:
            try:
                return await self._attempt(kind, body, split)
            except _Retry as again:
                raise _bad_gateway(again.failure) from again

    async def _attempt(self, kind: Kind, body: Json, split: Split) -> bytes:
        job = Job(kind, body, split, kind.response_id())
        place = await self._table.place(body["model"])
        try:
            return await deliver(await self._generate(job, place), self._table, self._ledger, self._limits)
        except EngineFailure as failure:
            if failure.retriable and await self._table.newer(place, self._limits.retry_s):
                raise _Retry(failure) from failure
            raise _bad_gateway(failure) from failure

    # ---- the engine's part ------------------------------------------------------------------------------------------

    async def _generate(self, job: Job, place: Place) -> Generated:
        upstream, requests = await self._render(job, place)
        while not self._table.enter(place):
            before, place = place, await self._table.place(job.body["model"])
            if place.engine.socket != before.engine.socket:
                upstream, requests = await self._render(job, place)
        start = time.monotonic()
        try:
            client = self._client(place)
            requests = [self._request(client, job, place, request, i) for i, request in enumerate(requests)]
            with self._experts.dropped_on_error(client, place.engine.routes, requests):
                replies = await self._gather(client, requests)
                seconds = time.monotonic() - start
                self._check(place, requests, replies)
                needed = job.split == "train"
                told = await self._origins(client, place, requests, replies, needed)
                captures = await self._experts.take(client, place.engine.routes, requests, replies, needed)
            shown = await self._derender(job, client, upstream, requests, replies)
        finally:
            self._table.leave(place)
        return Generated(job, place, client.dialect, requests, replies, captures, told, shown, seconds)

    async def _render(self, job: Job, place: Place) -> tuple[Json, list[Json]]:
        # By the base model's name: an adapter may be unloaded as soon as its last token is out.
        refuse_senseless(job.body)
        upstream = job.kind.upstream_body(job.body, place.engine.base_model)
        client = self._client(place)
        dialect = client.dialect
        requests = await dialect.render(client, job.kind, upstream)
        for request in requests:
            count, limit = len(request["token_ids"]), place.engine.max_model_len
            if count >= limit:
                message = f"the prompt has {count} tokens, the model's context length is {limit}: shorten it"
                raise ApiError(400, "context_length_exceeded", message)
            sampling = dialect.sampling(request["sampling_params"])  # refused before the engine works for it
            if job.split == "train":
                turns.refuse_untrainable(dialect, request["sampling_params"], sampling, job.body)
        shape = place.engine.routes if job.split == "train" else None
        refuse_too_large(job.body, requests, shape, place.engine.max_model_len, self._limits)
        return upstream, requests

    def _request(self, client: EngineClient, job: Job, place: Place, request: Json, index: int) -> Json:
        """A generate request: our id, and a prefix cache of its own per policy epoch. The name does not keep old entries apart: merged
        weights change under one, and after a rollback an adapter of another lineage has the name of an old one, by which alone some
        engines key their cache."""
        name, salt = f"{job.response_id}-{index}", str(place.served.epoch)
        return client.dialect.to_generate(request, model=place.upstream, request_id=name, salt=salt)

    async def _gather(self, client: EngineClient, requests: list[Json]) -> list[Json]:
        """All prompts at once; the first failure cancels the others, and is raised when they have ended."""
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
            raise aborted(f"engine {engine} aborted the request for a push", self._limits.retry_after_s)
        if not all(choice.get("token_ids") for choice in choices):
            raise EngineFailure(engine, "generate answered with a choice without tokens", retriable=False)

    async def _origins(
        self, client: EngineClient, place: Place, requests: list[Json], replies: list[Json], needed: bool
    ) -> list[Origin | None]:
        if place.engine.mode == "lora":
            return [None] * sum(len(answer["choices"]) for answer in replies)
        # Looked at when the replies are there: if nothing was held until then, no push came across them.
        return await origins.ask(client, requests, replies, self._table.moved(place), needed)

    async def _derender(
        self, job: Job, client: EngineClient, upstream: Json, requests: list[Json], replies: list[Json]
    ) -> Json:
        try:
            shown = await client.dialect.derender(
                client, job.kind, upstream, requests, replies,
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
        return shown

    def _client(self, place: Place) -> EngineClient:
        return self._engines.client(place.engine.engine, place.engine.socket, place.engine.kind)


class _Retry(Exception):
    """A failed attempt that may be made once more, as the daemon has changed the routes since."""

    def __init__(self, failure: EngineFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def _bad_gateway(failure: EngineFailure) -> ApiError:
    return ApiError(502, "engine_failed", f"{failure}; its log: artctl logs {failure.engine}")
