"""The second half of a request: what an engine generated becomes ledger entry and reply.

Every choice is traced to the weights it came from, or the request fails.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import msgspec

from artd_schema.crashpoint import reach
from artd_schema.data.trajectory import Turn
from artd_schema.wire.worker import Exchange, Served
from artd_workers.gateway.dialect import Labels, Origin
from artd_workers.gateway.engine.capture import Capture
from artd_workers.gateway.engine.client import IN_THREAD
from artd_workers.gateway.errors import EngineFailure, abort_error
from artd_workers.gateway.ledger import Ledger
from artd_workers.gateway.limits import Limits
from artd_workers.gateway.routing import Place, Table

from . import reply, turns
from .reply import Reply
from .request import Generated, Job, Json


@dataclass(frozen=True)
class _Sample:
    """One choice. index: over the whole response; served: the newest weights it came from; epochs, cache: policy and cache
    epochs over its tokens, empty when unknown."""

    index: int
    request: Json
    reply: Json
    choice: Json
    capture: Capture | None
    served: Served
    epochs: turns.Epochs
    cache: turns.Epochs

    @property
    def params(self) -> Json:
        return self.request["sampling_params"]


@dataclass(frozen=True)
class Entry:
    """A response as the ledger gets it, and as the client does."""

    exchange: Exchange
    columns: list[Turn]
    reply: Reply


async def encode(reply: Reply, other: Json | None) -> bytes:
    """Return the JSON of an answer. other: the answer in another form than the core's."""
    work = partial(msgspec.json.encode, other) if other else partial(encode_reply, reply.head, reply.choices)
    return await asyncio.to_thread(work) if reply.bulky else work()


async def record(entry: Entry, ledger: Ledger) -> None:
    """Return once the ledger has the entry. Raises ApiError."""
    reach("gateway.generated")
    await ledger.record(entry.exchange, entry.columns)
    reach("gateway.recorded")


async def describe(made: Generated, table: Table, limits: Limits) -> Entry:
    """Trace every choice to its weights, and return the response's entry. Raises EngineFailure, ApiError."""
    job, engine = made.job, made.place.engine.engine
    samples = [await _sample(made, table, limits, *source) for source in _choices(made)]
    used = max((sample.served for sample in samples), key=lambda served: served.epoch)
    head = _head(made, samples, used.name)
    with_ids = job.kind.wants_ids(job.body)
    columns: list[Turn] = []
    choices: list[Json] = []
    for sample in samples:
        shown = made.shown["choices"][sample.index]
        shown = reply.finish_choice(job.kind, shown, sample.index)
        if job.body.get("return_tokens_as_token_ids"):
            reply.spell_ids(made.dialect, shown, sample.choice)
        if with_ids and sample.params.get("logprobs"):
            reply.add_alternatives(made.dialect, job.kind, shown, sample.choice)
        kept = shown if job.asked else shown | {"logprobs": None}
        columns.append(_turn(made, sample, reply.raw_of(kept, sample.choice, sample.reply, head)))
        if with_ids:
            logprobs = turns.logprobs_of(engine, made.dialect, sample.choice)
            reply.add_ids(job.kind, shown, sample.request["token_ids"], sample.choice["token_ids"], logprobs)
            if sample.capture is not None and made.place.engine.routes is not None:
                reply.add_experts(job.kind, shown, sample.capture, made.place.engine.routes)
        choices.append(shown)
    exchange = Exchange(
        response_id=job.response_id, run=used.run, model=used.name, split=job.split, sampling=columns[0].sampling,
        choices=len(columns), prompt_tokens=head["usage"]["prompt_tokens"],
        completion_tokens=head["usage"]["completion_tokens"], seconds=made.seconds, **_rollout(job),
    )  # fmt: skip
    shown_bytes = sum(len(sample.capture.routes) for sample in samples if sample.capture) if with_ids else 0
    if with_ids and job.kind.chat:
        head |= {"prompt_token_ids": made.requests[0]["token_ids"]}
    return Entry(exchange, columns, Reply(head, choices, shown_bytes > IN_THREAD))


def _rollout(job: Job) -> Json:
    """Return what the ledger's entry says of the request's rollout."""
    asked = job.asked
    return {"rollout": asked.rollout, "place": asked.place, "request": asked.request} if asked else {}


