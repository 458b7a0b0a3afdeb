"""The writer thread: the only read-write connection, with group commit.

Owner of: the connection, the WAL's checkpoints. Invariants: a caller hears of a write only after COMMIT returned; an
error from BEGIN's disk work inside a function fails that function alone; an error from COMMIT means *unknown*, so
nobody is answered and `on_fatal` ends the daemon: the next boot's reading of the file decides.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from artd_schema.crashpoint import reach

log = logging.getLogger(__name__)
T = TypeVar("T")
Write = Callable[[sqlite3.Connection], Any]
MAX_GROUP = 256
CHECKPOINT_BYTES = 4 << 20
CHECKPOINT_BUSY_BYTES = 64 << 20


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
        self._wal = path.with_name(path.name + "-wal")
        self._connection = connect(path)
        self._on_fatal = on_fatal
        self._queue: queue.SimpleQueue[tuple[Write, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="artd-writer", daemon=True)
        self.commits = 0
        self.writes = 0

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
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        try:
            while (group := self._next_group()) is not None:
                self._commit(group)
                self._checkpoint()
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.close()
        except BaseException as error:
            self._on_fatal(error)

    def _next_group(self) -> list[tuple[Write, asyncio.Future[Any]]] | None:
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

    def _commit(self, group: list[tuple[Write, asyncio.Future[Any]]]) -> None:
        connection = self._connection
        before = connection.total_changes
        results: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        connection.execute("BEGIN IMMEDIATE")
        for fn, future in group:
            results.append((future, *self._apply(fn)))
            if not connection.in_transaction:  # SQLite itself rolled the whole group back: disk full or I/O error
                full = StoreFull("the disk is full: free space; artd goes on by itself")
                results = [(item[1], None, full) for item in group]
                break
        else:
            reach("writer.commit")
            connection.execute("COMMIT")
            reach("writer.committed")
        self.commits += 1
        self.writes += len(group)
        self._loop.call_soon_threadsafe(self._resolve, results, connection.total_changes != before)

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
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            log.warning("no room to checkpoint the WAL of %d bytes: free space; artd goes on by itself", size)
