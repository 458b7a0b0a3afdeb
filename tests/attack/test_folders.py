"""Folders that are not artd's, or not whole: refused, and nothing in them changes, not even a mode."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from artd.cli.ctl import main as artctl
from artd.cli.main import main as artd
from artd.config import Retention
from artd.datadir import folder, lock
from artd.recover import identify, recover
from artd.retention.collector import Collector
from artd.store.blobs import Blobs
from artd_schema.paths import DATABASE, MARKER
from tests.fakes.rows import data_dir, open_store
from tests.fakes.world import template

ROOT = Path(__file__).parents[2]


def look(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every name below `root` with its mode, its time of change and its bytes."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        info = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        found[str(path.relative_to(root))] = (info.st_mode, info.st_mtime_ns, content)
    return found


def refused(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `artd start` says of a folder that it leaves as it is."""
    before = look(root)
    code = artd(["start", *words, "--data-dir", str(root)])
    said = capsys.readouterr().err
    assert code == 1 and said.count("\n") == 2 and said.splitlines()[1].startswith("next: "), said
    assert look(root) == before
    return said


def project(root: Path) -> Path:
    """What somebody who trains models has, open to others."""
    model = root / "checkpoints" / "llama" / "step-100"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights of a month")
    (root / "tmp").mkdir()
    (root / "tmp" / "mine.txt").write_text("mine")
    root.chmod(0o755)
    return root


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder in which two runs were trained."""
    return Path(shutil.copytree(template(), tmp_path / "data"))


# ---- what is not artd's ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--detach",)], ids=["foreground", "detached"])
def test_somebody_elses_folder_is_refused_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    said = refused(project(tmp_path / "p"), capsys, *words)
    assert "holds files that are not artd's (checkpoints, tmp)" in said and "--data-dir NEW" in said


def one_file(root: Path) -> None:
    (root / "README").write_text("mine")


def one_folder(root: Path) -> None:
    (root / "empty").mkdir()


def a_hidden_one(root: Path) -> None:
    (root / ".bashrc").write_text("mine")


def another_program(root: Path) -> None:
    with closing(sqlite3.connect(root / DATABASE)) as c:
        c.execute("CREATE TABLE mine (x)")


def names_like_artds(root: Path) -> None:
    for name in ("blobs/ab", "tmp", "logs", "checkpoints/r/l0-s000001-j1-f1"):
        (root / name).mkdir(parents=True)
    (root / "blobs" / "ab" / ("ab" + "0" * 62)).write_bytes(b"an object of somebody's store")


@pytest.mark.parametrize("fill", [one_file, one_folder, a_hidden_one, another_program, names_like_artds])
def test_whatever_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], fill: Callable[[Path], None]) -> None:
    root = tmp_path / "p"
    root.mkdir(mode=0o755)
    fill(root)
    refused(root, capsys)


@pytest.mark.parametrize("fill", [project, one_file, another_program, names_like_artds])
def test_nothing_is_taken_that_holds_anything(tmp_path: Path, fill: Callable[[Path], object]) -> None:
    root = tmp_path / "p"
    root.mkdir(mode=0o755)
    fill(root)
    before = look(root)
    with pytest.raises(folder.Refused, match="so artd leaves it alone"):
        folder.take(root)
    assert look(root) == before


VERBS = {
    "gc": (artctl, ("gc",)),
    "key add": (artctl, ("key", "add", "me")),
    "key list": (artctl, ("key", "list")),
    "key server": (artctl, ("key", "server")),
    "restore": (artd, ("restore", "{backup}")),
    "check": (artd, ("check",)),
    "backup": (artctl, ("backup", "{new}")),
    "export": (artctl, ("export", "r", "{new}")),
    "status": (artctl, ("status",)),
    "jobs": (artctl, ("jobs",)),
    "logs": (artctl, ("logs", "daemon")),
    "stop": (artd, ("stop",)),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("fill", [project, another_program])
def test_no_verb_changes_a_folder_that_is_not_artds(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str,
    fill: Callable[[Path], object],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)  # where a key would go
    root, backup = tmp_path / "p", tmp_path / "backup"
    root.mkdir(mode=0o755)
    fill(root)
    assert verb != "restore" or artctl(["backup", str(backup), "--data-dir", str(data)]) == 0
    before = look(root)
    call, words = VERBS[verb]
    given = [word.format(backup=backup, new=tmp_path / "new") for word in words]
    assert call([*given, "--data-dir", str(root)]) != 0
    assert capsys.readouterr() != ("", "") and look(root) == before
    assert not list(tmp_path.glob("new/*")) and not (tmp_path / "me.key_secret").exists()


@pytest.mark.parametrize("verb", ["backup", "restore"])
def test_a_target_that_holds_something_stays_as_it_is(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    root, backup = project(tmp_path / "p"), tmp_path / "backup"
    assert artctl(["backup", str(backup), "--data-dir", str(data)]) == 0
    before = look(root)
    if verb == "backup":
        assert artctl(["backup", str(root), "--data-dir", str(data)]) == 6
    else:
        assert artd(["restore", str(backup), "--data-dir", str(root)]) == 6
    assert look(root) == before


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
@pytest.mark.parametrize("verb", ["backup", "restore"])
def test_a_fresh_volume_is_an_empty_target(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, verb: str, fails: bool
) -> None:
    """And what was not made there is not removed when it fails, whoever put it there meanwhile."""
    root, taken = tmp_path / "volume", tmp_path / "backup"
    (root / "lost+found").mkdir(parents=True)
    (root / "lost+found" / "inode-17").write_text("found")
    assert artctl(["backup", str(taken), "--data-dir", str(data)]) == 0

    def broken(*_: object) -> None:
        (root / "note").write_text("mine")
        raise OSError(28, "No space left on device")

    if fails:
        monkeypatch.setattr(
            "artd.backups.backup._verify" if verb == "backup" else "artd.backups.restore._restrict_modes", broken
        )
    words = ["backup", str(root), "--data-dir", str(data)], ["restore", str(taken), "--data-dir", str(root)]
    assert (artctl(words[0]) if verb == "backup" else artd(words[1])) == fails
    assert (root / "lost+found" / "inode-17").read_text() == "found"
    if fails:
        assert sorted(path.name for path in root.iterdir()) == ["lost+found", "note"]


# ---- what is free to take -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a fresh volume"])
def test_a_free_folder_is_taken(tmp_path: Path, there: str) -> None:
    root = tmp_path / "deep" / "p"
    if there != "nothing":
        root.mkdir(parents=True)
        root.chmod(0o755)
    if there == "a fresh volume":
        (root / "lost+found").mkdir(mode=0o000)
    folder.take(root)
    assert (root / MARKER).exists() and stat.S_IMODE(root.stat().st_mode) == 0o700
    folder.take(root)  # a first start that was killed right here


def test_the_marker_is_durable_before_anything_else_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, list[str]]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, sorted(p.name for p in tmp_path.glob("p/*"))))

    monkeypatch.setattr(os, "fsync", fsync)
    folder.take(tmp_path / "p")
    assert [name for name, _ in synced][-2:] == [MARKER, "p"] and synced[-1][1] == [MARKER]


def test_a_first_start_that_was_killed_goes_on(tmp_path: Path) -> None:
    """Whatever it got to: the folders, an empty database, one without a schema."""
    root = tmp_path / "p"
    folder.take(root)
    for name in ("logs", "tmp", "blobs", "checkpoints", "code"):
        (root / name).mkdir()
        folder.take(root)
    lock.acquire(root, "1", 1.0).close()
    (root / DATABASE).touch()
    folder.take(root)
    (root / DATABASE).write_bytes(b"SQLite format 3\0" + bytes(4080))
    folder.take(root)
    (root / f"{DATABASE}-wal").write_bytes(b"the schema")
    folder.take(root)


# ---- a database that is gone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "empty", "deleted with its log", "no marker", "no schema"])
def test_a_database_that_is_gone_is_not_made_anew(data: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    folder.take(data)
    shutil.rmtree(data / "logs", ignore_errors=True)
    if how != "no marker":
        (data / MARKER).write_bytes(b"{}")
    (data / DATABASE).unlink()
    if how == "empty":
        (data / DATABASE).touch()
    if how == "no schema":
        (data / DATABASE).write_bytes(b"SQLite format 3\0" + bytes(4080))
    said = refused(data, capsys)
    if how != "no marker":
        assert "has no database" in said and "artd restore BACKUP --data-dir NEW" in said


def test_rows_that_are_only_in_the_log_are_not_thrown_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SQLite deletes a write-ahead log beside a database of no bytes."""
    folder.take(tmp_path / "p")
    (tmp_path / "p" / f"{DATABASE}-wal").write_bytes(b"acknowledged")
    assert f"but it holds {DATABASE}-wal" in refused(tmp_path / "p", capsys)


