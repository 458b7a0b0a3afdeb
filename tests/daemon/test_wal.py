"""Only the writer ever folds the write-ahead log in: no reader does, whoever comes and goes (SQLite's WAL-reset bug)."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from artd.backups.backup import snapshot
from artd.check.run import check
from artd.store.readonly import open_readonly
from tests.daemon.rig import ROOT, Rig, fill

WRITERS = {
    "artd/store/writer.py": 1,  # the writer
    "artd/store/migrate.py": 1,  # the copy before a migration
    "artd/backups/backup.py": 1,  # the copy that becomes a backup
}
"""Every place that opens a database to write, and how often."""
BORROWERS = {"artd/store/store.py", "artd/backups/restore.py"}
"""Who uses the writer's way to open one: before the writer is there, and on a folder that no daemon runs on yet."""


def test_who_opens_a_database_to_write() -> None:
    found = {}
    for path in sorted((ROOT / "artd").rglob("*.py")):
        calls = re.findall(r"(?:sqlite3|aiosqlite)\.connect\(([^\n]*)", path.read_text())
        writing = [call for call in calls if "mode=ro" not in call and not call.startswith(("uri,", '":memory:"'))]
        if writing:
            found[str(path.relative_to(ROOT))] = len(writing)
    assert found == WRITERS
    importing = re.compile(r"from [.\w]*writer import [^\n]*\bconnect\b")
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "artd").rglob("*.py")}
    assert {name for name, text in texts.items() if importing.search(text)} == BORROWERS
    assert [name for name, text in texts.items() if "wal_checkpoint" in text] == ["artd/store/writer.py"]


@pytest.mark.asyncio
async def test_readers_that_come_and_go_never_fold_the_log_in(rig: Rig, tmp_path: Path) -> None:
    rig.start()
    async with rig.run() as (_, run):
        await fill(run, 1)
        await run.wait(1)
    database = rig.data / "artd.db"
    wal = rig.data / "artd.db-wal"

    def state() -> tuple[int, bytes, bytes]:
        """Size of the database, and both salts of the log: a checkpoint changes the first, a reset the others."""
        return database.stat().st_size, wal.read_bytes()[16:24], database.read_bytes()[:100]

    before, size = state(), wal.stat().st_size
    assert size > 0
    for _ in range(3):
        with closing(open_readonly(database)) as c:
            c.execute("SELECT count(*) FROM event").fetchone()
        with closing(open_readonly(database)) as c, pytest.raises(sqlite3.OperationalError):
            c.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    snapshot(database, tmp_path / "copy.db")
    assert check(rig.data, live=True).clean
    command = [sys.executable, "-m", "artd.cli.ctl", "status", "--data-dir", str(rig.data)]
    for _ in range(2):
        assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert state() == before and wal.stat().st_size >= size

    rig.kill()  # the readers are now the last to close the database
    size = wal.stat().st_size
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 3
    with closing(open_readonly(database)) as c:
        c.execute("SELECT count(*) FROM event").fetchone()
    assert state() == before and wal.stat().st_size == size > 0
