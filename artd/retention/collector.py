"""Garbage collection: deletes expired payloads, unused ledger responses, old events, and blob files that nothing refers to.

Rows of trajectories and batches stay; their payload becomes `expired`. A row whose state can still change is never touched.
Nothing is deleted by its age while deletion by age has stopped (`clock_jumps`) or the clock has jumped. Each transaction is
small, so that no other writer waits long. `store.blobs` explains why a file that somebody stores again during a pass is safe.
"""

from __future__ import annotations

import functools
import logging
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from artd.config import Retention
from artd.store.blobs import Blobs, delete_row, owner
from artd.store.store import Store, delete_events, emit, get_meta
from artd.tables.batches import expire_batches
from artd.tables.exchanges import delete_exchanges
from artd.tables.rollouts import expire_rollouts
from artd.tables.trajectories import expire_trajectories
from artd_schema.crashpoint import reach

from .clock_jumps import STOPPED, resume_retention

log = logging.getLogger(__name__)
FIRST_S = 60.0
PERIOD_S = 600.0
ROWS, FILES = 256, 64
"""The most that one transaction handles."""
NAMED = 5
"""The most rollouts that an event names."""
ALL = 1 << 62
VACUUM_PAGES = 256
VACUUM_STEPS = 40
DAY_MS = 86_400_000

REFERENCES = (
    "trajectory.blob", "trajectory_data.metadata", "exchange.blob", "batch.tensors", "batch.manifest", "batch.replay", "batch.replay_manifest",
)  # fmt: skip
"""Every column that names a blob; a test compares them with the schema's foreign keys."""
UNUSED = "SELECT b.sha, b.kind, b.bytes FROM blob b WHERE " + " AND ".join(
    f"NOT EXISTS (SELECT 1 FROM {table} x WHERE x.{column} = b.sha)"
    for table, column in (name.split(".") for name in REFERENCES)
)
SHARES = tuple(f"{number:02x}" for number in range(256))
"""Prefixes of blob names. One scan reads one prefix, so that nobody waits long for the connection that all readers share."""
OF_SHARE = "sha >= ? AND sha < ?"


@dataclass(frozen=True)
class Expiry:
    """One kind of row that expires by its age.

    `find` selects `id` and `bytes` of rows older than its first parameter, at most as many as its second. `forget` expires the
    rows with these ids. `days` names the setting.
    """

    kind: str
    days: str
    find: str
    forget: Callable[[sqlite3.Connection, Sequence[tuple[int]]], None]


OLDEST_RESPONSES = (
    "SELECT e.id, e.rollout_id, coalesce(length(e.turn), b.bytes) AS bytes FROM exchange e LEFT JOIN blob b ON b.sha = e.blob"
    " WHERE e.trajectory_id IS NULL ORDER BY e.created LIMIT ?"
)
EXPIRIES = (
    Expiry(
        "trajectory", "trajectories_days",
        "SELECT t.id, coalesce(length(d.body), b.bytes) AS bytes FROM trajectory t"
        " JOIN trajectory_data d ON d.trajectory_id = t.id LEFT JOIN blob b ON b.sha = t.blob"
        " JOIN trajectory_group g ON g.id = t.group_id AND (g.state IN ('trained', 'discarded')"
        " OR (g.split = 'eval' AND g.state = 'sealed'))"
        " WHERE t.payload = 'kept' AND (t.state IN ('trained', 'discarded') OR t.split = 'eval') AND t.created < ?"
        " ORDER BY t.created LIMIT ?",
        expire_trajectories,
    ),
    Expiry(
        "batch", "batches_days",
        "SELECT b.id, t.bytes + coalesce(r.bytes, 0) AS bytes FROM batch b JOIN blob t ON t.sha = b.tensors"
        " LEFT JOIN blob r ON r.sha = b.replay WHERE b.payload = 'kept' AND b.state IN ('trained', 'abandoned')"
        " AND b.created < ? AND NOT EXISTS (SELECT 1 FROM job j JOIN checkpoint k ON k.job_id = j.id"
        " WHERE j.batch_id = b.id AND k.state = 'committed') LIMIT ?",
        expire_batches,
    ),
    Expiry(  # before its responses, which go only with it
        "rollout", "exchanges_days",
        "SELECT o.id, 0 AS bytes, o.name FROM rollout o WHERE o.state = 'open' AND o.touched < ? ORDER BY o.touched LIMIT ?",
        expire_rollouts,
    ),
    Expiry(
        "exchange", "exchanges_days",
        "SELECT e.id, coalesce(length(e.turn), b.bytes) AS bytes FROM exchange e LEFT JOIN blob b ON b.sha = e.blob"
        " LEFT JOIN rollout o ON o.id = e.rollout_id WHERE e.trajectory_id IS NULL AND e.created < ?1"
        " AND (o.state IS NOT 'open' OR o.touched < ?1) ORDER BY e.created LIMIT ?2",
        delete_exchanges,
    ),
    Expiry(  # ids rise with time, so the oldest events have the smallest ids
        "event", "events_days",
        "SELECT id, length(data) AS bytes FROM event WHERE id < (SELECT min(id) FROM event) + ?2 AND at < ?1",
        delete_events,
    ),
)  # fmt: skip


