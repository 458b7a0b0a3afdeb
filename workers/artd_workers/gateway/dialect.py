"""Defines what the gateway asks of an engine, and finds the dialect of an engine's kind.

The gateway has an engine render a request to tokens, generate, and derender tokens to text; it asks for the experts and for the weights
that sampled. One class in the engine's folder, which its entry in `artd_schema.run.engines` names, says these things to that engine.
A dialect imports neither torch nor its engine, because it runs in the daemon's interpreter. A generate request is a JSON object
with `token_ids`, `sampling_params` and, once `to_generate` made it, `request_id`. A reply has `choices`, each with `index`, `token_ids` and
`finish_reason`. Only the dialect reads what else is in them.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from artd_schema.data.trajectory import Sampling
from artd_schema.run.engines import engine_kind
from artd_workers.gateway.engine.npy import Ids
from artd_workers.gateway.request.kinds import Kind

from .errors import ApiError, EngineFailure

Json = dict[str, Any]
Labels = tuple[tuple[int, str], ...]
Scored = tuple[int | None, float]
"""A token and its logprob; None: the engine names no token."""


class Client(Protocol):
    """Calls to one engine: `engine.client.EngineClient`."""

    name: str

    async def post(
        self, path: str, body: Json, *, unbounded: bool = False, read: Callable[[bytes], Any] = msgspec.json.decode
    ) -> Any:
        """Return what `read` makes of the reply. Raises EngineFailure, ApiError."""

    def events(self, path: str, body: Json) -> AsyncGenerator[bytes, None]:
        """Yield the data of the reply's server-sent events. Raises EngineFailure, ApiError."""

    def error(self, path: str, status: int, message: str, param: str | None = None) -> ApiError | EngineFailure:
        """Return what an error of the engine is to the gateway."""


@dataclass(frozen=True)
class Span:
    """Sampled tokens [start, end) came from the weights labelled `version`."""

    version: str
    start: int
    end: int


class Origin(msgspec.Struct, frozen=True):
    """Runs (first sampled token, label of weights) of one choice: of who sampled, and of the cache. Both empty: unknown."""

    policy: Labels = ()
    cache: Labels = ()


class Taken(msgspec.Struct):
    """The experts of one choice: `rows` rows of `routes` from token `start` of prompt and sampled tokens on, laid out as `Turn.routes`."""

    routes: bytes
    start: int
    rows: int


class Piece(msgspec.Struct):
    """An event of a stream. choice: a fragment of the choice `index` of this request, in the form that `Dialect.join` takes; shown: what
    the client sees of it: deltas `content`, `reasoning`, `tool_calls` (OpenAI's form, absent when empty), `logprobs` (OpenAI's chat form)."""

    index: int
    choice: Json
    shown: Json


class Dialect(Protocol):
    """How one engine is spoken to: the `DIALECT` of the module that its entry names.

    fields: of a client's body, those of the engine alone. grammar: sampling parameters that bind samples to a grammar, and that can be left out.
    floor: the logprob that stands for -inf. reshaping: sampling parameters that change the distribution and that `Sampling` has no field
    for. overflow: what a refusal of a prompt or answer that does not fit says -> what is put before it. hints: what is put behind an
    error of this status.
    """

    fields: frozenset[str]
    grammar: Sequence[str]
    floor: float
    reshaping: Sequence[str]
    overflow: Mapping[str, str]
    hints: Mapping[int, str]

    async def render(self, client: Client, kind: Kind, body: Json) -> list[Json]:
        """Return the requests to generate for a client's body, one for each prompt. Raises EngineFailure, ApiError."""

    def sampling(self, params: Json) -> Sampling:
        """Return the parameters that the engine samples with. params: `sampling_params` as rendered. Raises ApiError 400."""

    def to_generate(self, request: Json, *, model: str, request_id: str, salt: str) -> Json:
        """Return the request as it is sent: by this model, under this id, with logprobs always, and with a prefix cache that is shared
        only under the same salt."""

    async def generate(self, client: Client, request: Json) -> Any:
        """Return the engine's reply, whose form is checked by who asks. Raises EngineFailure, ApiError."""

    def stream(
        self, client: Client, kind: Kind, body: Json, request: Json, *, logprobs: bool
    ) -> AsyncGenerator[Piece, None]:
        """Generate, and yield the answer as it comes. body: the client's, as the engine sees it. Closing the iterator ends the request.
        Raises EngineFailure, ApiError."""

    def join(self, fragments: Sequence[Json]) -> Json:
        """Return the choice that these fragments make, as `generate` would have answered it. At least one."""

    async def derender(
        self, client: Client, kind: Kind, body: Json, requests: Sequence[Json], replies: Sequence[Json],
        *, response_id: str, logprobs: bool,
    ) -> Any:  # fmt: skip
        """Return the OpenAI response to a client's body, made of all replies. Raises EngineFailure, ApiError."""

    def cut_text(self, text: str, choice: Json, params: Json) -> str:
        """Return the text of a derendered choice without the stop string or stop token that ended it."""

    def ended_by_text(self, choice: Json) -> bool:
        """Return whether a stop string ended the choice, which the engine may have found after sampling more tokens."""

    def logprobs(self, choice: Json) -> list[Scored]:
        """Return the sampled tokens with their logprobs."""

    def alternatives(self, choice: Json) -> list[list[Scored]]:
        """Return for each sampled token those that were asked for beside it, itself among them."""

    def spans(self, choice: Json) -> list[Span]:
        """Return which weights sampled which tokens, in order; [] where the reply does not say it."""

    async def trace(self, client: Client, keys: Sequence[str]) -> dict[str, Origin]:
        """Return who sampled these choices (`REQUEST_ID#INDEX`), without those that the engine does not know. It may wait for a push.
        Raises EngineFailure, ApiError."""

    def take_field(self, choice: Json) -> Any:
        """Remove the routed experts from a choice and return them as the engine gave them, None where it gave none."""

    def field_start(self, request: Json) -> int:
        """Return the token at which the rows of such a field begin."""

    def read_field(self, field: Any) -> Ids:
        """Return the experts of a field, of all layers, zeros in dense ones. Any thread. Raises ValueError."""

    async def take_experts(self, client: Client, ids: Sequence[str], timeout_s: float) -> dict[str, Taken]:
        """Return the experts of every choice of these requests, by `REQUEST_ID#INDEX`; the engine forgets them. Raises EngineFailure, ApiError."""

    async def drop_experts(self, client: Client, ids: Sequence[str], timeout_s: float) -> None:
        """Have the engine forget the experts of these requests. Raises EngineFailure, ApiError."""


def dialect_of(kind: str) -> Dialect:
    """Return the dialect of `EngineSpec.kind`. Raises UnknownEngine."""
    found: Dialect = importlib.import_module(engine_kind(kind).dialect).DIALECT
    return found
