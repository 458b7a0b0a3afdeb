"""Disks that are full, slow to say so, damaged or of the past: what could not be done is done later, and the remedy is right."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artd.backups import backup
from artd.cli import show
from artd.cli.ctl import main as artctl
from artd.datadir import folder
from artd.datadir.disk import LOW_FILES, Disk
from artd.errors import Busy
from artd.retention.clock_jumps import SEEN
from artd.store import fs, origin, store
from artd.store.writer import connect
from artd_schema.paths import DATABASE
from tests.daemon.rig import FOLDERS
from tests.fakes.rows import FakeClock, add_run, count, never, open_store
from tests.fakes.world import template

ROOT = Path(__file__).parents[2]
RESTORE = "artd restore BACKUP --data-dir NEW"
DAY_MS = 86_400_000
ENVIRONMENT = os.environ | {"PYTHONPATH": ":".join(map(str, FOLDERS))}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder in which two runs were trained."""
    return Path(shutil.copytree(template(), tmp_path / "data"))


def rows(data: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(data / DATABASE)) as c:
        return c.execute(sql).fetchall()


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return "".join(capsys.readouterr())


# ---- full -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_file_that_found_no_room_is_written_when_there_is_some(tmp_path: Path, number: int) -> None:
    full = True

    def write(text: str) -> None:
        if full:
            raise OSError(number, os.strerror(number))
        (tmp_path / "told").write_text(text)

    fs.write_or_later("told", lambda: write("starting"))
    fs.write_or_later("told", lambda: write("ready"))
    fs.catch_up()
    assert not (tmp_path / "told").exists()
    full = False
    fs.catch_up()
    assert (tmp_path / "told").read_text() == "ready", "the newest of them"
    (tmp_path / "told").unlink()
    fs.catch_up()
    assert not (tmp_path / "told").exists(), "it is written once"


def test_an_error_that_is_not_for_want_of_room_is_not_passed_over(tmp_path: Path) -> None:
    def write() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        fs.write_or_later("told", write)
    fs.catch_up()


def test_inodes_count_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    answer = SimpleNamespace(f_bavail=1 << 30, f_frsize=4096, f_flag=0, f_files=10_000, f_favail=LOW_FILES - 1)
    monkeypatch.setattr(os, "statvfs", lambda path: answer)
    disk = Disk(tmp_path, 1 << 20, clock)
    with pytest.raises(Busy, match=f"{LOW_FILES - 1} inodes left.*until 320 are free"):
        disk.require()
    for free, refused in ((LOW_FILES, True), (319, True), (320, False), (LOW_FILES, False), (LOW_FILES - 1, True)):
        answer.f_favail = free
        clock.advance(1.0)
        assert bool(disk.why()) == refused, free
    answer.f_files = answer.f_favail = 0  # btrfs has no table of inodes
    clock.advance(1.0)
    assert not disk.why()


