"""Asks which weights sampled each token of a response and computed its entry in the KV cache, where the reply does not say so.

An engine that stamps no replies says nothing of weights, and none says what a push did to the cache of a request in flight. artd's
worker extension knows both. The gateway asks it only for responses that a push may have met: since the request was placed, the engine
was held or a newer routing table came. The gateway confirms a hold before the engine pauses, so it misses none.
An answer covers the response's tokens from the first on, or is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from artd_workers.gateway.dialect import Dialect, Labels, Origin
from artd_workers.gateway.errors import ApiError, EngineFailure

from .client import EngineClient

log = logging.getLogger("artd.gateway")
Json = dict[str, Any]
UNKNOWN = Origin()


async def ask(
    client: EngineClient, requests: Sequence[Json], replies: Sequence[Json], across: bool, needed: bool
) -> list[Origin | None]:
    """Return the origin of every choice, in order, None where nothing is to be asked. `across`: a push may have met them. `needed`:
    they are to be trained on, so it must be known which weights sampled their tokens. Raises EngineFailure."""
    choices = [
        (f"{request['request_id']}#{choice['index']}", choice)
        for request, reply in zip(requests, replies, strict=True)
        for choice in reply["choices"]
    ]
    unclear = {
        key
        for key, choice in choices
        if _versions(client.dialect, choice) > 1 or (across and not _versions(client.dialect, choice))
    }
    if not unclear:
        return [None] * len(choices)
    told = await _take(client, sorted(unclear))
    return [_origin(client, key, choice, told, needed) if key in unclear else None for key, choice in choices]


def _origin(client: EngineClient, key: str, choice: Json, told: dict[str, Origin], needed: bool) -> Origin:
    count = len(choice["token_ids"])
    found = told.get(key, UNKNOWN)
    if found == UNKNOWN:
        if needed and not _versions(client.dialect, choice):
            what = f"does not know which weights sampled {key} while they were replaced, and without that the response"
            raise EngineFailure(client.name, f"{what} cannot be trained on: ask again", retriable=False)
        return UNKNOWN
    for runs in (found.policy, found.cache):
        starts = [start for start, _ in runs]
        if starts[:1] != [0] or any(later <= start for start, later in zip(starts, starts[1:], strict=False)):
            raise EngineFailure(client.name, f"told of {key} that its weights were {runs}", retriable=False)
    return Origin(_within(found.policy, count), _within(found.cache, count))


async def _take(client: EngineClient, keys: list[str]) -> dict[str, Origin]:
    try:
        return await client.dialect.trace(client, keys)
    except (EngineFailure, ApiError) as error:
        log.warning("engine %s: who sampled %s cannot be had: %s", client.name, ", ".join(keys), error)
        return {}


def _within(runs: Labels, count: int) -> Labels:
    """Without runs behind the last token: a stop string is found in the text, and the engine went on meanwhile."""
    return tuple((start, label) for start, label in runs if start < count)


def _versions(dialect: Dialect, choice: Json) -> int:
    """How many weights the reply itself names."""
    return len({span.version for span in dialect.spans(choice)})
