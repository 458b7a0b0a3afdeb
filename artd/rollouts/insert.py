"""Checked trajectories become rows, many at a time; groups seal.

Owner of: the queue of parcels between the event loop and the writer. Invariants: an answer is given after the COMMIT of
its row; a parcel that is refused changes nothing; the rows are looked at once for a whole batch and the rest is decided
in memory, which is safe because nobody but the writer changes them.
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
"""Groups in an event."""


class RunFacts(NamedTuple):
    """What of a run never changes. routes: the shape of its trajectories' routes, None when it replays no experts."""

    id: int
    spec: RunSpec
    vocab_size: int
    routes: RouteShape | None = None


class Parcel(NamedTuple):
    """A checked trajectory on its way to its row. size: of the body; metadata: JSON, `null` where it is in a file; files:
    where its blobs lie."""

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
        """JSON of metrics and metadata."""
        return b'{"metrics":%b,"metadata":%b}' % (to_json(self.op.metrics), self.metadata)


Outcome = api.Submitted | RequestError
Answer = Callable[[api.Submitted | BaseException], None]


@dataclass(slots=True)
class _Batch:
    """What one write has taken out of the queue. begun: whether the writer came to it."""

    taken: list[tuple[Parcel, Answer]] = field(default_factory=list)
    begun: bool = False


class Intake:
    """The queue. `put` may be called in the event loop only; answers are given there too."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[Parcel, Answer]] = deque()
        self._queued = False

    def put(self, parcel: Parcel, answer: Answer) -> None:
        """Insert a parcel with whatever else waits then; `answer` gets Submitted or the error."""
        self._waiting.append((parcel, answer))
        if self._queued:
            return
        self._queued = True
        # Not at once: what else arrived with this one goes with it, and the writer does not fight the loop for the GIL.
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
        self._queued = False  # before the first is taken: what comes from now on asks for a write of its own
        while self._waiting:
            batch.taken.append(self._waiting.popleft())

    def _answer(self, batch: _Batch, done: Future[list[Outcome]]) -> None:
        error = done.exception()
        if not batch.begun:  # a write before it found no room, and SQLite took back the whole group
            self._take(batch)
        taken = batch.taken
        if error is None:
            reach("submit.committed")
            for (_, answer), outcome in zip(taken, done.result(), strict=True):
                answer(outcome)
        elif isinstance(error, StoreFull) or len(taken) == 1:
            for _, answer in taken:
                answer(error)
        else:  # one of them broke the batch: each by itself
            for item in taken:
                self._alone(item)

    def _alone(self, item: tuple[Parcel, Answer]) -> None:
        parcel, _ = item
        future = self._store.submit(lambda c: insert_many(c, self._store.clock.now_ms(), [parcel]))
        future.add_done_callback(lambda done: self._answer(_Batch([item], begun=True), done))


def insert_many(c: sqlite3.Connection, now: int, parcels: Sequence[Parcel]) -> list[Outcome]:
    """One outcome for each parcel, in order; those that are errors left no trace."""
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
    """One batch of one run: what the rows said, and what is to be written."""

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
        """Errors: Conflict, Busy."""
        if known := self._known.get(parcel.key):
            return self._again(parcel, known)
        if not all(file.exists() for file in parcel.files):
            raise Busy("a file of this trajectory was collected before its row came; send it again", retry_after_s=0.1)
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
        """Write what was entered since the last time."""
        if not self._rows:
            return
        insert_trajectories(self._c, self._rows, self._data)
        sizes = [(self._states[group].size, group) for group in self._grown]
        resize_groups(self._c, sizes)
        first, last = self._events[0][0], self._events[-1][0]  # one event of all: there are millions of trajectories
        groups = dict.fromkeys(op.group for _, op in self._events)
        emit(
            self._c, self._now, self._events[0][1].run, "trajectory.submitted", first if first == last else f"{first}-{last}",
            count=len(self._events), groups=list(groups)[:NAMED],
        )  # fmt: skip
        self._rows, self._data, self._events, self._grown = [], [], [], set()

    def _again(self, parcel: Parcel, known: _Known) -> api.Submitted:
        """The first answer again, when this key is known with this content."""
        if known.content != parcel.content:
            raise Conflict(
                f"key {parcel.key!r} was used for trajectory {known.id} with other content: {self._told(known)}",
                field="key",
            )
        group = self._states.get(known.group)
        return api.Submitted(trajectory=known.id, duplicate=True, group_state=group.state if group else known.state)

    def _told(self, known: _Known) -> str:
        """What was submitted under a key. The client may never have chosen it: it is then that of its responses."""
        self.flush()  # it may have come with this very batch
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
    """Rows of `sql` for any number of names. The lists are filled up to powers of two, so that few statements are ever
    prepared."""
    left = list(names)
    while left:
        part, left = left[:LOOKUP], left[LOOKUP:]
        part += part[:1] * ((1 << (len(part) - 1).bit_length()) - len(part))
        yield from c.execute(f"{sql} ({','.join('?' * len(part))})", (run, *part))


def seal_group(c: sqlite3.Connection, now: int, group_id: int) -> str:
    """Seal an open group: `sealed`, or `discarded` with its trajectories when nothing can be learned from it."""
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
