"""`artd check`, `artctl backup`, `artd restore`: what they say, their JSON, their exit codes."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from artd.cli import ctl, main
from artd.cli.artd import check as verb
from artd.datadir import lock
from artd.store import fs
from artd_schema import paths
from tests.fakes.world import copy

DOCUMENT = (Path(__file__).parents[2] / "docs/cli-json.md").read_text()
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def world(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fs, "fsync_file", lambda path: None)  # no test pulls the plug, and disks are slow
    monkeypatch.setattr(fs, "fsync_dir", lambda path: None)
    return copy(data)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], data: Path) -> Call:
    """`call("artd", "check")`: (exit code, stdout, stderr)."""

    def run(command: str, *words: str, data_dir: Path = data) -> tuple[int, str, str]:
        code = {"artd": main, "artctl": ctl}[command].main([*words, "--data-dir", str(data_dir)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def change(data: Path, sql: str) -> None:
    with closing(sqlite3.connect(data / "artd.db", isolation_level=None)) as c:
        assert c.execute(sql).rowcount != 0


def documented(text: str, schema: str) -> dict[str, Any]:
    """The document, whose keys the section of its schema explains."""
    content: dict[str, Any] = json.loads(text)
    assert content["schema"] == schema
    section = DOCUMENT.partition(f"## {schema}")[2].partition("\n## ")[0]
    words = set(re.findall(r"\w+", section)) | {"schema", "at", "at_iso", "data_dir", "created_iso"}
    assert keys(content) <= words, keys(content) - words
    return content


def keys(value: object) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys, value))
    return set(value) | set().union(*map(keys, value.values())) if isinstance(value, dict) else set()


# ---- check ------------------------------------------------------------------------------------------------------------


def test_check_of_a_clean_folder(world: Path, call: Call) -> None:
    code, out, err = call("artd", "check")
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"{world}: \d+ checks, clean \(not deep: .*; quick_check \d.*files \d.* s\)\n", out), out
    code, out, _ = call("artd", "check", "--deep")
    assert code == 0 and "(deep; integrity_check" in out


def test_check_names_what_is_broken(world: Path, call: Call) -> None:
    change(world, "UPDATE run SET step = 1 WHERE id = 2")
    (world / "tmp" / "job-9-f1").mkdir()
    code, out, err = call("artd", "check")
    assert code == 1
    assert (
        "BROKEN  run.step: a run's step is that of its newest checkpoint" in out
        and "\n        run 2: step 1, lineage 0, checkpoint 6, checkpoint step 2" in out
    )
    assert "note    1 staged: " in out and "(tmp/job-9-f1)" in out
    assert err == "next: docs/operations.md, `A check that is not clean`\n"


def test_many_violations_are_shortened(world: Path, call: Call) -> None:
    change(world, "UPDATE trajectory SET epoch_min = 5, epoch_max = 4")
    _, out, _ = call("artd", "check")
    assert "        ... 17 in all" in out and len(out.splitlines()) < 20
    content = json.loads(call("artd", "check", "--json")[1])
    (found,) = [check for check in content["checks"] if check["name"] == "trajectory.epochs"]
    assert found["count"] == len(found["violations"]) == 17


def test_check_as_json(world: Path, call: Call) -> None:
    change(world, "UPDATE run SET step = 1 WHERE id = 2")
    (world / "tmp" / "job-9-f1").mkdir()
    code, out, err = call("artd", "check", "--json", "--deep")
    content = documented(out, "artd.check/1")
    assert (code, err, content["clean"], content["deep"], content["live"]) == (1, "", False, True, False)
    assert {"integrity_check", "foreign_keys", "rows", "files", "contents"} == content["seconds"].keys()
    assert [check["name"] for check in content["checks"] if check["count"]] == ["run.step", "job.order"]


def test_check_beside_a_daemon(world: Path, call: Call) -> None:
    handle = lock.acquire(world, "9", 1.0)
    try:
        code, out, _ = call("artd", "check")
        assert code == 0 and "beside a running daemon" in out
        assert json.loads(call("artd", "check", "--json")[1])["live"] is True
    finally:
        handle.close()


def test_no_daemon_starts_while_a_folder_is_checked(world: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.acquire(world, "9", 1.0).close()
    seen = []
    real = verb.check_folder

    def look(*args: object, **more: object) -> object:
        with pytest.raises(lock.Owned, match="`artd check` is reading"):
            lock.acquire(world, "9", 1.0)
        seen.append(lock.held(world))  # for `artctl status` it is down all the while
        with lock.reading(world) as alone:
            seen.append(alone)  # and another reader may look too
        return real(*args, **more)

    monkeypatch.setattr(verb, "check_folder", look)
    assert call("artd", "check")[0] == 0 and seen == [False, True]
    lock.acquire(world, "9", 1.0).close()


@pytest.mark.parametrize("what", ["no folder", "no database", "another version", "no database at all"])
def test_check_where_there_is_nothing_to_check(world: Path, call: Call, tmp_path: Path, what: str) -> None:
    place = tmp_path / "nowhere" if what == "no folder" else world
    if what == "no database":
        (world / "artd.db").unlink()
    if what == "another version":
        change(world, "UPDATE meta SET value = 'other' WHERE key = 'schema_draft'")
    if what == "no database at all":
        (world / "artd.db").write_bytes(b"words" * 1000)
    code, out, err = call("artd", "check", data_dir=place)
    expected = {"another version": (1, "another unreleased draft"), "no database at all": (1, "file is not a database")}
    number, text = expected.get(what, (3, "no daemon has run on"))
    assert (code, out) == (number, "") and text in err


# ---- backup and restore ---------------------------------------------------------------------------------------------


def test_backup_and_restore(world: Path, call: Call, tmp_path: Path) -> None:
    target, new = tmp_path / "backup", tmp_path / "new"
    code, out, err = call("artctl", "backup", str(target))
    assert (code, out) == (0, f"{target}\n")
    assert re.match(
        r"old@2, r@2: database .* 4 checkpoints, \d+ blobs; \d+ files shared .*, 0 copied \(0 B\); checked\n", err
    )
    assert "--copy" in err
    code, out, err = call("artd", "restore", str(target), data_dir=new)
    assert (code, out) == (0, f"{new}\n")
    assert re.match(
        rf"old@2, r@2, as of .* ago; a new instance: \w{{8}}\nnext: artd start --detach --data-dir {new}\n", err
    )
    assert call("artd", "check", "--deep", data_dir=new)[0] == 0
    assert paths.read_daemon_file(new, paths.LOCK) is None  # no daemon ran there yet


def test_backup_and_restore_as_json(world: Path, call: Call, tmp_path: Path) -> None:
    target, new = tmp_path / "backup", tmp_path / "new"
    code, out, err = call("artctl", "backup", str(target), "--copy", "--json")
    content = documented(out, "artctl.backup/1")
    assert (code, err, content["linked"]) == (0, "", 0) and content["copied"] > 0
    code, out, err = call("artd", "restore", str(target), "--json", data_dir=new)
    restored = documented(out, "artd.restore/1")
    assert (code, err, restored["original"]) == (0, "", content["instance"]) and restored["instance"] != content[
        "instance"
    ]
    assert restored["runs"] == content["runs"] == [
        {"name": "old", "state": "finished", "step": 2}, {"name": "r", "state": "active", "step": 2}
    ]  # fmt: skip


def test_refusals(world: Path, call: Call, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    assert call("artctl", "backup", str(world / "inside"))[0] == 6
    assert call("artctl", "backup", str(target), data_dir=tmp_path / "nowhere")[0] == 3
    assert call("artctl", "backup", str(target))[0] == 0
    code, _, err = call("artctl", "backup", str(target))
    assert code == 6 and "not an empty folder" in err
    assert call("artd", "restore", str(tmp_path / "none"), data_dir=tmp_path / "new")[0] == 5
    code, _, err = call("artd", "restore", str(target))
    assert code == 6 and "not an empty folder" in err
    (target / "backup.json").unlink()
    code, _, err = call("artd", "restore", str(target), data_dir=tmp_path / "new")
    assert code == 1 and "no backup" in err
    shutil.rmtree(world / "checkpoints" / "r")
    code, _, err = call("artctl", "backup", str(tmp_path / "other"))
    assert code == 1 and "artd check" in err
