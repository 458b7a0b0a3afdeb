"""The row book: keeps which experts every token of every sequence was routed to, until somebody takes or drops the
rows.

Rows are stored by position, and the first capture of a position wins. So a sequence that was preempted and computed
again has each row once; `recomputed` notes what was computed again. One sequence is one choice of a request.

Owns the rows that were captured and not yet taken, and for a while the names of requests whose rows nobody wants. A
sequence has rows without a hole from its first position, or none at all (`lose`). An ended sequence is held for at most
`HELD_S` seconds, and all of those together take at most `HELD_BYTES`. numpy only, no vLLM. Not thread-safe.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from artd_schema.data.trajectory import RouteShape

Rows = npt.NDArray[Any]
HELD_S = 3600.0
HELD_BYTES = 1 << 30
"""The gateway takes a response's rows when its last choice ends, which may be long after the first, and drops what it
does not want. The limits of time and bytes matter only if the gateway died."""
_LEAST_ROWS = 64
_WORKER_ID = re.compile(r"(?:(\d+)_)?generate-tokens-(.+)-[0-9a-f]{8}")
"""In vLLM 0.32 `/inference/v1/generate` puts its prefix before the given id, the engine appends 8 random hex digits,
and with n > 1 the index of the choice comes first. Sequences of other endpoints (the canary's) have other names."""


def owner_of(worker_id: str) -> tuple[str, int] | None:
    """Return the given request id and the index of the choice for a sequence of `/inference/v1/generate`, None for
    others."""
    found = _WORKER_ID.fullmatch(worker_id)
    return None if found is None else (found[2], int(found[1] or 0))


@dataclass(frozen=True)
class Taken:
    """Rows [n, layers, topk] of the tokens start .. start + n - 1. `recomputed` lists the ranges [first, end) of tokens
    that were computed again."""

    rows: Rows
    start: int
    recomputed: tuple[tuple[int, int], ...]


@dataclass
class _Sequence:
    """The rows of one sequence: `ids` has those of the positions start .. end - 1, ids[0] that of `start`. A `lost`
    sequence takes no more rows."""

    owner: tuple[str, int]
    ids: Rows
    start: int = 0
    end: int = 0
    recomputed: list[list[int]] = field(default_factory=list)
    lost: bool = False
    ended_at: float | None = None

    @property
    def bytes(self) -> int:
        return self.ids.nbytes

    def store(self, first: int, rows: Rows) -> None:
        """Add the rows of the positions first .. first + len(rows) - 1 that are not there yet."""
        if self.start == self.end:
            self.start = self.end = first
        if not self.start <= first <= self.end:
            self.lose()  # there is a hole: nobody reported the positions in between
            return
        last = first + len(rows)
        if first < self.end:
            self._again(first, min(last, self.end))
        if last > self.end:
            self._append(rows[self.end - first :])

    def lose(self) -> None:
        """Drop all rows and take no more. A sequence with a hole is worth nothing."""
        self.ids, self.lost = self.ids[:0].copy(), True
        self.start = self.end = 0

    def to_taken(self) -> Taken:
        return Taken(self.ids[: self.end - self.start], self.start, tuple((a, b) for a, b in self.recomputed))

    def _append(self, rows: Rows) -> None:
        held = self.end - self.start
        if held + len(rows) > len(self.ids):
            grown = np.empty((max(_LEAST_ROWS, 2 * held, held + len(rows)), *self.ids.shape[1:]), self.ids.dtype)
            grown[:held] = self.ids[:held]
            self.ids = grown
        self.ids[held : held + len(rows)] = rows
        self.end += len(rows)

    def _again(self, first: int, last: int) -> None:
        """Note positions as computed again. Adjacent ranges become one."""
        touching = [r for r in self.recomputed if r[0] <= last and first <= r[1]]
        self.recomputed = [r for r in self.recomputed if r not in touching]
        self.recomputed.append([min([first, *(r[0] for r in touching)]), max([last, *(r[1] for r in touching)])])
        self.recomputed.sort()


class RouteBook:
    """The row book of one worker (see the module).

    The book holds ended sequences for `held_s` seconds and up to `held_bytes` bytes. `clock` returns seconds.
    """

    def __init__(
        self, shape: RouteShape, held_s: float = HELD_S, held_bytes: int = HELD_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._empty: Rows = np.empty((0, shape.layers, shape.topk), f"<u{shape.width}")
        self._held_s = held_s
        self._held_bytes = held_bytes
        self._clock = clock
        self._open: dict[str, _Sequence] = {}
        self._ended: dict[str, _Sequence] = {}  # in order of their end
        self._ended_bytes = 0
        self._names: dict[str, set[str]] = {}
        self._unwanted: dict[str, float] = {}  # request id -> when it was dropped, in this order

    @property
    def held(self) -> int:
        """The number of sequences with rows, including running ones."""
        return sum(not sequence.lost for table in (self._open, self._ended) for sequence in table.values())

    @property
    def known(self) -> int:
        """The number of sequences that run or are held, with rows or without."""
        return len(self._open) + len(self._ended)

    @property
    def bytes(self) -> int:
        return self._ended_bytes + sum(sequence.bytes for sequence in self._open.values())

    def add(self, worker_id: str, first: int, rows: Rows) -> None:
        """Copy the rows [n, layers, topk] of one sequence's tokens first .. first + n - 1, which one step computed."""
        sequence = self._open.get(worker_id) or self._begin(worker_id)
        if sequence is not None and not sequence.lost:
            sequence.store(first, rows)

    def lose(self, worker_id: str) -> None:
        """Give up a whole sequence, because the rows of one of its steps are missing."""
        if (sequence := self._open.get(worker_id) or self._begin(worker_id)) is not None:
            sequence.lose()

    def end(self, worker_ids: Iterable[str]) -> None:
        """Note that these sequences compute nothing more, because they ended or were aborted."""
        for worker_id in worker_ids:
            if (sequence := self._open.pop(worker_id, None)) is None:
                continue
            if sequence.lost:
                self._forget(worker_id, sequence)
            else:
                sequence.ended_at = self._clock()
                self._ended[worker_id] = sequence
                self._ended_bytes += sequence.bytes
        self.sweep()

    def take(self, request_ids: Iterable[str]) -> dict[str, Taken]:
        """Return the rows of every sequence of these requests that has any, by `REQUEST#CHOICE`, and forget them."""
        found = {}
        for request in request_ids:
            for worker_id in sorted(self._names.get(request, ())):
                sequence = self._ended.get(worker_id) or self._open[worker_id]
                if not sequence.lost:  # a lost sequence stays known as long as it runs
                    found[f"{request}#{sequence.owner[1]}"] = sequence.to_taken()
                    self._pop(worker_id)
        self.sweep()
        return found

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the rows of these requests, both those that are held and those that are still to come."""
        now = self._clock()
        for request in request_ids:
            self._unwanted.pop(request, None)
            self._unwanted[request] = now
            for worker_id in tuple(self._names.get(request, ())):
                if worker_id in self._ended:
                    self._pop(worker_id)
                else:
                    self._open[worker_id].lose()
        self.sweep()

    def sweep(self) -> None:
        """Drop what was held for too long, and the oldest of what exceeds the limit of bytes."""
        oldest = self._clock() - self._held_s
        for worker_id, sequence in tuple(self._ended.items()):
            if sequence.ended_at is not None and sequence.ended_at > oldest and self._ended_bytes <= self._held_bytes:
                break
            self._pop(worker_id)
        for request, dropped_at in tuple(self._unwanted.items()):
            if dropped_at > oldest:
                break
            del self._unwanted[request]

    def _begin(self, worker_id: str) -> _Sequence | None:
        if (owner := owner_of(worker_id)) is None:
            return None
        sequence = _Sequence(owner, self._empty, lost=owner[0] in self._unwanted)
        self._open[worker_id] = sequence
        self._names.setdefault(owner[0], set()).add(worker_id)
        return sequence

    def _pop(self, worker_id: str) -> None:
        sequence = self._ended.pop(worker_id, None)
        if sequence is None:
            sequence = self._open.pop(worker_id)
        else:
            self._ended_bytes -= sequence.bytes
        self._forget(worker_id, sequence)

    def _forget(self, worker_id: str, sequence: _Sequence) -> None:
        names = self._names[sequence.owner[0]]
        names.discard(worker_id)
        if not names:
            del self._names[sequence.owner[0]]