@dataclass
class Collection:
    """The result of one pass: `counts` maps (what, kind) to [number, bytes].

    `what` is `expired` (payloads by their age), `trashed` (files that nothing refers to, moved to the trash) or `freed` (files
    that an earlier pass trashed, now deleted). `stopped` says why nothing expires by its age, "" when it does.
    """

    stopped: str = ""
    counts: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, what: str, kind: str, sizes: Iterable[int]) -> None:
        for size in sizes:
            found = self.counts.setdefault((what, kind), [0, 0])
            found[0] += 1
            found[1] += size

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"what": what, "kind": kind, "count": count, "bytes": size}
            for (what, kind), (count, size) in sorted(self.counts.items())
        ]


class Collector:
    """Runs a pass every ten minutes (`run`) or now (`collect`). `jumped()` says whether stored times are wrong at the moment."""

    def __init__(
        self, store: Store, blobs: Blobs, retention: Retention, jumped: Callable[[], bool] = lambda: False
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._retention = retention
        self._jumped = jumped
        self._busy = anyio.Lock()

    async def run(self) -> None:
        """Collect every ten minutes, until cancelled."""
        await anyio.sleep(FIRST_S)
        while True:
            done = await self.collect()
            if done.counts:
                log.info("collected: %s", done.rows())
            await anyio.sleep(PERIOD_S)

    async def collect(self, dry: bool = False, resume: bool = False) -> Collection:
        """Make one pass and return what it did. `dry` only counts what a pass would do. `resume` first allows deletion
        by age again."""
        async with self._busy:
            if resume and not dry:
                await self._store.write(lambda c: resume_retention(c, self._store.clock.now_ms()))
            done = Collection(stopped=await self._store.write(lambda c: get_meta(c, STOPPED)))
            self._blobs.forget_old_puts()
            trash = await anyio.to_thread.run_sync(self._blobs.list_trash)
            done.add("freed", "file", (size for _, size in trash))
            if dry:
                await self._count(done)
                return done
            await anyio.to_thread.run_sync(unlink, [path for path, _ in trash])
            for expiry in EXPIRIES:
                await self._expire(expiry, done)
            while sizes := await self._store.write(self._shrink_ledger):
                done.add("expired", "exchange", sizes)
            await self._trash(await self._drop_rows(), done)
            self._blobs.end_pass()
            await self._vacuum()
            return done

    async def _count(self, done: Collection) -> None:
        """Count what a pass would do. Blobs that only the expired rows refer to are not counted."""
        for expiry in EXPIRIES:
            if (before := self._cutoff(expiry)) is not None and not done.stopped:
                found = await self._store.scan(expiry.find, (before, ALL))
                done.add("expired", expiry.kind, (row["bytes"] for row in found))
        kinds = {row["sha"]: row["kind"] for row in await self._find_unused()}
        for _name, size, kind in await self._list_loose(kinds):
            done.add("trashed", kind, [size])

    # ---- rows ---------------------------------------------------------------------------------------------------------------

    def _cutoff(self, expiry: Expiry) -> int | None:
        """Return the time in milliseconds before which rows expire, None when this kind never does."""
        days: float = getattr(self._retention, expiry.days)
        return self._store.clock.now_ms() - int(days * DAY_MS) if days else None

    async def _expire(self, expiry: Expiry, done: Collection) -> None:
        while len(sizes := await self._store.write(lambda c: self._expire_some(c, expiry))):
            done.add("expired", expiry.kind, sizes)

    def _expire_some(self, c: sqlite3.Connection, expiry: Expiry) -> list[int]:
        before = self._cutoff(expiry)
        if before is None or self._jumped() or get_meta(c, STOPPED):
            return []
        found = c.execute(expiry.find, (before, ROWS)).fetchall()
        expiry.forget(c, [(row["id"],) for row in found])
        if found:
            names = {"names": [row["name"] for row in found[:NAMED]]} if "name" in found[0].keys() else {}  # noqa: SIM118
            emit(c, self._store.clock.now_ms(), "", f"{expiry.kind}.expired", "", count=len(found), **names)
        return [row["bytes"] for row in found]

    def _shrink_ledger(self, c: sqlite3.Connection) -> list[int]:
        """Delete some of the oldest unused responses while all of them are larger than the limit, and expire their rollouts, which
        would not be whole. Returns the bytes of each."""
        limit = int(self._retention.exchanges_gib * 2**30)
        (kept,) = c.execute("SELECT bytes FROM exchange_count").fetchone()
        if not limit or kept <= limit:
            return []
        gone: list[int] = []
        for row in c.execute(OLDEST_RESPONSES, (ROWS,)).fetchall():
            if kept - sum(gone) <= limit:
                break
            expire_rollouts(c, [(row["rollout_id"],)])
            delete_exchanges(c, [(row["id"],)])
            gone.append(row["bytes"])
        emit(c, self._store.clock.now_ms(), "", "exchange.expired", "", count=len(gone), bytes=sum(gone))
        return gone

    async def _drop_rows(self) -> dict[str, str]:
        """Delete the rows of blobs that nothing refers to. Returns their kinds by sha."""
        dropped: dict[str, str] = {}
        for part in _slices(await self._find_unused()):
            rows = await self._store.write(functools.partial(self._drop, shas=[row["sha"] for row in part]))
            dropped.update(rows)
        return dropped

    async def _find_unused(self) -> list[sqlite3.Row]:
        """Select (sha, kind, bytes) of every blob that nothing refers to."""
        return [
            row for share in SHARES for row in await self._store.scan(f"{UNUSED} AND b.{OF_SHARE}", _bound_share(share))
        ]

    def _drop(self, c: sqlite3.Connection, shas: Sequence[str]) -> dict[str, str]:
        """Delete these rows, except where something refers to the blob again. Returns the kinds of the deleted ones by sha."""
        gone: dict[str, str] = {}
        for sha in shas:
            row = c.execute(f"{UNUSED} AND b.sha = ?", (sha,)).fetchone()
            if row is not None and not self._blobs.being_put(sha):
                delete_row(c, sha)
                gone[sha] = row["kind"]
        return gone

    # ---- files --------------------------------------------------------------------------------------------------------------

    async def _trash(self, kinds: dict[str, str], done: Collection) -> None:
        """Move files without a row to the trash. `kinds`: the kinds, by sha, of blobs whose rows this pass has deleted."""
        for part in _slices(await self._list_loose(kinds)):
            names = [name for name, _, _ in part]
            moved = await self._store.write(functools.partial(self._blobs.trash, names=names))
            for name, size, kind in part:
                if name in moved:
                    done.add("trashed", kind, [size])
            reach("gc.trashed")

    async def _list_loose(self, kinds: dict[str, str]) -> list[tuple[str, int, str]]:
        """List (name, bytes, kind) of every file that has no row, or whose row is among `kinds`."""
        loose: list[tuple[str, int, str]] = []
        for folder in await anyio.to_thread.run_sync(self._blobs.folders):
            rows = await self._store.scan(f"SELECT sha FROM blob WHERE {OF_SHARE}", _bound_share(folder))
            known = {row["sha"] for row in rows if row["sha"] not in kinds}
            loose += await anyio.to_thread.run_sync(self._list_loose_in, folder, known, kinds)
        return loose

    def _list_loose_in(self, folder: str, known: set[str], kinds: dict[str, str]) -> list[tuple[str, int, str]]:
        return [
            (name, size, kinds.get(owner(name), "no row"))
            for name, size, old in self._blobs.files(folder)
            if (owner(name) not in known or "/." in name)
            and (old or owner(name) in kinds)
            and not self._blobs.being_put(name)
        ]

    async def _vacuum(self) -> None:
        """Give the database's free pages back to the file system, a little at a time."""
        for _ in range(VACUUM_STEPS):
            if not await self._store.write(_vacuum_some):
                return


def _vacuum_some(c: sqlite3.Connection) -> bool:
    """Free some pages. Returns whether there are more."""
    (free,) = c.execute("PRAGMA freelist_count").fetchone()
    for _ in range(min(free, VACUUM_PAGES)):
        c.execute("PRAGMA incremental_vacuum(1)")  # sqlite3 takes one step of this pragma, whatever its number
    return free > VACUUM_PAGES


def _bound_share(prefix: str) -> tuple[str, str]:
    """Return the bounds (from, below) of names that begin with `prefix`; hexadecimal digits sort before `g`."""
    return prefix, f"{prefix}g"


def unlink(files: Sequence[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
        reach("gc.unlinked")


def _slices(found: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (found[start : start + FILES] for start in range(0, len(found), FILES))
