"""Inserts checked trajectories as rows, many in one write, and seals groups.

Owns the queue of parcels between the event loop and the writer. A client is answered after the COMMIT of its row. A
refused parcel changes nothing. Each batch reads the rows once and decides the rest in memory, which is safe because
only the writer changes them.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from asyncio import Future
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from artd.core.groups import group_outcome, trains_equal
from artd.errors import Busy, Conflict, RequestError
from artd.store.blobs import add_row
from artd.store.store import Store, emit
from artd.store.writer import StoreFull
from artd.tables.groups import insert_group, mark_discarded, mark_sealed, resize_groups
from artd.tables.trajectories import discard_all, insert_trajectories
from artd_schema.codec import to_json
from artd_schema.crashpoint import reach
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api

LOOKUP = 256
NAMED = 5
"""The most groups that one event names."""


class RunFacts(NamedTuple):
    """The facts of a run that never change. `routes` is the shape of its trajectories' routes, None if it replays no
    experts."""

    id: int
    spec: RunSpec
    vocab_size: int
    routes: RouteShape | None = None


class Parcel(NamedTuple):
    """A checked trajectory that has no row yet. `size` is that of its body; `metadata` is JSON, `null` if it is in a
    file; `files` are the paths of its blobs."""

    op: api.Submit
    run: RunFacts
    key: str
    content: str
    digest: str
    body: bytes | None
    blob: str | None
    size: int
    tokens: int
    epochs: tuple[int | None, int | None]
    metadata: bytes
    metadata_blob: str | None = None
    files: tuple[Path, ...] = ()

    @property
    def extra(self) -> bytes:
        """Metrics and metadata as JSON."""
        return b'{"metrics":%b,"metadata":%b}' % (to_json(self.op.metrics), self.metadata)


Outcome = api.Submitted | RequestError
Answer = Callable[[api.Submitted | BaseException], None]


@dataclass(slots=True)
class _Batch:
    """The parcels of one write. `begun` says whether the writer has reached it."""

    taken: list[tuple[Parcel, Answer]] = field(default_factory=list)
    begun: bool = False


class Intake:
    """The queue of parcels. `put` may be called only in the event loop, and answers are given there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[Parcel, Answer]] = deque()
        self._queued = False

    def put(self, parcel: Parcel, answer: Answer) -> None:
        """Queue a parcel for the next write. `answer` gets Submitted or the error."""
        self._waiting.append((parcel, answer))
        if self._queued:
            return
        self._queued = True
        # Later, so that all that arrived together shares one write, and the writer does not compete with the loop for the GIL.
        asyncio.get_running_loop().call_soon(self._submit)

    def _submit(self) -> None:
        batch = _Batch()
        future = self._store.submit(lambda c: self._write(c, batch))
        future.add_done_callback(lambda done: self._answer(batch, done))

    def _write(self, c: sqlite3.Connection, batch: _Batch) -> list[Outcome]:
        self._take(batch)
        outcomes = insert_many(c, self._store.clock.now_ms(), [parcel for parcel, _ in batch.taken])
        reach("submit.inserted")
        return outcomes

    def _take(self, batch: _Batch) -> None:
        batch.begun = True
        self._queued = False  # before the first parcel is taken, so that a parcel put from now on submits another write
        while self._waiting:
            batch.taken.append(self._waiting.popleft())

    def _answer(self, batch: _Batch, done: Future[list[Outcome]]) -> None:
        error = done.exception()
        if not batch.begun:  # an earlier write found no room, and SQLite rolled back the whole group of writes
            self._take(batch)
        taken = batch.taken
        if error is None:
            reach("submit.committed")
            for (_, answer), outcome in zip(taken, done.result(), strict=True):
                answer(outcome)
        elif isinstance(error, StoreFull) or len(taken) == 1:
            for _, answer in taken:
                answer(error)
        else:  # one of them broke the batch, so each is written by itself
            for item in taken:
                self._alone(item)

    def _alone(self, item: tuple[Parcel, Answer]) -> None:
        parcel, _ = item
        future = self._store.submit(lambda c: insert_many(c, self._store.clock.now_ms(), [parcel]))
        future.add_done_callback(lambda done: self._answer(_Batch([item], begun=True), done))


