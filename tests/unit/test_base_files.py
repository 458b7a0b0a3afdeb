"""base_files: what a worker loads is hashed against what the run was made with, whatever its size and its time say."""

from __future__ import annotations

import os

import pytest

from artd.errors import Conflict
from artd.models.base_model import PinnedBase
from artd_schema.codec import digest
from artd_schema.data.base import BaseFile, BaseModel
from artd_workers.base_files import BaseChanged, BaseFiles


@pytest.fixture(name="base")
def a_base(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    files = []
    for name, data in (("a.safetensors", b"weights"), ("config.json", b"{}")):
        (folder / name).write_bytes(data)
        stat = (folder / name).stat()
        files.append(BaseFile(name, stat.st_size, digest(data), stat.st_mtime_ns, stat.st_ino))
    return folder, BaseModel("d" * 64, 10, tuple(files))


def forge(path, data):
    """Other bytes under the same size, time and inode."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_pinned_files_pass_also_when_they_were_copied(base):
    folder, pinned = base
    os.utime(folder / "a.safetensors", ns=(1, 1))
    files = BaseFiles(str(folder), pinned)
    files.verify()
    files.check_unchanged()
    BaseFiles(str(folder), None).verify()


def test_other_bytes_are_refused_though_size_and_time_are_the_same(base):
    folder, pinned = base
    forge(folder / "a.safetensors", b"WEIGHTS")
    PinnedBase(str(folder), pinned).check()  # the daemon's quick look cannot see it
    with pytest.raises(
        BaseChanged, match=r"a.safetensors has sha256 .*, the run was made with .*: put the old one back"
    ):
        BaseFiles(str(folder), pinned).verify()


def test_a_file_that_changes_after_it_was_hashed_is_refused_when_it_is_loaded(base):
    folder, pinned = base
    files = BaseFiles(str(folder), pinned)
    files.verify()
    (folder / "a.safetensors").write_bytes(b"WEIGHTS")
    with pytest.raises(BaseChanged, match="changed while it was used"):
        files.check_unchanged()
    (folder / "a.safetensors").unlink()
    with pytest.raises(BaseChanged, match="cannot be read: No such file"):
        BaseFiles(str(folder), pinned)


def test_a_look_is_quick_and_a_check_remembers_what_it_hashed(base, monkeypatch):
    folder, pinned = base
    known = PinnedBase(str(folder), pinned)
    known.look()
    os.utime(folder / "a.safetensors", ns=(1, 1))
    with pytest.raises(Conflict, match="a.safetensors changed"):
        known.look()
    known.check()
    known.look()
    monkeypatch.setattr("artd.models.base_model._entry", lambda path: pytest.fail(f"{path} is hashed again"))
    known.check()
