"""The sample book: keeps which weights sampled each token of every sequence, and which computed its entry in the KV
cache.

vLLM 0.25 does not report the former (its replies have no `weight_versions`), and no version reports the latter. The
worker sees every step before it runs. In a sequence's first step after a push, the scheduler says how many tokens the
sequence has sampled and from which position on it computes: there the old weights end and the new ones begin. So
nothing is counted here, and a step in which no sequence begins, ends, resumes or crosses a push costs three look-ups.

Owns the label of the present weights, and the labels of the sequences that run, or have ended and nobody took them. One
sequence is one choice of a request. Labels change only between steps. A sequence of which a part was not seen is not
known at all. Of the ended ones the newest `ENDED` are kept, more while many run, and always those of a request that
still runs. No vLLM, no torch, one thread (vLLM's own).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .row_book import owner_of

Runs = list[tuple[int, str]]
"""(first sampled token, label) of each run of tokens. The first tokens rise from 0."""
ENDED = 4096
"""The gateway asks only for the few sequences that were under way at a hold, as soon as their response is complete."""

PER_LIVE = 16
"""The book also keeps this many ended sequences for each that runs: an engine that runs more also ends more before the
gateway asks."""


@dataclass
class _Sequence:
    """The labels of one sequence. `prompt` is its number of prompt tokens. `cleared` says that the whole cache was
    dropped since its last step."""

    key: str
    prompt: int
    policy: Runs = field(default_factory=list)
    cache: Runs = field(default_factory=list)
    cleared: bool = False


class SampleBook:
    """The sample book of one worker (see the module)."""

    def __init__(self, ended: int = ENDED) -> None:
        self._most = ended
        self._name = ""
        self._live: dict[str, _Sequence] = {}  # by the worker's name
        self._ended: dict[str, _Sequence] = {}  # by REQUEST#CHOICE, in order of their end
        self._across: set[str] = set()

    def label(self, name: str, cleared: bool) -> None:
        """Set the label of the weights from the next step on. `cleared` says that no older entry of the cache is used
        any more."""
        self._name = name
        self._across = set(self._live)
        for sequence in self._live.values():
            sequence.cleared |= cleared

    def step(self, scheduled: Any) -> None:
        """Note what the next step computes, from vLLM's `SchedulerOutput`."""
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
        """Return policy and cache labels (see `Runs`) by `REQUEST#CHOICE`, as JSON, and forget them. Unknown choices
        are left out. A run may start after the last token of the response."""
        running = {sequence.key: worker_id for worker_id, sequence in self._live.items()}
        found = {}
        for key in choices:
            # The worker learns only in the next step that a sequence has ended.
            sequence = self._ended.pop(key, None) or self._forget(running.get(key, ""))
            if sequence is not None:
                found[key] = {"policy": sequence.policy, "cache": sequence.cache}
        return found

    @property
    def known(self) -> int:
        """The number of sequences that run, or have ended and nobody took them."""
        return len(self._live) + len(self._ended)

    def _begin(self, worker_id: str, prompt: list[int] | None) -> None:
        owner = owner_of(worker_id)
        if self._forget(worker_id) is not None or owner is None or prompt is None:
            return  # a sequence that begins twice: the book missed something of it
        now = [(0, self._name)]
        self._live[worker_id] = _Sequence(f"{owner[0]}#{owner[1]}", len(prompt), list(now), list(now))

    def _go_on(self, worker_id: str, computed: int, sampled: int, again: bool) -> None:
        """Note the label from a sequence's first step after a push on, or from its first step after it had lost its
        place in the cache (`again`)."""
        self._across.discard(worker_id)
        if (sequence := self._live.get(worker_id)) is None:
            return
        # After the cache was dropped, even entries that another sequence computed are new.
        first = 0 if again and sequence.cleared else max(computed - sequence.prompt, 0)
        sequence.cleared = False
        _from(sequence.policy, sampled, self._name)
        _from(sequence.cache, first, self._name)

    def _end(self, worker_id: str) -> None:
        if (sequence := self._forget(worker_id)) is None:
            return
        self._ended[sequence.key] = sequence
        most = max(self._most, PER_LIVE * len(self._live))
        if len(self._ended) > most + most // 8:  # remove many at a time, because the search visits all of them
            running = {_request(live.key) for live in self._live.values()}
            gone = [key for key in self._ended if _request(key) not in running][: len(self._ended) - most]
            for key in gone:
                del self._ended[key]

    def _forget(self, worker_id: str) -> _Sequence | None:
        self._across.discard(worker_id)
        return self._live.pop(worker_id, None)


def _request(key: str) -> str:
    """Return the request id of a `REQUEST#CHOICE`."""
    return key.rpartition("#")[0]


def watch(runner: Any, book: SampleBook) -> None:
    """Show `book` every step of a worker's model runner from now on."""
    execute = runner.execute_model

    def execute_and_note(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        book.step(scheduled)
        return execute(scheduled, *args, **kwargs)

    runner.execute_model = execute_and_note


def _from(runs: Runs, first: int, name: str) -> None:
    """Label the tokens from `first` on `name`."""
    while runs and runs[-1][0] >= first:
        runs.pop()
    if not runs or runs[-1][1] != name:
        runs.append((first, name))
