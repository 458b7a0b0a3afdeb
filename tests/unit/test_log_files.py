"""Logs that are cut while they are written."""

from __future__ import annotations

import os
from pathlib import Path

from artd.cli.artctl.logs import Source
from artd.datadir.log_files import LogFiles
from artd.supervise.postmortem import read_tail

LIMIT = 100


def append(path: Path) -> int:
    """As a worker's output is opened."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def test_a_large_log_begins_anew_under_its_writer(tmp_path: Path) -> None:
    path, logs = tmp_path / "trainer.log", LogFiles(tmp_path, LIMIT)
    writer = append(path)
    reader = Source("trainer", path)
    for number in range(3):
        os.write(writer, f"{number}\n".encode() * LIMIT)
        started = os.fstat(writer).st_size
        reader.tail(0)
        logs.look()
        assert path.stat().st_size == 0, "no bytes that nobody wrote"
        assert (tmp_path / "trainer.log.1").read_text() == f"{number}\n" * LIMIT, "the last one alone is kept"
        os.write(writer, b"after\n")
        assert path.read_text() == "after\n" == read_tail(path, started) + "\n"
        assert reader.news() == ["after"]
        logs.look()
        assert path.read_text() == "after\n", "it is small"
        os.truncate(path, 0)
    os.close(writer)
    assert (tmp_path / "trainer.log.1").stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["trainer.log", "trainer.log.1"]


def test_one_that_cannot_be_cut_keeps_no_other_from_it(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("x" * 2 * LIMIT)
    (tmp_path / "engine.log.1").mkdir()
    (tmp_path / "gateway.log").write_text("y" * 2 * LIMIT)
    LogFiles(tmp_path, LIMIT).look()
    assert (tmp_path / "engine.log").stat().st_size == 2 * LIMIT, "what could not be kept is not thrown away"
    assert (tmp_path / "gateway.log").stat().st_size == 0
    assert not list(tmp_path.glob(".*"))