def insert_many(c: sqlite3.Connection, now: int, parcels: Sequence[Parcel]) -> list[Outcome]:
    """Insert the parcels. Returns one outcome for each, in order. A parcel whose outcome is an error left no trace."""
    (newest,) = c.execute("SELECT coalesce(max(id), 0) FROM trajectory").fetchone()
    ids = itertools.count(newest + 1)
    runs = {parcel.run.id: parcel.run for parcel in parcels}
    books = {run: _Book(c, now, ids, [p for p in parcels if p.run.id == run]) for run in runs}
    outcomes: list[Outcome] = []
    for parcel in parcels:
        try:
            outcomes.append(books[parcel.run.id].enter(parcel))
        except RequestError as error:
            outcomes.append(error)
    for book in books.values():
        book.flush()
    return outcomes


@dataclass(slots=True)
class _Group:
    id: int
    state: str
    split: str
    size: int


@dataclass(slots=True)
class _Known:
    id: int
    content: str
    group: int
    state: str


class _Book:
    """One batch of one run: what its rows said before, and what is to be written."""

    def __init__(self, c: sqlite3.Connection, now: int, ids: Iterator[int], parcels: Sequence[Parcel]) -> None:
        self._c = c
        self._now = now
        self._ids = ids
        run = parcels[0].run.id
        (self._run_state,) = c.execute("SELECT state FROM run WHERE id = ?", (run,)).fetchone()
        self._known = {
            row["key"]: _Known(row["id"], row["content"], row["grp"], row["state"])
            for row in _lookup(
                c,
                "SELECT t.key, t.id, t.content, t.group_id AS grp, g.state FROM trajectory t"
                " JOIN trajectory_group g ON g.id = t.group_id WHERE t.run_id = ? AND t.key IN",
                run,
                {parcel.key for parcel in parcels},
            )
        }
        self._groups = {
            row["name"]: _Group(row["id"], row["state"], row["split"], row["size"])
            for row in _lookup(
                c,
                "SELECT name, id, state, split, size FROM trajectory_group WHERE run_id = ? AND name IN",
                run,
                {parcel.op.group for parcel in parcels},
            )
        }
        self._states = {group.id: group for group in self._groups.values()}
        self._rows: list[tuple[object, ...]] = []
        self._data: list[tuple[int, bytes, str | None, bytes | None]] = []
        self._events: list[tuple[int, api.Submit]] = []
        self._grown: set[int] = set()

    def enter(self, parcel: Parcel) -> api.Submitted:
        """Note a parcel for the next `flush`, and seal its group if that is full now. Raises Conflict, Busy."""
        if known := self._known.get(parcel.key):
            return self._again(parcel, known)
        if not all(file.exists() for file in parcel.files):
            raise Busy(
                "a file of this trajectory was garbage-collected before its row was committed; send it again",
                retry_after_s=0.1,
            )
        group = self._open(parcel)
        op, number = parcel.op, next(self._ids)
        if parcel.blob:
            add_row(self._c, parcel.blob, parcel.size, "trajectory", self._now)
        if parcel.metadata_blob:
            size = parcel.files[-1].stat().st_size
            add_row(self._c, parcel.metadata_blob, size, "metadata", self._now)
        self._rows.append(
            (number, parcel.run.id, group.id, parcel.key, parcel.content, parcel.digest, op.reward, op.split, parcel.blob,
             parcel.tokens, *parcel.epochs, self._now)
        )  # fmt: skip
        self._data.append((number, parcel.extra, parcel.metadata_blob, parcel.body))
        self._events.append((number, op))
        self._known[parcel.key] = _Known(number, parcel.content, group.id, "open")
        self._grown.add(group.id)
        group.size += 1
        if group.size >= parcel.run.spec.group_size and op.split == "train":
            self.flush()
            group.state = seal_group(self._c, self._now, group.id)
        return api.Submitted(trajectory=number, duplicate=False, group_state=group.state)

    def flush(self) -> None:
        """Write what was entered since the last flush."""
        if not self._rows:
            return
        insert_trajectories(self._c, self._rows, self._data)
        sizes = [(self._states[group].size, group) for group in self._grown]
        resize_groups(self._c, sizes)
        # One event for all of them, because there are millions of trajectories.
        first, last = self._events[0][0], self._events[-1][0]
        groups = dict.fromkeys(op.group for _, op in self._events)
        emit(
            self._c, self._now, self._events[0][1].run, "trajectory.submitted", first if first == last else f"{first}-{last}",
            count=len(self._events), groups=list(groups)[:NAMED],
        )  # fmt: skip
        self._rows, self._data, self._events, self._grown = [], [], [], set()

    def _again(self, parcel: Parcel, known: _Known) -> api.Submitted:
        """Return the first answer to this key again. Raises Conflict if the content differs."""
        if known.content != parcel.content:
            raise Conflict(
                f"key {parcel.key!r} was used for trajectory {known.id} with other content: {self._describe(known)}",
                field="key",
            )
        group = self._states.get(known.group)
        return api.Submitted(trajectory=known.id, duplicate=True, group_state=group.state if group else known.state)

    def _describe(self, known: _Known) -> str:
        """Describe what was submitted under a key. A client that chose no key does not know it: the key is then a
        digest."""
        self.flush()  # the known trajectory may be part of this batch
        row = self._c.execute(
            "SELECT g.name, t.reward, t.split FROM trajectory t JOIN trajectory_group g ON g.id = t.group_id WHERE t.id = ?",
            (known.id,),
        ).fetchone()
        return f"it was submitted to group {row['name']!r} with reward {row['reward']:g}, split {row['split']!r}"

    def _open(self, parcel: Parcel) -> _Group:
        op, run = parcel.op, parcel.run
        if self._run_state == "finished":
            raise Conflict(f"run {op.run!r} is finished and takes no more trajectories", field="run")
        group = self._groups.get(op.group)
        if group is None:
            deadline = self._now + int(run.spec.group_timeout_s * 1000)
            number = insert_group(self._c, self._now, run.id, op.group, op.split, deadline)
            group = self._groups[op.group] = _Group(number, "open", op.split, 0)
            self._states[group.id] = group
        if group.state != "open":
            raise Conflict(f"group {op.group!r} is {group.state} and takes no more trajectories", field="group")
        if group.split != op.split:
            raise Conflict(f"group {op.group!r} is of split {group.split!r}, not {op.split!r}", field="split")
        return group


