"""store.fs and store.blobs: a name appears only after its contents are durable, and an error is never passed over."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from artd.store import fs
from artd.store.blobs import Blobs, add_row, hash_file
from artd.store.migrate import migrate
from artd.store.writer import connect


@pytest.fixture
def calls(monkeypatch):
    """What fsync and rename were called on, in order."""
    seen: list[str] = []
    fsync, rename = os.fsync, os.rename

    def logged_fsync(fd):
        seen.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def logged_rename(source, target):
        seen.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    return seen


def test_write_file_syncs_before_the_name_and_the_folder_after(tmp_path, calls):
    fs.write_file(tmp_path / "a", b"data")
    temporary = calls[0].removeprefix("fsync ")
    assert temporary.startswith(f".a.{os.getpid()}-") and temporary.endswith(".tmp")
    assert calls == [f"fsync {temporary}", f"rename {temporary} a", f"fsync {tmp_path.name}"]
    assert (tmp_path / "a").read_bytes() == b"data" and (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    fs.write_file(tmp_path / "a", b"newer")
    assert (tmp_path / "a").read_bytes() == b"newer" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_failed_fsync_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    fs.write_file(tmp_path / "a", b"old")

    def fail(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        fs.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_fsync_tree_takes_files_before_their_folders(tmp_path, calls):
    (tmp_path / "t" / "sub").mkdir(parents=True)
    for name in ("t/one", "t/sub/two"):
        (tmp_path / name).write_text("x")
    fs.fsync_tree(tmp_path / "t")
    assert calls.index("fsync two") < calls.index("fsync sub") < calls.index("fsync t")
    assert calls.index("fsync one") < calls.index("fsync t") and len(calls) == 4


def test_make_dir_is_private_and_durable(tmp_path, calls):
    fs.make_dir(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert calls[-2:] == [f"fsync {tmp_path.name}", "fsync a"]
    calls.clear()
    fs.make_dir(tmp_path / "a" / "b")
    assert calls == []


def test_a_folder_made_by_a_process_that_died_is_made_durable_too(tmp_path, calls):
    (tmp_path / "a").mkdir()
    fs.make_dir(tmp_path / "a")
    fs.make_dir(tmp_path / "a")
    assert calls == [f"fsync {tmp_path.name}"]


@pytest.mark.parametrize(("number", "ends"), [(errno.EIO, True), (errno.EROFS, True), (errno.ENOSPC, False)])
def test_an_error_of_fsync_is_told_before_anybody_else_hears_of_it(tmp_path, monkeypatch, number, ends):
    told = []

    def fail(fd):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(fs, "on_sync_error", told.append)
    with pytest.raises(OSError, match=os.strerror(number)):
        fs.write_file(tmp_path / "a", b"new")
    assert [error.errno for error in told] == [number] * ends


def test_publish_syncs_both_folders_after_the_rename(tmp_path, calls):
    source = tmp_path / "from" / "x"
    source.mkdir(parents=True)
    fs.make_dir(tmp_path / "to")
    calls.clear()
    fs.publish(source, tmp_path / "to" / "y")
    assert calls == ["rename x y", "fsync to", "fsync from"]


def test_remove_tree(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    fs.remove_tree(tmp_path / "a")
    fs.remove_tree(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_blob_is_named_by_its_content(tmp_path, calls):
    blobs = Blobs(tmp_path / "blobs")
    calls.clear()
    sha = blobs.put(b"hello")
    assert sha == hashlib.sha256(b"hello").hexdigest() and blobs.path(sha).read_bytes() == b"hello"
    assert calls[-1] == f"fsync {sha[:2]}" and calls[-2].startswith("rename")


def test_a_file_without_a_row_is_written_again_in_full(tmp_path):
    blobs = Blobs(tmp_path / "blobs")
    sha = blobs.put(b"hello")
    blobs.path(sha).write_bytes(b"")  # what a power loss may leave of a file that no row names
    assert blobs.put(b"hello") == sha
    assert blobs.path(sha).read_bytes() == b"hello"


def test_adopt_hashes_and_syncs_the_file_itself(tmp_path, calls):
    blobs = Blobs(tmp_path / "blobs")
    source = tmp_path / "out"
    source.write_bytes(b"payload")
    calls.clear()
    sha, size = blobs.adopt(source)
    assert (sha, size) == (hashlib.sha256(b"payload").hexdigest(), 7)
    assert not source.exists() and hash_file(blobs.path(sha)) == (sha, size)
    assert calls[0] == "fsync out" and calls.index(f"rename out {sha}") < calls.index(f"fsync {sha[:2]}", 2)


def test_a_blobs_row_is_added_once(tmp_path):
    connection = connect(tmp_path / "artd.db")
    migrate(connection)
    add_row(connection, "s", 3, "batch", 1)
    add_row(connection, "s", 3, "batch", 2)
    assert [tuple(row) for row in connection.execute("SELECT sha, bytes, kind, created FROM blob")] == [
        ("s", 3, "batch", 1)
    ]
    connection.close()


def test_a_disk_too_full_to_unlink_keeps_a_folder_that_nobody_needs(tmp_path, monkeypatch, caplog):
    (tmp_path / "a").mkdir()

    def fail(number):
        def rmtree(path):
            raise OSError(number, os.strerror(number))

        return rmtree

    monkeypatch.setattr(shutil, "rmtree", fail(errno.ENOSPC))
    fs.remove_tree(tmp_path / "a")
    assert "before the disk has room" in caplog.text
    monkeypatch.undo()
    fs.remove_left()
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(shutil, "rmtree", fail(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        fs.remove_tree(tmp_path / "a")


def test_a_folder_that_somebody_else_removes_meanwhile_is_removed(tmp_path, monkeypatch):
    """A worker that was told `Fenced` removes what it staged, and so does the daemon."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    (tmp_path / "a" / "other").touch()
    unlink, other = os.unlink, []

    def raced(*args, **kwargs):
        if not other:
            other.append(unlink(tmp_path / "a" / "file"))
            unlink(tmp_path / "a" / "other")
        unlink(*args, **kwargs)

    monkeypatch.setattr(os, "unlink", raced)
    fs.remove_tree(tmp_path / "a")
    assert not (tmp_path / "a").exists()
