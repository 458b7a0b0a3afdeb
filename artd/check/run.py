"""Runs all checks in order: SQLite's own, the rows of one snapshot, the files, and with `deep` all contents.

Rows and the list of files come from one read transaction. Beside a running daemon a file problem counts only if a
second snapshot has it too, because retention deletes files after their rows changed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from artd.datadir.layout import DataDir
from artd.store.migrate import require_known
from artd.store.readonly import open_readonly
from artd_schema.paths import DATABASE

from . import contents, files, hidden, listing, manifests, shape
from .report import Note, Outcome, Report, Violation
from .serving import SERVING
from .steps import STEPS
from .work import WORK

INVARIANTS = (*WORK, *STEPS, *SERVING)


def check(root: Path, *, deep: bool = False, live: bool = False, database: Path | None = None) -> Report:
    """Check a data folder or a backup. `live` says that a daemon may be changing it; `database` is the path of the database if
    its name is not the usual one.

    Raises migrate.SchemaMismatch for a database of another version, and sqlite3.DatabaseError if there is none.
    """
    data = DataDir(root, root)
    with closing(open_readonly(database or root / DATABASE)) as c:
        c.create_function("checkpoint_dir", 5, data.checkpoint, deterministic=True)
        look = _Check(data, c, deep)
        return look.run(live)


class _Check:
    """One check of one folder."""

    def __init__(self, data: DataDir, c: sqlite3.Connection, deep: bool) -> None:
        self._data = data
        self._c = c
        self._deep = deep
        self._seconds: dict[str, float] = {}

    def run(self, live: bool) -> Report:
        with self._measure("integrity_check" if self._deep else "quick_check"):
            outcomes = [shape.sound(self._c, self._deep)]
        try:
            require_known(self._c)
            found, notes = self._check_all()
            if live and any(outcome.count for outcome in found[1]):
                again, notes = self._check_all()
                found = (again[0], [a.still(b) for a, b in zip(found[1], again[1], strict=True)])
            outcomes += [*found[0], *found[1]]
        except sqlite3.DatabaseError as error:
            outcomes.append(Outcome.of("rows", "the rows can be read", [Violation(DATABASE, str(error))]))
            notes = ()
        return Report(self._deep, tuple(outcomes), notes, self._seconds)

    def _check_all(self) -> tuple[tuple[list[Outcome], list[Outcome]], tuple[Note, ...]]:
        """Return (outcomes of rows, outcomes of files), and the notes."""
        c = self._c
        c.execute("BEGIN")
        try:
            hidden.hide_deleted(c)
            rows = self._rows()
            listed = listing.read(c)
        finally:
            c.execute("COMMIT")
        with self._measure("files"):
            found = files.found_blobs(self._data)
            outcomes = self._files(listed, found)
            notes = files.notes(self._data, listed, found)
        if self._deep:
            with self._measure("contents"):
                outcomes += self._contents()
        return (rows, outcomes), notes

    def _rows(self) -> list[Outcome]:
        c = self._c
        with self._measure("foreign_keys"):
            outcomes = [shape.foreign_keys(c)]
        with self._measure("rows"):
            outcomes += [shape.schema(c), shape.runs(c), *(invariant.violations(c) for invariant in INVARIANTS)]
        return outcomes

    def _files(self, listed: listing.Listing, found: dict[str, int]) -> list[Outcome]:
        data, deep = self._data, self._deep
        return [
            Outcome.of("blob.file", "a blob that has a row has its file, whole", files.blobs(data, listed, found, deep)),
            Outcome.of(
                "checkpoint.files", "the folder of a committed checkpoint is whole", files.checkpoints(data, listed, deep)
            ),
            Outcome.of(
                "checkpoint.manifest", "a checkpoint's manifest says what its rows say",
                manifests.checkpoint_manifests(data, listed),
            ),
            Outcome.of(
                "batch.manifest", "a batch's manifests say what its rows say, and its members are its trajectories",
                manifests.batch_manifests(data, listed, self._c),
            ),
        ]  # fmt: skip

    def _contents(self) -> list[Outcome]:
        return [
            Outcome.of(
                "trajectory.body", "a body has its digest and its tokens, and is made of its exchanges",
                contents.bodies(self._data, self._c),
            ),
            Outcome.of("exchange.turn", "a turn in the ledger can be read", contents.ledger(self._data, self._c)),
        ]  # fmt: skip

    @contextmanager
    def _measure(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - started
