"""One completion request, and what an engine made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from artd_schema.data.trajectory import Split
from artd_workers.gateway.balance.balance import Work
from artd_workers.gateway.dialect import Dialect, Origin
from artd_workers.gateway.engine.capture import Capture
from artd_workers.gateway.engine.client import EngineClient
from artd_workers.gateway.routing import Place

from .asked import Asked
from .kinds import Kind

Json = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One request. caps: see `Ask.caps`. asked: None for a request of no rollout. response_id: "" until an attempt begins; every attempt
    has its own, because an engine may still hold the last one's."""

    kind: Kind
    body: Json
    split: Split
    caps: bool = False
    asked: Asked | None = None
    response_id: str = ""


@dataclass(frozen=True)
class Rendered:
    """A request as the engine sees it. upstream: the client's body; requests: to generate, one for each prompt; dropped: a grammar was; work:
    what the choice of an engine goes by."""

    upstream: Json
    requests: list[Json]
    dropped: bool
    work: Work


@dataclass(frozen=True)
class Entered:
    """A request inside an engine; the rest as of `Rendered`."""

    job: Job
    place: Place
    client: EngineClient
    upstream: Json
    requests: list[Json]
    dropped: bool
    work: Work


@dataclass(frozen=True)
class Generated:
    """What came out of an engine; requests and replies have one element a prompt, captures and origins one a choice, `shown` is
    the derendered response."""

    job: Job
    place: Place
    dialect: Dialect
    requests: list[Json]
    replies: list[Json]
    captures: list[Capture | None]
    origins: list[Origin | None]
    shown: Json
    seconds: float
    dropped: bool
