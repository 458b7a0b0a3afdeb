"""The store: one SQLite file, one writer thread, read-only connections, and word of every change.

Owner of: `artd.db`. Invariants: every state change goes through `move`, which knows the transition tables; every
change is told in the `event` table in the same transaction.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiosqlite
import msgspec

from ..clock import Clock
from ..core.states import IllegalTransition, sources
from .migrate import migrate
from .writer import FULL_RETRY_S, HURRIED_TRIES, StoreFull, Writer, connect, fold

T = TypeVar("T")
WAKE_S = 0.02


class Reader(Protocol):
    """A read-only connection."""

    async def execute_fetchall(self, sql: str, parameters: Sequence[Any]) -> Iterable[sqlite3.Row]: ...

    async def close(self) -> None: ...


async def open_reader(path: Path) -> Reader:
    """A connection in a thread of its own."""
    reader = await aiosqlite.connect(f"file:{path}?mode=ro", uri=True)
    reader.row_factory = sqlite3.Row
    await reader.execute("PRAGMA query_only = 1")
    return reader


class Store:
    """`await write(fn)` for everything that changes rows, `await read(sql)` for the rest. writer, open_reader: tests with
    simulated time have some without threads."""

    def __init__(
        self, path: Path, clock: Clock, on_fatal: Callable[[BaseException], None],
        writer: Callable[[Path, Callable[[BaseException], None]], Writer] = Writer,
        open_reader: Callable[[Path], Awaitable[Reader]] = open_reader,
    ) -> None:  # fmt: skip
        self.path = path
        self.clock = clock
        self._on_fatal = on_fatal
        self._hurried = threading.Event()
        self._make_writer = writer
        self._open_reader = open_reader
        self._changed = asyncio.Event()
        self._woken = float("-inf")
        self._waking: asyncio.TimerHandle | None = None
        self._reader: Reader | None = None

    async def open(self) -> None:
        """Create or migrate the file and start the writer. Errors: migrate.SchemaMismatch."""
        connection = connect(self.path)
        try:
            migrate(connection)
            fold(connection, "TRUNCATE")  # close does it too, but passes over an error
        finally:
            connection.close()
        self._writer = self._make_writer(self.path, self._on_fatal)
        self._writer.hurried = self._hurried
        self._writer.start(asyncio.get_running_loop(), self.announce)
        self._reader = await self._open_reader(self.path)

    async def close(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
        if self._reader is not None:
            await self._reader.close()
        await asyncio.to_thread(self._writer.stop)

    def submit(self, fn: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Queue `fn` for the writer; the future resolves after COMMIT returned, or with StoreFull."""
        return self._writer.submit(fn)

    async def write(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn(connection)` in a transaction of the writer, again and again while the disk is full. A cancelled caller's
        write still happens."""
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
        """The daemon ends: a full disk is not waited for any more; if giving up the reserve does not help, it is the end."""
        self._hurried.set()

    def on_full(self, free: Callable[[], None]) -> None:
        """free: called in the writer's thread when there is no room to commit."""
        self._writer.on_full = free

    async def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        assert self._reader is not None
        return list(await self._reader.execute_fetchall(sql, parameters))

    def change(self) -> asyncio.Event:
        """An event that is set at the next commit that changes something; take it *before* reading."""
        return self._changed

    def announce(self) -> None:
        """Wake whoever waits for a change: at once after a quiet time, else a little later, together with what comes
        until then (under load, every service would look at the rows after every commit)."""
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
        """(commits, writes) so far."""
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
    """Move one row of `entity` to state `target`, from `start` or from any state that may, and set other columns.

    Errors: IllegalTransition when the row was in none of these states.
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
    """Append an event, in the transaction of the change that it tells of."""
    connection.execute(
        "INSERT INTO event (at, run, kind, ref, data) VALUES (?, ?, ?, ?, ?)",
        (now, run, kind, str(ref), msgspec.json.encode(data)),
    )


def emit_many(
    connection: sqlite3.Connection, now: int, run: str, kind: str, events: Sequence[tuple[object, dict[str, Any]]]
) -> None:
    """Append one event for each (ref, data)."""
    connection.executemany(
        "INSERT INTO event (at, run, kind, ref, data) VALUES (?, ?, ?, ?, ?)",
        [(now, run, kind, str(ref), msgspec.json.encode(data)) for ref, data in events],
    )


def get_meta(connection: sqlite3.Connection, key: str, default: str = "") -> str:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return row[0] if row else default


def set_meta(connection: sqlite3.Connection, key: str, value: str) -> None:
    connection.execute(
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, value),
    )