def encode_reply(head: Json, choices: list[Json]) -> bytes:
    """JSON of the response. Choice by choice: msgspec keeps the GIL for the whole of a call, and the event loop is to run
    in between when this is done in a thread."""
    shown = b",".join([msgspec.json.encode(choice) for choice in choices])
    return b"".join((msgspec.json.encode(head)[:-1], b',"choices":[', shown, b"]}"))


def _choices(made: Generated) -> list[tuple[int, Json, Json, Json]]:
    found = [
        (request, answer, choice)
        for request, answer in zip(made.requests, made.replies, strict=True)
        for choice in answer["choices"]
    ]
    return [(index, *source) for index, source in enumerate(found)]


async def _sample(
    made: Generated, table: Table, limits: Limits, index: int, request: Json, answer: Json, choice: Json
) -> _Sample:
    served, epochs, cache = await _trace(made, choice, made.origins[index], table, limits)
    return _Sample(index, request, answer, choice, made.captures[index], served, epochs, cache)


def _head(made: Generated, samples: list[_Sample], model: str) -> Json:
    """Return the response without its choices. derender cannot know the served name, and counts no token that it did not
    see."""
    prompt = sum(len(request["token_ids"]) for request in made.requests)
    completion = sum(len(sample.choice["token_ids"]) for sample in samples)
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    head = {name: value for name, value in made.shown.items() if name != "choices"}
    return (
        head
        | {"id": made.job.response_id, "model": model, "usage": (made.shown.get("usage") or {}) | counts}
        | reply.notes(made.dropped)
    )


def _turn(made: Generated, sample: _Sample, raw: Json) -> Turn:
    return turns.build_turn(
        made.place.engine.engine,
        made.dialect,
        sample.request["token_ids"],
        sample.choice,
        sampling=made.dialect.sampling(sample.params),
        epochs=sample.epochs,
        cache=sample.cache,
        capture=sample.capture,
        response_id=made.job.response_id,
        index=sample.index,
        raw=raw,
    )


async def _trace(
    made: Generated, choice: Json, origin: Origin | None, table: Table, limits: Limits
) -> tuple[Served, turns.Epochs, turns.Epochs]:
    """Return the weights that a choice came from: (the newest of them, policy epochs and cache epochs over its tokens).

    lora: the adapter that was asked for. merged: by label, the RUN@STEP of the push: the engine's version spans, or what its
    worker told; without either it is what the route said on entry, as no push came across. Before the first push the engine
    has a label of its own, which stands for that too.
    """
    place = made.place
    if place.engine.mode == "lora":
        return place.served, *_whole(place.served)
    spans = tuple((span.start, span.version) for span in turns.spans_of(place.engine.engine, made.dialect, choice))
    if not spans and origin is None:
        return place.served, *_whole(place.served)
    policy = await _name_weights(place, spans or (origin.policy if origin else ()), table, limits)
    if place.pinned and (not policy or any(served != place.served for _, served in policy)):
        raise abort_error(f"{place.served.name} was replaced while the request ran", limits.retry_after_s)
    epochs = _epochs(policy)
    newest = policy[-1][1] if policy else place.served
    if len(epochs) == 1:
        return newest, epochs, epochs
    return newest, epochs, _epochs(await _name_weights(place, origin.cache if origin else (), table, limits))


async def _name_weights(place: Place, runs: Labels, table: Table, limits: Limits) -> list[tuple[int, Served]]:
    return [(start, await _find_weights(place, label, table, limits)) for start, label in runs]


def _epochs(runs: list[tuple[int, Served]]) -> turns.Epochs:
    return turns.run_lengths([(start, served.epoch) for start, served in runs])


def _whole(served: Served) -> tuple[turns.Epochs, turns.Epochs]:
    return ((0, served.epoch),), ((0, served.epoch),)


async def _find_weights(place: Place, label: str, table: Table, limits: Limits) -> Served:
    if "@" not in label or label == place.served.name:
        return place.served
    served = await table.find(label, limits.label_s)
    if served is None or served.run != place.served.run:
        what = f"generated with weights {label!r}, which no route of run {place.served.run!r} names"
        raise EngineFailure(place.engine.engine, what, retriable=False)
    return served
