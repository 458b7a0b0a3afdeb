"""The writer thread: the only read-write connection, with group commit.

Owner of: the connection, the WAL's checkpoints. Invariants: a caller hears of a write only after COMMIT returned; an
error from BEGIN's disk work inside a function fails that function alone; an error from COMMIT means *unknown*, so
nobody is answered and `on_fatal` ends the daemon: the next boot's reading of the file decides. A full disk alone is no
such error: `_disown` makes sure of it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from artd_schema.crashpoint import reach

from .room import is_full

log = logging.getLogger(__name__)
T = TypeVar("T")
Write = Callable[[sqlite3.Connection], Any]
Group = list[tuple[Write, asyncio.Future[Any]]]
MAX_GROUP = 256
CHECKPOINT_BYTES = 4 << 20
CHECKPOINT_BUSY_BYTES = 64 << 20
FULL_RETRY_S = 0.5
HURRIED_TRIES = 3


class StoreFull(Exception):
    """The disk (or the page limit) is full; nothing of this write remains."""


def connect(path: Path) -> sqlite3.Connection:
    """The read-write connection: WAL, synchronous=FULL, only explicit transactions."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=512)
    for pragma in (
        "auto_vacuum = INCREMENTAL",
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        "busy_timeout = 5000",
        "wal_autocheckpoint = 0",
        f"journal_size_limit = {CHECKPOINT_BYTES}",  # else a WAL that was large once asks for a checkpoint for ever
        "cache_size = -16384",
        "temp_store = MEMORY",
        "trusted_schema = OFF",
        "recursive_triggers = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")
    connection.row_factory = sqlite3.Row
    return connection


class Writer:
    """Runs functions `fn(connection) -> result` in transactions, many to a commit."""

    def __init__(self, path: Path, on_fatal: Callable[[BaseException], None]) -> None:
        self._folder = path.parent
        self._wal = path.with_name(path.name + "-wal")
        self._connection = connect(path)
        self._on_fatal = on_fatal
        self._queue: queue.SimpleQueue[tuple[Write, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="artd-writer", daemon=True)
        self.commits = 0
        self.writes = 0
        self.hurried = threading.Event()
        """Set when the daemon ends: a full disk gets HURRIED_TRIES more tries and is not waited for."""
        self.on_full: Callable[[], None] = lambda: None
        """Called in the writer's thread when there was no room for a commit: may free some."""
        self.on_crowded: Callable[[bool], None] = lambda crowded: None
        """Called in the writer's thread: whether the log is large because somebody is always reading."""

    def start(self, loop: asyncio.AbstractEventLoop, on_commit: Callable[[], None]) -> None:
        """on_commit is called in the loop after each commit that changed something."""
        self._loop = loop
        self._on_commit = on_commit
        self._thread.start()

    def submit(self, fn: Write) -> asyncio.Future[Any]:
        """Queue a write; the future resolves after COMMIT. A cancelled caller's write still happens."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue.put((fn, future))
        return future

    def stop(self) -> None:
        """Finish what is queued, truncate the WAL, close."""
        self.hurried.set()
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            while (group := self._next_group()) is not None:
                self._commit(group)
                self._checkpoint()
            fold(self._connection, "TRUNCATE", self._folder)
            self._connection.close()
        except BaseException as error:
            self._on_fatal(error)

    def _next_group(self) -> Group | None:
        first = self._queue.get()
        if first is None:
            return None
        group = [first]
        while len(group) < MAX_GROUP and not self._queue.empty():
            item = self._queue.get()
            if item is None:
                self._queue.put(None)
                break
            group.append(item)
        return group

    def _commit(self, group: Group) -> None:
        connection = self._connection
        before = connection.total_changes
        results: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        connection.execute("BEGIN IMMEDIATE")
        for fn, future in group:
            result, error = self._apply(fn)
            results.append((future, result, error))
            if not connection.in_transaction:  # SQLite itself rolled the whole group back
                if not is_full(error, self._folder):
                    raise error or sqlite3.OperationalError("the transaction is gone")
                self._make_room()
                results = _full(group)
                break
        else:
            reach("writer.commit")
            try:
                connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if not is_full(error, self._folder):
                    raise
                self._disown()
                results = _full(group)
            reach("writer.committed")
        self.commits += 1
        self.writes += len(group)
        self._loop.call_soon_threadsafe(self._resolve, results, connection.total_changes != before)

    def _make_room(self) -> None:
        self.on_full()
        fold(self._connection, "PASSIVE", self._folder)  # a log that is in the database begins anew, and need not grow

    def _disown(self) -> None:
        """A COMMIT found no room for its frames, and SQLite took it back. What of it lies in the WAL is overwritten by the next
        commit, so only after one has succeeded is "no" the answer for certain; until there is room for one, nobody is
        answered. Errors: sqlite3.OperationalError when the daemon is to end first: then it is unknown.
        """
        refused = 0
        while True:
            self._make_room()
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.execute(
                    "INSERT INTO meta (key, value) VALUES ('disk_full', '1')"
                    " ON CONFLICT (key) DO UPDATE SET value = value + 1"
                )
                self._connection.execute("COMMIT")
                return
            except sqlite3.OperationalError as error:
                refused += self.hurried.is_set()
                if not is_full(error, self._folder) or refused >= HURRIED_TRIES:
                    raise
            time.sleep(FULL_RETRY_S)

    def _apply(self, fn: Write) -> tuple[Any, BaseException | None]:
        connection = self._connection
        connection.execute("SAVEPOINT w")
        try:
            result = fn(connection)
        except Exception as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK TO w")
                connection.execute("RELEASE w")
            return None, error
        connection.execute("RELEASE w")
        return result, None

    def _resolve(self, results: list[tuple[asyncio.Future[Any], Any, BaseException | None]], changed: bool) -> None:
        for future, result, error in results:
            if future.cancelled():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        if changed:
            self._on_commit()

    def _checkpoint(self) -> None:
        """Fold a large WAL into the database, when nobody waits or when it is very large."""
        try:
            size = self._wal.stat().st_size
        except FileNotFoundError:
            return
        if size <= (CHECKPOINT_BYTES if self._queue.empty() else CHECKPOINT_BUSY_BYTES):
            return
        reach("wal.checkpoint")
        folded = fold(self._connection, "PASSIVE", self._folder)
        self.on_crowded(not folded and size > 2 * CHECKPOINT_BUSY_BYTES)


def fold(connection: sqlite3.Connection, mode: str, folder: Path) -> bool:
    """Checkpoint the WAL; whether all of it is in the database now. A disk that has no room for it is no error. Errors:
    sqlite3.OperationalError."""
    try:
        busy, frames, folded = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    except sqlite3.OperationalError as error:
        if not is_full(error, folder):
            raise
        log.warning("no room to fold the write-ahead log into the database: free space; artd goes on by itself")
        return False
    return not busy and frames == folded


def _full(group: Group) -> list[tuple[asyncio.Future[Any], Any, BaseException | None]]:
    error = StoreFull("the disk is full: free space; artd goes on by itself")
    return [(future, None, error) for _, future in group]