def test_a_restore_that_did_not_finish_is_no_data_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "p"
    (root / "blobs" / "ab").mkdir(parents=True)
    (root / ".artd.db.restoring").write_bytes(b"half")
    (root / "artd.lock").touch()
    said = refused(root, capsys)
    assert "a restore that did not finish" in said and "artd restore BACKUP" in said


# ---- what a boot and a collection leave alone -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_collection_leaves_what_artd_did_not_make(tmp_path: Path) -> None:
    """Another name, another kind of entry, or a sha256 that nobody here wrote and that is younger than this boot."""
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        blobs = Blobs(data.blobs)
        strangers = [
            "note.txt",
            "ab/note.txt",
            f"cd/{'ab' + '0' * 62}",
            f"ab/{'ab' + '1' * 62}",
            ".trash/note.txt",
            "models/x",
        ]
        for name in strangers:
            (data.blobs / name).parent.mkdir(exist_ok=True)
            (data.blobs / name).write_text("mine")
        (data.blobs / ".trash" / "folder").mkdir()
        for name in strangers[:3]:
            os.utime(data.blobs / name, (1.0, 1.0))
        left = data.blobs / f"ab/{'ab' + '2' * 62}"  # of a commit that never came, in an older boot
        left.write_text("x")
        os.utime(left, (1.0, 1.0))
        collector = Collector(store, blobs, Retention())
        done = [(await collector.collect()).rows() for _ in range(2)]
        assert [row["count"] for rows in done for row in rows] == [1, 1] and not left.exists()
        assert all((data.blobs / name).read_text() == "mine" for name in strangers)


