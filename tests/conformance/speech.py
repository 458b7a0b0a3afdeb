"""What differs from engine to engine where the suite looks at its wire: the names of its calls, and a client of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Speech:
    """An engine's calls by their routes, as `relay.py` names them.

    methods: the calls that each method of `Adapter` makes, in order. pushes: those of a push, by way and phase; the last one of a phase
    is where its weights move, if they move in it. What a live way has in common with a push from disk stands there.
    texts: methods that take any text for a success, because what is served is verified by the canary.
    version, health: calls by which an adapter asks for them; quiet: calls that are made all the time. optional: those that only a
    version with this capability has.
    score: key of a prompt's scores in an answer. fine: an answer that is a success of any call; held: one of the last call of `finish`, while
    requests hold prefixes; release: one that tells a version; stranger: one of another server, and what is said of it.
    """

    methods: Mapping[str, tuple[str, ...]]
    pushes: Mapping[str, Mapping[str, tuple[str, ...]]]
    texts: tuple[str, ...]
    version: str
    health: str
    quiet: tuple[str, ...]
    optional: Mapping[str, str]
    score: str
    fine: Any
    held: Any
    release: Callable[[str], Any]
    stranger: tuple[Any, str]


class Client(Protocol):
    """Somebody beside the harness who asks the server. Every call raises EngineError."""

    def complete(self, model: str, tokens: int, prompt: Sequence[int]) -> str:
        """Make so many tokens; why it ended: `length` or `abort`."""

    def scores(self, model: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs of each prompt's tokens but the first."""

    def running(self) -> float:
        """How many requests it works on."""

    def paused(self) -> bool: ...

    def prefix_hits(self) -> float:
        """Tokens (or prompts) that were found in its prefix cache so far."""

    def label(self) -> str:
        """The name of its weights, where it tells one."""

    def relabel(self, owner: str) -> None:
        """Label its weights as this owner."""

    def generate(self, model: str, request: str, tokens: int, **sampling: Any) -> list[dict[str, Any]]:
        """The choices of a request by tokens, under this name, of so many tokens each. Only asked where `Kind.workers`."""

    def sampled(self, *choices: str) -> dict[str, Any]:
        """What its worker saw of who sampled these, `REQUEST#CHOICE`. Only asked where `Kind.workers`."""
