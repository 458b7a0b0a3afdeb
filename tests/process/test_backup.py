"""backup and restore: whole or not at all, whatever goes on meanwhile, and a restored folder is an instance of its own."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from artd.backups import backup as module
from artd.backups import restore as restoring
from artd.backups.backup import INFO, BackupError, BackupInfo, NotEmpty, backup
from artd.backups.instance import LEAP
from artd.backups.restore import restore
from artd.check.run import check
from artd.datadir import lock
from artd.datadir.layout import DataDir
from artd.recover import identify
from artd.store import fs
from artd.store.blobs import hash_file
from artd.store.migrate import SchemaMismatch
from artd.supervise.code import install_files
from artd_schema.codec import to_json
from artd_schema.data.manifest import MANIFEST_FILE
from artd_schema.packages import PackageCode, read_tree
from tests.fakes.world import copy, template

NOW = 1_800_000_000_000


@pytest.fixture(autouse=True)
def _no_plug_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks are slow, and what reaches them in which order is told by one test alone."""
    monkeypatch.setattr(fs, "fsync_file", lambda path: None)
    monkeypatch.setattr(fs, "fsync_dir", lambda path: None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return copy(tmp_path / "data")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "backup"


@pytest.fixture(name="taken", scope="module")
def a_backup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup that is only read."""
    target = tmp_path_factory.mktemp("taken") / "backup"
    backup(template(), target, NOW, link=False)
    return target


def rows(root: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{root / 'artd.db'}?mode=ro", uri=True)) as c:
        return c.execute(sql).fetchall()


def change(root: Path, sql: str) -> None:
    with closing(sqlite3.connect(root / "artd.db", isolation_level=None)) as c:
        assert c.execute(sql).rowcount != 0, sql


def dump(root: Path) -> list[str]:
    with closing(sqlite3.connect(f"file:{root / 'artd.db'}?mode=ro", uri=True)) as c:
        return list(c.iterdump())


def files(root: Path) -> dict[str, os.stat_result]:
    """Everything but the database's own files."""
    return {
        str(p.relative_to(root)): p.stat() for p in root.rglob("*") if p.is_file() and not p.name.startswith("artd.db")
    }


def assert_whole(folder: Path) -> None:
    report = check(folder, deep=True)
    assert report.clean, report.broken
    assert report.notes == ()


# ---- backup -----------------------------------------------------------------------------------------------------------


def test_a_backup_is_whole_and_the_folder_is_not_touched(data: Path, target: Path) -> None:
    before = files(data)
    made = backup(data, target, NOW)
    assert_whole(target)
    assert dump(target) == dump(data)
    assert {name: (s.st_size, s.st_mtime_ns) for name, s in files(data).items()} == {
        name: (s.st_size, s.st_mtime_ns) for name, s in before.items()
    }
    info = msgspec.json.decode((target / INFO).read_bytes(), type=BackupInfo)
    assert info == made.info and info.created == NOW
    assert [(run.name, run.state, run.step) for run in info.runs] == [("old", "finished", 2), ("r", "active", 2)]
    assert (info.blobs, info.checkpoints) == (len(rows(data, "SELECT 1 FROM blob")), 4)
    own = [target, target / INFO, target / "artd.db", *(path for path in target.rglob("*") if path.is_dir())]
    assert [path for path in own if path.stat().st_mode & 0o077] == []


def test_the_code_that_a_checkpoint_names_comes_along(data: Path, target: Path, tmp_path: Path) -> None:
    files_of = {"toy/__init__.py": b"# a loss\n"}
    digest = install_files(data, files_of).name
    ((folder, old),) = rows(data, "SELECT dir, sha FROM checkpoint WHERE state = 'committed' ORDER BY id DESC LIMIT 1")
    manifest = data / folder / MANIFEST_FILE
    code = PackageCode(kind="toy", target="toy:x", distribution="toy", version="1", digest=digest)
    manifest.write_bytes(to_json(msgspec.json.decode(manifest.read_bytes()) | {"loss": code}))
    new = hash_file(manifest)[0]
    change(data, f"UPDATE checkpoint SET sha = '{new}' WHERE sha = '{old}'")
    change(data, f"UPDATE event SET data = CAST(replace(CAST(data AS TEXT), '{old}', '{new}') AS BLOB)")
    install_files(data, {"unnamed.py": b""})
    backup(data, target, NOW)
    assert [path.name for path in (target / "code").iterdir()] == [digest]
    assert read_tree(target / "code" / digest) == files_of
    restore(target, tmp_path / "restored", NOW)
    assert read_tree(tmp_path / "restored" / "code" / digest) == files_of
    (data / "code" / digest / "toy" / "__init__.py").write_text("# another\n")
    backup(data, tmp_path / "second", NOW)  # a damaged copy is of no use to anybody
    assert list((tmp_path / "second" / "code").iterdir()) == []


def test_files_are_shared_or_copied(data: Path, tmp_path: Path) -> None:
    shared, copied = tmp_path / "shared", tmp_path / "copied"
    made = backup(data, shared, NOW)
    same = {
        name for name, stat in files(shared).items() if name in files(data) and stat.st_ino == files(data)[name].st_ino
    }
    assert (
        len(same) == made.fetched.linked == len(files(shared)) - 1 and made.fetched.copied == 0
    )  # all but backup.json
    made = backup(data, copied, NOW, link=False)
    assert made.fetched.linked == 0 and made.fetched.copied == len(same)
    assert all(stat.st_nlink == 1 for stat in files(copied).values())
    assert made.fetched.copied_bytes == sum(files(copied)[name].st_size for name in same)


def test_another_disk_cannot_share(data: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, to: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(module.os, "link", link)
    made = backup(data, target, NOW)
    assert made.fetched.linked == 0 and made.fetched.copied > 0
    assert_whole(target)


@pytest.mark.parametrize("where", ["full", "file", "inside", "around"])
def test_where_a_backup_cannot_lie(data: Path, target: Path, where: str) -> None:
    place = {"full": target, "file": target, "inside": data / "backups" / "one", "around": data.parent}[where]
    if where == "full":
        target.mkdir()
        (target / "kept").write_text("mine")
    if where == "file":
        target.write_text("mine")
    before = sorted(data.parent.rglob("*"))
    with pytest.raises(NotEmpty):
        backup(data, place, NOW)
    assert sorted(data.parent.rglob("*")) == before


def test_an_empty_folder_will_do(data: Path, target: Path) -> None:
    target.mkdir(mode=0o755)
    backup(data, target, NOW)
    assert_whole(target)


def test_what_retention_removes_meanwhile_is_no_part_of_it(
    data: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row changes first, then the files go: between the snapshot and the fetching, here, in the first two rounds."""
    real, left = module._fetch, [0, 1]

    def fetch(source: Path, *rest: object) -> str:
        if left:
            step = left.pop(0)
            change(source, f"UPDATE checkpoint SET state = 'retired' WHERE run_id = 2 AND step = {step}")
            (folder,) = rows(source, f"SELECT dir FROM checkpoint WHERE run_id = 2 AND step = {step}")[0]
            shutil.rmtree(source / str(folder))
        return real(source, *rest)

    monkeypatch.setattr(module, "_fetch", fetch)
    made = backup(data, target, NOW)
    assert made.fetched.rounds == 3 and made.info.checkpoints == 2
    assert_whole(target)


def test_what_only_an_older_snapshot_named_is_removed(
    data: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 0 is fetched in the first round, and retired before the second."""
    real, rounds = module._fetch, []

    def fetch(source: Path, *rest: object) -> str:
        found = real(source, *rest)
        if not rounds:
            change(source, "UPDATE checkpoint SET state = 'retired' WHERE run_id = 2 AND step = 0")
        rounds.append(found)
        return found or ("something" if len(rounds) == 1 else "")

    monkeypatch.setattr(module, "_fetch", fetch)
    backup(data, target, NOW)
    assert_whole(target)
    assert len(list(target.glob("checkpoints/*/*"))) == 3


def test_a_lost_file_is_told_and_nothing_is_kept(data: Path, target: Path) -> None:
    (folder,) = rows(data, "SELECT dir FROM checkpoint WHERE run_id = 2 AND step = 1")[0]
    shutil.rmtree(data / str(folder))
    with pytest.raises(BackupError, match=rf"{folder} does not exist.*artd check"):
        backup(data, target, NOW)
    assert list(target.iterdir()) == []


def test_a_damaged_file_is_told_and_nothing_is_kept(data: Path, target: Path) -> None:
    spoil(tensors(data))
    with pytest.raises(BackupError, match=rf"blob.file: blobs/../{tensors(data).name}.*damaged"):
        backup(data, target, NOW)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("where", ["copyfile", "fsync_tree", "check"])
def test_a_failure_leaves_nothing(data: Path, target: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    owner = {"copyfile": module.shutil, "fsync_tree": module.fs, "check": module}[where]

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, where, full)
    with pytest.raises(OSError, match="No space left"):
        backup(data, target, NOW, link=False)
    assert list(target.iterdir()) == []


def test_nothing_makes_it_a_backup_before_everything_is_durable(data: Path, target: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, bool]] = []

    def watch(patch: pytest.MonkeyPatch, owner: object, name: str, final: Path) -> None:
        real = getattr(owner, name)

        def watched(*args: object, **more: object) -> object:
            steps.append((name, final.exists()))
            return real(*args, **more)

        patch.setattr(owner, name, watched)

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((module, "check"), (module.fs, "fsync_tree"), (module.fs, "write_file")):
            watch(patch, owner, name, target / INFO)
        backup(data, target, NOW)
    assert steps == [("check", False), ("fsync_tree", False), ("write_file", False)] and (target / INFO).exists()
    steps.clear()
    new = tmp_path / "new"
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((restoring, "check"), (restoring.fs, "fsync_tree"), (restoring.fs, "publish")):
            watch(patch, owner, name, new / "artd.db")
        restore(target, new, NOW)
    assert steps[-3:] == [("check", False), ("fsync_tree", False), ("publish", False)] and (new / "artd.db").exists()


def test_a_backup_while_rows_are_written(data: Path, target: Path) -> None:
    """Every group comes with its trajectory in one transaction; the snapshot has both or none."""
    stop, written = threading.Event(), []

    def write() -> None:
        with closing(sqlite3.connect(data / "artd.db", isolation_level=None, timeout=10)) as c:
            while not stop.is_set():
                number = len(written)
                c.execute("BEGIN IMMEDIATE")
                group = c.execute(
                    "INSERT INTO trajectory_group (run_id, name, split, state, size, deadline, created)"
                    " VALUES (2, ?, 'eval', 'open', 1, 0, 0)",
                    (f"more-{number}",),
                ).lastrowid
                added = c.execute(
                    "INSERT INTO trajectory (run_id, group_id, key, content, digest, reward, split, state, tokens, created)"
                    " SELECT run_id, ?, ?, content, digest, reward, 'eval', 'queued', tokens, created FROM trajectory"
                    " WHERE id = 11",
                    (group, f"more-{number}"),
                ).lastrowid
                c.execute("INSERT INTO trajectory_data (trajectory_id, metrics, body) SELECT ?, metrics, body FROM trajectory_data"
                          " WHERE trajectory_id = 11", (added,))  # fmt: skip
                c.execute("COMMIT")
                written.append(number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while len(written) < 20:
            assert thread.is_alive()
        backup(data, target, NOW)
    finally:
        stop.set()
        thread.join()
    assert_whole(target)
    (count,) = rows(target, "SELECT count(*) FROM trajectory WHERE key LIKE 'more-%'")[0]
    assert 20 <= int(str(count)) <= len(written)


# ---- restore ----------------------------------------------------------------------------------------------------------


def test_a_restored_folder_is_whole_and_shares_nothing(taken: Path, tmp_path: Path) -> None:
    data = tmp_path / "deep" / "data"
    before = {name: (s.st_size, s.st_mtime_ns) for name, s in files(taken).items()}
    restore(taken, data, NOW + 1)
    assert_whole(data)
    assert {name: (s.st_size, s.st_mtime_ns) for name, s in files(taken).items()} == before
    assert not {s.st_ino for s in files(data).values()} & {s.st_ino for s in files(taken).values()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in [data, *data.rglob("*")])
    assert rows(data, "PRAGMA journal_mode") and sorted(p.name for p in data.iterdir() if p.is_file()) == [
        "artd.db", "artd.lock"
    ]  # fmt: skip
    lock.acquire(data, "1", 1.0).close()


def test_a_restored_folder_is_an_instance_of_its_own(taken: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = restore(taken, data, NOW)
    old, new = (dict(rows(root, "SELECT key, value FROM meta")) for root in (taken, data))
    assert new["instance"] == made.instance != old["instance"]
    with closing(sqlite3.connect(data / "artd.db")) as c:
        c.row_factory = sqlite3.Row
        assert identify(c, DataDir(data, data), NOW)[0] == made.instance
    (event,) = rows(data, "SELECT kind, ref FROM event ORDER BY id DESC LIMIT 1")
    assert event == ("store.restored", made.instance)


def test_no_number_that_names_something_outside_meets_one_of_the_original(taken: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    leap = restore(taken, data, NOW).leap
    assert leap >= LEAP
    ((fence, epoch, state),) = rows(data, "SELECT fence, epoch, state FROM job WHERE step = 3")
    ((old_fence, old_next),) = rows(
        taken, "SELECT j.fence, r.next_epoch FROM job j JOIN run r ON r.id = j.run_id WHERE j.step = 3"
    )
    assert (fence, epoch, state) == (old_fence + leap, old_next + leap, "queued")
    assert rows(data, "SELECT next_epoch FROM run ORDER BY id") == [(3,), (old_next + leap + 1,)]
    for table in ("job", "push", "event"):
        ((seq,),) = rows(data, f"SELECT seq FROM sqlite_sequence WHERE name = '{table}'")
        ((newest,),) = rows(taken, f"SELECT max(id) FROM {table}")
        assert seq >= newest + leap, table
    ((spawn, old_spawn),) = [
        (a, b) for (a,), (b,) in zip(*(rows(r, "SELECT max(spawn) FROM process") for r in (data, taken)), strict=True)
    ]
    assert old_spawn + 1000 <= spawn < old_spawn + 2000
    pushes = dict(rows(data, "SELECT key, value FROM meta WHERE key = 'push_fence'"))
    assert int(pushes["push_fence"]) == int(dict(rows(taken, "SELECT key, value FROM meta"))["push_fence"]) + leap
    again = restore(taken, tmp_path / "again", NOW)
    assert again.leap != leap and again.instance


def test_what_was_under_way_goes_back_and_nothing_is_served(taken: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    change_meta = "INSERT INTO meta (key, value) VALUES ('gateway_token', 'secret'), ('gateway_url', 'http://x')"
    source = tmp_path / "source"
    shutil.copytree(template(), source)
    change(source, change_meta)
    backup(source, tmp_path / "other", NOW)
    restore(tmp_path / "other", data, NOW)
    assert rows(data, "SELECT state, worker, attempts, error FROM job WHERE step = 3") == [
        ("queued", None, 0, "the backup was taken while it ran")
    ]
    assert rows(data, "SELECT outcome FROM attempt WHERE ended IS NULL") == []
    assert rows(data, "SELECT DISTINCT state FROM serving") == [("gone",)]
    assert rows(data, "SELECT 1 FROM push WHERE state IN ('live', 'sending')") == []
    assert rows(data, "SELECT DISTINCT state, pid, address FROM process") == [("stopped", None, "")]
    assert rows(data, "SELECT value FROM meta WHERE key LIKE 'gateway%'") == []


def test_a_restored_folder_can_be_backed_up_and_restored(taken: Path, tmp_path: Path) -> None:
    restore(taken, tmp_path / "one", NOW)
    backup(tmp_path / "one", tmp_path / "two", NOW)
    restore(tmp_path / "two", tmp_path / "three", NOW)
    assert_whole(tmp_path / "three")


def damaged(taken: Path, at: Path, damage: Callable[[Path], object]) -> Path:
    shutil.copytree(taken, at)
    damage(at)
    return at


def spoil(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def tensors(folder: Path) -> Path:
    (sha,) = rows(folder, "SELECT tensors FROM batch ORDER BY id LIMIT 1")[0]
    return folder / "blobs" / str(sha)[:2] / str(sha)


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "unfinished": ("holds no backup.json", lambda b: (b / INFO).unlink()),
    "info": ("cannot be read", lambda b: (b / INFO).write_text("{}")),
    "database": ("has changed since the backup", lambda b: change(b, "UPDATE run SET step = 1 WHERE id = 2")),
    "no database": ("is missing", lambda b: (b / "artd.db").unlink()),
    "lost blob": ("blob.file", lambda b: next(b.glob("blobs/*/*")).unlink()),
    "spoilt blob": ("blob.file", lambda b: spoil(tensors(b))),
    "lost checkpoint": ("checkpoint.files", lambda b: shutil.rmtree(next(b.glob("checkpoints/r/*")))),
    "spoilt checkpoint": ("checkpoint.files", lambda b: spoil(next(b.glob("checkpoints/r/*/weights.bin")))),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_backup_is_refused_and_nothing_is_left(taken: Path, tmp_path: Path, name: str) -> None:
    text, damage = DAMAGE[name]
    source = damaged(taken, tmp_path / "source", damage)
    data = tmp_path / "data"
    with pytest.raises(BackupError, match=text):
        restore(source, data, NOW)
    assert not data.exists() or list(data.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(taken: Path, data: Path) -> None:
    before = sorted(data.rglob("*"))
    with pytest.raises(NotEmpty, match="not an empty folder"):
        restore(taken, data, NOW)
    assert sorted(data.rglob("*")) == before


def test_no_daemon_starts_while_it_is_filled(taken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    real = restoring.renew

    def renew(*args: object) -> object:
        assert lock.held(data) and not (data / "artd.db").exists()
        return real(*args)

    monkeypatch.setattr(restoring, "renew", renew)
    restore(taken, data, NOW)
    assert not lock.held(data)


@pytest.mark.parametrize("where", ["renew", "check"])
def test_an_interrupted_restore_leaves_nothing(
    taken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    data = tmp_path / "data"
    real = getattr(restoring, where)

    def interrupted(folder: object, *args: object, **more: object) -> object:
        if folder == taken:
            return real(folder, *args, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(restoring, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        restore(taken, data, NOW)
    assert list(data.iterdir()) == []


def test_another_versions_backup_is_refused(taken: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(template(), source)
    change(source, "UPDATE meta SET value = 'other' WHERE key = 'schema_draft'")
    with pytest.raises(SchemaMismatch):
        backup(source, tmp_path / "b", NOW)
    assert list((tmp_path / "b").iterdir()) == []
