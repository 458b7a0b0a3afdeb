"""Gives services and clients access to the database: one writer thread, read-only connections, and a signal at each
change.

Owns `artd.db`. Every state change goes through `move`, which knows the transition tables. The transaction of a change
also inserts its row into the table `event`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiosqlite
import msgspec

from artd.clock import Clock
from artd.core.states import IllegalTransition, sources

from . import fs, origin
from .migrate import migrate
from .readers import Readers
from .writer import FULL_RETRY_S, HURRIED_TRIES, StoreFull, Writer, connect, fold

T = TypeVar("T")
WAKE_S = 0.02
"""The shortest time between two signals of a change."""
READER_S = 30.0
"""How long `Store.open` waits for another process to stop reading the database."""
CLIENTS = 4
"""The most clients' questions at the same time."""
DEADLINE_S = 5.0
"""How long one client's question may take."""


class Reader(Protocol):
    """A read-only connection."""

    async def execute_fetchall(self, sql: str, parameters: Sequence[Any]) -> Iterable[sqlite3.Row]: ...

    async def close(self) -> None: ...


class ReaderPool(Protocol):
    """Read-only connections that run whole questions; see readers.Readers."""

    async def run(self, fn: Callable[[sqlite3.Connection], T]) -> T: ...

    def hold(self, wanted: bool) -> None: ...

    async def close(self) -> None: ...


async def open_reader(path: Path) -> Reader:
    """Open a read-only connection that has a thread of its own."""
    reader = await aiosqlite.connect(f"file:{path}?mode=ro", uri=True)
    reader.row_factory = sqlite3.Row
    await reader.execute("PRAGMA query_only = 1")
    return reader


class DatabaseInUse(Exception):
    """Another process reads the database, so artd cannot fold the write-ahead log into it."""


def _fold_whole(connection: sqlite3.Connection, path: Path) -> bool:
    """Fold the whole log into the database before anything builds on it.

    After an fsync failed under an earlier daemon, the log may be right only in the page cache. A reader of the newest rows does
    not disturb. Returns False when the disk has no room. Raises DatabaseInUse when a process reads older rows for `READER_S`.
    """
    end = time.monotonic() + READER_S
    while not fold(connection, "TRUNCATE", path.parent) and not fold(connection, "PASSIVE", path.parent):
        if fs.refusal(path.parent):
            return False
        if time.monotonic() > end:
            raise DatabaseInUse(f"another process has been reading {path} for {READER_S:.0f} s. Next: fuser {path}")
    return True


