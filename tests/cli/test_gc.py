"""`artctl gc` without a daemon: what goes, what only would, and who may."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from artd.check.run import check
from artd.cli import show
from artd.retention.clock_jumps import SEEN
from artd.store.blobs import TRASH
from artd.store.writer import connect
from artd_schema.paths import LOCK
from tests.cli.conftest import Call
from tests.fakes.world import template


@pytest.fixture
def folder(data: Path) -> Path:
    """artctl's data folder, whose rows are from 2023, so that everything has had its time; a daemon ran there just now."""
    shutil.copytree(template(), data, dirs_exist_ok=True)
    seen(data, show.now_ms())
    return data


def seen(data: Path, at: int) -> None:
    with closing(connect(data / "artd.db")) as c:
        c.execute("INSERT INTO meta (key, value) VALUES (?, ?)", (SEEN, str(at)))


def rows(out: str) -> dict[tuple[str, str], int]:
    document: dict[str, Any] = json.loads(out)
    assert document["schema"] == "artctl.gc/1"
    return {(row["what"], row["kind"]): row["count"] for row in document["rows"]}


def gc(artctl: Call, *words: str) -> dict[tuple[str, str], int]:
    code, out, err = artctl("gc", "--json", *words)
    assert (code, err) == (0, "")
    return rows(out)


def test_dry_then_done_then_the_trash(folder: Path, artctl: Call) -> None:
    would = gc(artctl, "--dry-run")
    assert {kind for what, kind in would if what == "expired"} == {
        "trajectory", "batch", "rollout", "exchange", "event",
    }  # fmt: skip
    assert gc(artctl, "--dry-run") == would and check(folder, deep=True).clean
    done = gc(artctl)
    assert would.items() <= done.items() and sum(n for (what, _), n in done.items() if what == "trashed") == len(
        list((folder / "blobs" / TRASH).iterdir())
    )
    assert check(folder, deep=True).clean
    assert {what for what, _ in gc(artctl)} == {"freed"} and gc(artctl) == {}
    assert list((folder / "blobs" / TRASH).iterdir()) == [] and check(folder, deep=True).clean


def test_the_settings_of_the_folder_count(folder: Path, tmp_path: Path, artctl: Call) -> None:
    config = tmp_path / "artd.toml"
    config.write_text("[retention]\ntrajectories_days = 0\nbatches_days = 0\nexchanges_days = 1e6\nevents_days = 0\n")
    assert gc(artctl, "--config", str(config)) == {}


def test_people_are_told_in_words(folder: Path, artctl: Call) -> None:
    _, out, _ = artctl("gc", "--dry-run")
    assert "would go: 4 exchange" in out and "would go: 1 rollout" in out
    _, out, err = artctl("gc")
    assert "expired" in out and "the trash is emptied at the next pass" in err


def test_not_where_no_daemon_ever_ran(artctl: Call) -> None:
    assert artctl("gc")[0] == 3


def test_not_beside_a_check(folder: Path, artctl: Call) -> None:
    (folder / LOCK).touch()
    handle = os.open(folder / LOCK, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    code, _, err = artctl("gc")
    os.close(handle)
    assert code == 6 and "is reading" in err
