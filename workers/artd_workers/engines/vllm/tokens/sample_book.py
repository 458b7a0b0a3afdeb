"""The sample-book: under which label each token of every sequence was sampled, and its entry in the KV cache computed.

Purpose: what vLLM 0.25 does not tell at all (its replies have no `weight_versions`), and no version tells of the cache. The
worker sees every step before it runs: what the scheduler says of a sequence in the first step after a push, how many tokens
it has sampled and from which position on it computes, are the places where old weights end and new ones begin. So nothing is
counted here, and a step in which no sequence begins, ends, comes back or crosses a push costs three looks.
Owner of: the label in force, and what is known of the sequences that run, or have ended and were not asked for. One sequence
= one choice of a request. Invariants: labels change between steps only; a sequence of which something was not seen is not
known at all; of those that have ended the newest `ENDED` are kept, more while as many run, and all of a request that still runs. No vLLM, no torch, one thread (vLLM's own).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .row_book import owner_of

Runs = list[tuple[int, str]]
"""(first sampled token, label), starts rising from 0."""
ENDED = 4096
"""The gateway asks for the few that were in flight when it had to hold, as soon as their response is whole."""

PER_LIVE = 16
"""And so many for each that runs: a machine that runs more also ends more until the gateway has asked."""


@dataclass
class _Sequence:
    """prompt: tokens; cleared: the whole cache was dropped since its last step."""

    key: str
    prompt: int
    policy: Runs = field(default_factory=list)
    cache: Runs = field(default_factory=list)
    cleared: bool = False


class SampleBook:
    """See the module."""

    def __init__(self, ended: int = ENDED) -> None:
        self._most = ended
        self._name = ""
        self._live: dict[str, _Sequence] = {}  # by the worker's name
        self._ended: dict[str, _Sequence] = {}  # by REQUEST#CHOICE, in order of their end
        self._across: set[str] = set()

    def label(self, name: str, cleared: bool) -> None:
        """From the next step on the weights are `name`. cleared: nothing that was cached before is used any more."""
        self._name = name
        self._across = set(self._live)
        for sequence in self._live.values():
            sequence.cleared |= cleared

    def step(self, scheduled: Any) -> None:
        """What runs next, vLLM's `SchedulerOutput`."""
        for worker_id in scheduled.finished_req_ids:
            self._end(worker_id)
        for new in scheduled.scheduled_new_reqs:
            self._begin(new.req_id, new.prompt_token_ids)
        cached = scheduled.scheduled_cached_reqs
        if not self._across and not cached.resumed_req_ids:
            return
        rows = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        for worker_id, computed, sampled in rows:
            again = worker_id in cached.resumed_req_ids
            if again or worker_id in self._across:
                self._go_on(worker_id, computed, sampled, again)

    def take(self, choices: Iterable[str]) -> dict[str, dict[str, Runs]]:
        """`REQUEST#CHOICE` -> policy, cache (see `Runs`); JSON. A run may start behind the last token of the response. What is
        taken is forgotten; what is not known is left out."""
        running = {sequence.key: worker_id for worker_id, sequence in self._live.items()}
        found = {}
        for key in choices:
            # One that has ended is no news to the worker before the next step.
            sequence = self._ended.pop(key, None) or self._forget(running.get(key, ""))
            if sequence is not None:
                found[key] = {"policy": sequence.policy, "cache": sequence.cache}
        return found

    @property
    def known(self) -> int:
        """Sequences that run, or have ended and were not asked for."""
        return len(self._live) + len(self._ended)

    def _begin(self, worker_id: str, prompt: list[int] | None) -> None:
        owner = owner_of(worker_id)
        if self._forget(worker_id) is not None or owner is None or prompt is None:
            return  # of one that is said to begin twice something was missed
        now = [(0, self._name)]
        self._live[worker_id] = _Sequence(f"{owner[0]}#{owner[1]}", len(prompt), list(now), list(now))

    def _go_on(self, worker_id: str, computed: int, sampled: int, again: bool) -> None:
        """The first step after a push, or `again` after the sequence had lost its place in the cache."""
        self._across.discard(worker_id)
        if (sequence := self._live.get(worker_id)) is None:
            return
        # What another sequence has put there since the cache was dropped is new, too.
        first = 0 if again and sequence.cleared else max(computed - sequence.prompt, 0)
        sequence.cleared = False
        _from(sequence.policy, sampled, self._name)
        _from(sequence.cache, first, self._name)

    def _end(self, worker_id: str) -> None:
        if (sequence := self._forget(worker_id)) is None:
            return
        self._ended[sequence.key] = sequence
        most = max(self._most, PER_LIVE * len(self._live))
        if len(self._ended) > most + most // 8:  # many at once: it takes a look at all of them
            running = {_request(live.key) for live in self._live.values()}
            gone = [key for key in self._ended if _request(key) not in running][: len(self._ended) - most]
            for key in gone:
                del self._ended[key]

    def _forget(self, worker_id: str) -> _Sequence | None:
        self._across.discard(worker_id)
        return self._live.pop(worker_id, None)


def _request(key: str) -> str:
    """Of a choice."""
    return key.rpartition("#")[0]


def watch(runner: Any, book: SampleBook) -> None:
    """Have `book` see every step of a worker's model runner from now on."""
    execute = runner.execute_model

    def observed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        book.step(scheduled)
        return execute(scheduled, *args, **kwargs)

    runner.execute_model = observed


def _from(runs: Runs, first: int, name: str) -> None:
    """From token `first` on it is `name`."""
    while runs and runs[-1][0] >= first:
        runs.pop()
    if not runs or runs[-1][1] != name:
        runs.append((first, name))