class Quota:
    """A disk quota that is used up: SQLite says `disk I/O error` in its COMMIT, and no file can be written in the folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used_up = False
        self.refused = 0
        real = fs.refusal

        def refusal(path: Path) -> OSError | None:
            assert path == folder
            if not self.used_up:
                return real(path)
            self.used_up = self.refused < 2  # somebody frees some
            return OSError(errno.EDQUOT, "Disk quota exceeded")

        monkeypatch.setattr(fs, "refusal", refusal)

    def guard(self, made: store.Store) -> None:
        made._writer._connection = Refusing(made._writer._connection, self)


class Refusing:
    """A connection whose COMMIT fails as under a quota: SQLite takes the transaction back."""

    def __init__(self, real: sqlite3.Connection, quota: Quota) -> None:
        self._real, self._quota = real, quota

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, sql: str, *rest: Any) -> Any:
        if sql == "COMMIT" and self._quota.used_up:
            self._quota.refused += 1
            self._real.execute("ROLLBACK")
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
            raise error
        return self._real.execute(sql, *rest)


@pytest.mark.asyncio
async def test_a_quota_is_a_full_disk_to_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = Quota(tmp_path, monkeypatch)
    async with open_store(tmp_path, on_fatal=lambda error: None) as made:
        quota.guard(made)
        quota.used_up = True
        async with asyncio.timeout(20):
            await add_run(made)  # tried again until it fits
        assert quota.refused == 2 and await count(made, "run") == 1


@pytest.mark.asyncio
async def test_an_io_error_with_room_ends_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = Quota(tmp_path, monkeypatch)
    monkeypatch.setattr(fs, "refusal", lambda path: None)
    fatal: list[BaseException] = []
    made = store.Store(tmp_path / DATABASE, FakeClock(), fatal.append)
    await made.open()
    quota.guard(made)
    quota.used_up = True
    answer = made.submit(lambda c: c.execute("DELETE FROM run").rowcount)
    while not fatal:
        await asyncio.sleep(0.01)
    assert "disk I/O error" in str(fatal[0]) and not answer.done()
    connection = made._writer._connection
    await made.close()
    connection.close()


# ---- a log that memory alone has ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_nothing_is_built_on_a_log_that_is_not_in_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of older rows keeps the log from being folded in: what an fsync missed in an older life would stay missed."""
    monkeypatch.setattr(store, "READER_S", 0.0)
    async with open_store(tmp_path) as made:
        await add_run(made)
        with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as old:
            old.execute("BEGIN")
            old.execute("SELECT * FROM run").fetchall()
            await made.write(lambda c: c.execute("INSERT INTO meta (key, value) VALUES ('new', '1')").rowcount)
            connection = connect(tmp_path / DATABASE)
            connection.execute("PRAGMA busy_timeout = 10")
            with pytest.raises(store.DatabaseInUse, match="Next: fuser"):
                store._fold_whole(connection, tmp_path / DATABASE)
            old.execute("COMMIT")
            monkeypatch.setattr(store, "READER_S", 5.0)
            old.execute("BEGIN")  # one that reads the newest rows is in nobody's way
            old.execute("SELECT * FROM run").fetchall()
            store._fold_whole(connection, tmp_path / DATABASE)
            connection.close()


# ---- a damaged database ---------------------------------------------------------------------------------------------


def damage(data: Path) -> None:
    """Everything behind the header is gone."""
    raw = (data / DATABASE).read_bytes()
    (data / DATABASE).write_bytes(raw[:100] + b"\xff" * (len(raw) - 100))