@pytest.mark.asyncio
async def test_a_boot_that_made_its_database_deletes_nothing(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        (data.tmp / "job-1-f1").mkdir()
        (data.checkpoints / "r" / "l0-s000001-j1-f1").mkdir(parents=True)
        await store.write(lambda c: identify(c, data, 1))
        await recover(store, data)
        assert (data.tmp / "job-1-f1").is_dir() and (data.checkpoints / "r" / "l0-s000001-j1-f1").is_dir()
        await store.write(lambda c: identify(c, data, 2))
        await recover(store, data)
        assert not (data.tmp / "job-1-f1").exists()
        assert (data.unknown / "checkpoints" / "r" / "l0-s000001-j1-f1").is_dir()


# ---- the lock -------------------------------------------------------------------------------------------------------


def test_the_lock_cannot_be_deleted_away(data: Path) -> None:
    mine = lock.acquire(data, "1", 1.0)
    (data / "artd.lock").unlink()
    code = "import pathlib, sys; from artd.datadir import lock; lock.acquire(pathlib.Path(sys.argv[1]), '1', 1.0)"
    command = [sys.executable, "-c", code, str(data)]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 1 and "a daemon already runs" in second.stderr
    assert lock.held(data)
    with lock.reading(data) as alone:
        assert not alone
    mine.close()
    assert not lock.held(data)


# ---- other disks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", folder.RENAMED)
def test_a_subfolder_on_another_disk_is_refused_by_name(
    data: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    # The temporary folder is on the disk or, in `make quick`, in memory; one of these two is elsewhere.
    others = [
        at for at in (Path("/dev/shm"), ROOT) if os.access(at, os.W_OK) and at.stat().st_dev != data.stat().st_dev
    ]
    if not others:
        pytest.skip("no second file system")
    away = others[0] / f".artd-test-{hashlib.sha256(str(data).encode()).hexdigest()[:12]}-{name}"
    shutil.move(data / name, away)
    try:
        (data / name).symlink_to(away)
        before = look(away)
        assert f"{data / name} is on another file system" in refused(data, capsys)
        assert look(away) == before
    finally:
        shutil.rmtree(away)