class Store:
    """The database of a data folder.

    `await write(fn)` changes rows, `await read(sql)` looks rows up by a key for services, `await ask(fn)` answers clients, and
    `await scan(sql)` runs queries that take long. Tests with simulated time pass a `writer`, `open_reader` and `open_readers`
    without threads.
    """

    def __init__(
        self, path: Path, clock: Clock, on_fatal: Callable[[BaseException], None],
        writer: Callable[[Path, Callable[[BaseException], None]], Writer] = Writer,
        open_reader: Callable[[Path], Awaitable[Reader]] = open_reader,
        open_readers: Callable[[Path, int, float | None], ReaderPool] = Readers,
    ) -> None:  # fmt: skip
        self.path = path
        self.clock = clock
        self._on_fatal = on_fatal
        self._hurried = threading.Event()
        self._make_writer = writer
        self._open_reader = open_reader
        self._open_readers = open_readers
        self._changed = asyncio.Event()
        self._woken = float("-inf")
        self._waking: asyncio.TimerHandle | None = None
        self._reader: Reader | None = None

    async def open(self) -> None:
        """Create or migrate the file and start the writer. Raises migrate.SchemaMismatch, origin.ForeignLog, DatabaseInUse."""
        origin.require_own_log(self.path)
        connection = connect(self.path)
        try:
            fs.fsync_dir(self.path.parent)  # else a power loss could bring a rollback journal back beside the log
            migrate(connection)
            if _fold_whole(connection, self.path):  # closing the connection folds too, but hides an error
                origin.mark(connection, self.path)
        finally:
            connection.close()
        self._writer = self._make_writer(self.path, self._on_fatal)
        self._writer.hurried = self._hurried
        self._writer.start(asyncio.get_running_loop(), self.announce)
        self._reader = await self._open_reader(self.path)
        self._clients = self._open_readers(self.path, CLIENTS, DEADLINE_S)
        self._scans = self._open_readers(self.path, 1, None)
        self._writer.on_crowded = self._clients.hold

    async def close(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
        if self._reader is not None:
            await self._reader.close()
            await self._clients.close()
            await self._scans.close()
        await asyncio.to_thread(self._writer.stop)

    def submit(self, fn: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Queue `fn` for the writer. The future resolves after COMMIT returned, or raises StoreFull."""
        return self._writer.submit(fn)

    async def write(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn(connection)` in a transaction of the writer, and repeat it while the disk is full. Returns its result.

        The write still happens if its caller is cancelled. Raises StoreFull only while the daemon stops.
        """
        refused = 0
        while True:
            try:
                return await self._writer.submit(fn)
            except StoreFull as error:
                refused += 1
                if self._hurried.is_set() and refused >= HURRIED_TRIES:
                    self._on_fatal(error)
                    raise
                await asyncio.sleep(FULL_RETRY_S)

    def hurry(self) -> None:
        """Stop waiting for a full disk, because the daemon stops. If freeing the reserve does not help, a write ends the daemon."""
        self._hurried.set()

    def on_full(self, free: Callable[[], None]) -> None:
        """Let the writer's thread call `free` when the disk has no room for a commit."""
        self._writer.on_full = free

    async def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        assert self._reader is not None
        return list(await self._reader.execute_fetchall(sql, parameters))

    async def ask(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `fn` reads for a client. Raises readers.TooSlow."""
        return await self._clients.run(fn)

    async def scan(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return rows that take long to find. A scan waits for other scans only."""
        return await self._scans.run(lambda c: c.execute(sql, parameters).fetchall())

    def change(self) -> asyncio.Event:
        """Return an event that the next commit with a change sets. Take it *before* you read, or you may miss a change."""
        return self._changed

    def announce(self) -> None:
        """Set the event of `change`: at once after a quiet time, else `WAKE_S` after the last signal.

        The delay joins several commits into one signal: under load every service would otherwise read rows after every commit.
        """
        if self._waking is not None:
            return
        loop = asyncio.get_running_loop()
        left = self._woken + WAKE_S - loop.time()
        if left <= 0:
            self._wake()
        else:
            self._waking = loop.call_later(left, self._wake)

    def _wake(self) -> None:
        self._waking, self._woken = None, asyncio.get_running_loop().time()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def commits(self) -> tuple[int, int]:
        """The numbers of commits and of writes so far."""
        return self._writer.commits, self._writer.writes


def move(
    connection: sqlite3.Connection,
    entity: str,
    row_id: int | str,
    target: str,
    *,
    start: str | None = None,
    **columns: Any,
) -> None:
    """Move one row of `entity` to state `target` and set other columns.

    The row must be in `start`, or, with None, in any state that may become `target`.
    Raises IllegalTransition when it is in another state.
    """
    allowed = sources(entity, target)
    if start is not None:
        if start not in allowed:
            raise IllegalTransition(f"{entity}: {start!r} may not become {target!r}")
        allowed = (start,)
    key = "name" if entity == "process" else "id"
    sets = "".join(f", {name} = ?" for name in columns)
    marks = ",".join("?" * len(allowed))
    cursor = connection.execute(
        f"UPDATE {entity} SET state = ?{sets} WHERE {key} = ? AND state IN ({marks})",
        (target, *columns.values(), row_id, *allowed),
    )
    if cursor.rowcount != 1:
        found = connection.execute(f"SELECT state FROM {entity} WHERE {key} = ?", (row_id,)).fetchone()
        raise IllegalTransition(
            f"{entity} {row_id} is {found[0] if found else 'not there'}, so it cannot become {target}"
        )


def emit(connection: sqlite3.Connection, now: int, run: str, kind: str, ref: object = "", **data: Any) -> None:
    """Append an event. Call it in the transaction of the change that the event reports."""
    connection.execute(
        "INSERT INTO event (at, run, kind, ref, data) VALUES (?, ?, ?, ?, ?)",
        (now, run, kind, str(ref), msgspec.json.encode(data)),
    )


def delete_events(connection: sqlite3.Connection, ids: Sequence[tuple[int]]) -> None:
    connection.executemany("DELETE FROM event WHERE id = ?", ids)


def get_meta(connection: sqlite3.Connection, key: str, default: str = "") -> str:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return row[0] if row else default


def set_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    connection.execute(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, value),
    )


def delete_meta(connection: sqlite3.Connection, *keys: str) -> None:
    connection.executemany("DELETE FROM meta WHERE key = ?", [(key,) for key in keys])