@pytest.mark.parametrize(
    "words",
    [("status",), ("runs",), ("jobs",), ("backup", "{new}"), ("export", "r", "{new}"), ("gc",)],
    ids=lambda w: w[0],
)
def test_the_remedy_for_a_damaged_database_is_a_restore(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    damage(data)
    assert artctl([word.format(new=tmp_path / "new") for word in words] + ["--data-dir", str(data)]) == 1
    assert f"next: {RESTORE}" in said(capsys)


@pytest.mark.parametrize(
    "way", [damage, lambda data: (data / DATABASE).write_bytes(b"words" * 1000)], ids=["pages", "all"]
)
def test_a_start_on_a_damaged_database_says_restore_and_leaves_no_trace(data: Path, way: Any) -> None:
    (data / "artd.folder").write_bytes(b"{}")
    way(data)
    done = subprocess.run(
        [sys.executable, "-m", "artd.cli.main", "start", "--data-dir", str(data)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and RESTORE in done.stderr and "Traceback" not in done.stderr
    assert not (data / "daemon.json").exists()


# ---- a log of another database --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data folder `killed` of a daemon that was killed in two boots, and with the database `older` of the first one."""
    made = tmp_path_factory.mktemp("lives")
    root = made / "killed"
    code = "import asyncio, os, pathlib, sys; from tests.attack.test_disks import live; asyncio.run(live(pathlib.Path(sys.argv[1])))"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, str(root)], cwd=ROOT, env=ENVIRONMENT, check=True)
        if not (made / "older").exists():
            (made / "older").mkdir()
            for name in (DATABASE, f"{DATABASE}-wal"):
                shutil.copy(root / name, made / "older" / name)
            with closing(connect(made / "older" / DATABASE)) as c:
                c.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return made


@pytest.fixture
def killed(killed_twice: Path, tmp_path: Path) -> Path:
    """The database of a daemon that was killed: a row of it is only in the log. Beside it, `older` is the one from a boot before."""
    shutil.copytree(killed_twice, tmp_path, dirs_exist_ok=True)
    return tmp_path / "killed" / DATABASE


async def live(root: Path) -> None:
    """A daemon's store that is killed after a commit."""
    folder.take(root)
    made = store.Store(root / DATABASE, FakeClock(), never)
    await made.open()
    await made.write(
        lambda c: c.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('acknowledged', '1')").rowcount
    )
    os._exit(0)


def opened(database: Path) -> None:
    async def once() -> None:
        made = store.Store(database, FakeClock(), never)
        await made.open()
        await made.close()

    asyncio.run(once())


def test_a_killed_daemon_has_its_own_log(killed: Path) -> None:
    opened(killed)
    assert rows(killed.parent, "SELECT value FROM meta WHERE key = 'acknowledged'") == [("1",)]
    opened(killed)


@pytest.mark.parametrize("which", ["a backup", "a copy of an older boot", "a copy of another folder"])
def test_a_database_beside_a_log_that_is_not_its_own_is_refused(killed: Path, tmp_path: Path, which: str) -> None:
    if which == "a backup":
        shutil.copy(killed, tmp_path / "copy.db")
        shutil.copy(f"{killed}-wal", tmp_path / "copy.db-wal")
        backup.snapshot(tmp_path / "copy.db", tmp_path / "backup.db")
        shutil.copyfile(tmp_path / "backup.db", killed)  # over it: the inode stays
    elif which == "a copy of an older boot":
        shutil.copyfile(tmp_path / "older" / DATABASE, killed)
    else:
        folder.take(tmp_path / "other")
        opened(tmp_path / "other" / DATABASE)
        shutil.copyfile(tmp_path / "other" / DATABASE, killed)
    before = killed.read_bytes(), Path(f"{killed}-wal").read_bytes()
    assert before[1]
    with pytest.raises(origin.ForeignLog, match=f"Next: {RESTORE}"):
        opened(killed)
    assert (killed.read_bytes(), Path(f"{killed}-wal").read_bytes()) == before
    Path(f"{killed}-wal").unlink()
    opened(killed)  # there is nothing to replay


@pytest.mark.parametrize("step", range(6))
def test_a_death_at_any_moment_of_the_marking_refuses_nothing(
    killed: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """At each write of the marker and at each fold: what lies there then is opened, and again."""
    calls = 0
    copy = killed.parent.with_name("image")

    def dies(real: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > step:
                if not copy.exists():  # what raises closes the database in order
                    shutil.copytree(killed.parent, copy)
                raise RuntimeError("killed")
            return real(*args)

        return call

    monkeypatch.setattr(origin, "_write_marker", dies(origin._write_marker))
    monkeypatch.setattr(origin, "fold", dies(origin.fold))
    try:
        opened(killed)
    except RuntimeError:
        pass
    monkeypatch.undo()
    if not copy.exists():
        shutil.copytree(killed.parent, copy)
    opened(copy / DATABASE)
    assert rows(copy, "SELECT value FROM meta WHERE key = 'acknowledged'") == [("1",)]
    opened(copy / DATABASE)


# ---- a clock of another year ----------------------------------------------------------------------------------------


@pytest.fixture
def later(data: Path) -> Iterator[Path]:
    """A daemon ran on this folder a year ago, by the clock."""
    with closing(connect(data / DATABASE)) as c:
        c.execute("INSERT INTO meta (key, value) VALUES (?, ?)", (SEEN, str(show.now_ms() - 365 * DAY_MS)))
    yield data


def collect(data: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert artctl(["gc", "--json", *words, "--data-dir", str(data)]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("words", [(), ("--dry-run",)], ids=["real", "dry"])
def test_no_daemon_nothing_by_age_under_a_clock_that_jumped(
    later: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    before = rows(later, "SELECT id, payload FROM trajectory"), rows(later, "SELECT max(id) FROM event")
    done = collect(later, capsys, *words)
    assert "ahead" in done["stopped"] and not [row for row in done["rows"] if row["what"] == "expired"]
    assert rows(later, "SELECT id, payload FROM trajectory") == before[0]
    assert rows(later, "SELECT max(id) FROM event") >= before[1], "the evidence stays"
    assert [row for row in collect(later, capsys, "--resume")["rows"] if row["what"] == "expired"], (
        "somebody has looked"
    )


def test_gc_on_a_disk_that_cannot_be_written_says_so(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    assert artctl(["gc", "--data-dir", str(data)]) == 1
    text = said(capsys)
    assert "Read-only file system" in text and "make it writable" in text
