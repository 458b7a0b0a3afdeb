"""The choice of an engine: by prefix first, then by load in tokens.

The turns of a rollout begin with the same tokens, so they stay where their prefix is cached. An engine that has more than `SLACK` times the
mean load gives them away: computing a prefix again is then cheaper than waiting. A new rollout goes to the engine with the least load, so
rollouts spread evenly. Nothing here looks at a clock, and the same calls give the same choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .prefixes import Cache, Holders, Prefix

SLACK = 1.25
"""Lower values spread the load better, higher ones hit more prefixes (tests/bench/routing.py measures both)."""
SHARE = 0.5
"""The part of a prompt that has to be cached somewhere for the request to stay there."""
ANSWER_TOKENS = 256.0
"""The expected answer until the first one is known."""
MEMORY = 32
"""Answers over which the mean length is taken."""


class Work(NamedTuple):
    """What a request brings: the prefix of its first prompt, empty where there is no choice among engines; and the tokens of all prompts."""

    prefix: Prefix = Prefix()
    tokens: int = 0


class Balance:
    """The load of each engine's process, by its socket, and the prefixes that it caches."""

    def __init__(self) -> None:
        self._load: dict[str, int] = {}
        self._holders = Holders()
        self._answer = ANSWER_TOKENS

    def load(self, socket: str) -> int:
        """Return the tokens in flight: prompts, and the answers that are expected."""
        return self._load.get(socket, 0)

    def choose(self, work: Work, caches: Sequence[Cache]) -> Cache:
        """Return the cache, of at least one, that the request is sent to. Changes nothing."""
        held = self._holders.find(work.prefix, frozenset(caches))
        best = min(caches, key=lambda cache: (-held.get(cache, 0), self.load(cache[0])))
        mean = sum(self.load(socket) for socket, _ in caches) / len(caches)
        stays = held.get(best, 0) >= max(1.0, SHARE * work.prefix.tokens)
        if stays and self.load(best[0]) <= SLACK * mean + work.tokens:
            return best
        return min(caches, key=lambda cache: self.load(cache[0]) + work.tokens - held.get(cache, 0))

    def enter(self, work: Work, cache: Cache) -> int:
        """Count a request in. Returns what `leave` has to count out."""
        added = work.tokens + round(self._answer)
        self._load[cache[0]] = self.load(cache[0]) + added
        self._holders.add(work.prefix, cache)
        return added

    def leave(self, socket: str, added: int) -> None:
        """Count a request out."""
        left = self.load(socket) - added
        self._load[socket] = left
        if not left:
            del self._load[socket]

    def learn(self, work: Work, cache: Cache, answers: Sequence[Sequence[int]]) -> None:
        """Note what an engine said after the first prompt: the next turn begins with one of these answers."""
        for answer in answers:
            self._answer += (len(answer) - self._answer) / MEMORY
            self._holders.add(work.prefix.extend(answer), cache, len(work.prefix.hashes))
