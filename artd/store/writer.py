"""Runs all writes in one thread, on the only read-write connection, with group commit.

Owns the connection, the WAL's checkpoints. A caller gets the answer to a write only after COMMIT returned. An error
inside a function fails that function alone. After an error of COMMIT nobody knows whether the group is durable, so
nobody gets an answer and `on_fatal` ends the daemon: the next boot reads the file, and that decides. A full disk is the
exception: `_disown` makes certain that the group is not durable.
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
    """The disk (or the page limit) is full; this write changed nothing."""


def connect(path: Path) -> sqlite3.Connection:
    """Open the read-write connection: WAL, synchronous=FULL, only explicit transactions."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=512)
    for pragma in (
        "auto_vacuum = INCREMENTAL",
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        "busy_timeout = 5000",
        "wal_autocheckpoint = 0",
        f"journal_size_limit = {CHECKPOINT_BYTES}",  # else a WAL file that was large once triggers checkpoints for ever
        "cache_size = -16384",
        "temp_store = MEMORY",
        "trusted_schema = OFF",
        "recursive_triggers = ON",
    ):
        connection.execute(f"PRAGMA {pragma}")
    connection.row_factory = sqlite3.Row
    return connection


class Writer:
    """Runs functions `fn(connection) -> result` in transactions, up to `MAX_GROUP` functions in one commit."""

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
        """The daemon sets this when it stops: a write on a full disk then gets only HURRIED_TRIES tries."""
        self.on_full: Callable[[], None] = lambda: None
        """The writer's thread calls this when the disk has no room for a commit; it may free some."""
        self.on_crowded: Callable[[bool], None] = lambda crowded: None
        """The writer's thread calls this with whether the log is large because readers always use it."""

    def start(self, loop: asyncio.AbstractEventLoop, on_commit: Callable[[], None]) -> None:
        """Start the thread. The event loop calls `on_commit` after each commit that changed something."""
        self._loop = loop
        self._on_commit = on_commit
        self._thread.start()

    def submit(self, fn: Write) -> asyncio.Future[Any]:
        """Queue a write. The future resolves after COMMIT. The write still happens if its caller is cancelled."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue.put((fn, future))
        return future

    def stop(self) -> None:
        """Finish the queued writes, truncate the WAL, and close the connection."""
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
                    raise error or sqlite3.OperationalError("SQLite rolled the transaction back without an error")
                self._make_room()
                results = _refuse_all(group)
                break
        else:
            reach("writer.commit")
            try:
                connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if not is_full(error, self._folder):
                    raise
                self._disown()
                results = _refuse_all(group)
            reach("writer.committed")
        self.commits += 1
        self.writes += len(group)
        self._loop.call_soon_threadsafe(self._resolve, results, connection.total_changes != before)

    def _make_room(self) -> None:
        self.on_full()
        fold(self._connection, "PASSIVE", self._folder)  # SQLite reuses the space of a log that is in the database

    def _disown(self) -> None:
        """Make certain that a commit without room never becomes durable: commit something else over it.

        SQLite took the COMMIT back, but some of its frames may be in the WAL. The next commit overwrites them, so only after
        one has succeeded is it certain that the group was not written; until then nobody gets an answer.
        Raises sqlite3.OperationalError when the daemon stops before that: then the outcome is unknown.
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
        """Fold a large WAL into the database if no write waits, and a very large one in any case."""
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
    """Checkpoint the WAL. Returns whether all of it is in the database now; False on a full disk.

    Raises sqlite3.OperationalError for any other failure.
    """
    try:
        busy, frames, folded = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    except sqlite3.OperationalError as error:
        if not is_full(error, folder):
            raise
        log.warning(
            "the disk has no room to fold the write-ahead log into the database: free space; artd continues by itself"
        )
        return False
    return not busy and frames == folded


def _refuse_all(group: Group) -> list[tuple[asyncio.Future[Any], Any, BaseException | None]]:
    """Return StoreFull as the result of every write of a group."""
    error = StoreFull("the disk is full: free space; artd continues by itself")
    return [(future, None, error) for _, future in group]
