"""What every API is to the gateway: a path, a translator of requests, and translators of whole and of streamed answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from artd_workers.gateway.errors import ApiError
from artd_workers.gateway.http.streamed import Channel
from artd_workers.gateway.request.kinds import Kind
from artd_workers.gateway.request.live import Sink

Json = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """A request in the core's form. body: of chat completions or completions, as `kind` says; caps: more tokens than the context has are as
    many as it has, where they would otherwise be an error."""

    kind: Kind
    body: Json
    caps: bool = False


class Api(Protocol):
    """One endpoint that generates."""

    path: str

    def parse(self, body: Json) -> Ask:
        """Return the request in the core's form. Raises ApiError 400."""

    def reply(self, body: Json, head: Json, choices: Sequence[Json]) -> Json | None:
        """Return the answer in this API's form; None where the core's is that already. body: the client's."""

    def writer(self, body: Json, channel: Channel) -> Sink:
        """Return the translator of a streamed answer."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream that failed."""


def item_id(prefix: str) -> str:
    """Return a new id of a part of an answer."""
    return f"{prefix}_{uuid4().hex}"