def _lookup(c: sqlite3.Connection, sql: str, run: int, names: Iterable[str]) -> Iterator[sqlite3.Row]:
    """Yield the rows of `sql` for any number of names. Each list is padded to a power of two, so that SQLite prepares
    few different statements."""
    left = list(names)
    while left:
        part, left = left[:LOOKUP], left[LOOKUP:]
        part += part[:1] * ((1 << (len(part) - 1).bit_length()) - len(part))
        yield from c.execute(f"{sql} ({','.join('?' * len(part))})", (run, *part))


def seal_group(c: sqlite3.Connection, now: int, group_id: int) -> str:
    """Seal an open group. Returns `sealed`, or `discarded` if nothing can be learned from it: then its trajectories are
    discarded, too."""
    group = c.execute(
        "SELECT g.name, g.split, r.name AS run, r.spec FROM trajectory_group g JOIN run r ON r.id = g.run_id WHERE g.id = ?",
        (group_id,),
    ).fetchone()
    rewards = [row[0] for row in c.execute("SELECT reward FROM trajectory WHERE group_id = ?", (group_id,))]
    outcome = group_outcome(rewards, trains_equal(group["spec"])) if group["split"] == "train" else "trainable"
    if outcome == "trainable":
        mark_sealed(c, group_id)
        emit(c, now, group["run"], "group.sealed", group["name"], size=len(rewards))
        return "sealed"
    mark_discarded(c, group_id, outcome, start="open")
    discard_all(c, group_id, outcome)
    emit(c, now, group["run"], "group.discarded", group["name"], size=len(rewards), reason=outcome)
    return "discarded"
