"""`tests.house.compare` sees what two data folders differ in, and nothing else."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.house.compare import TABLES, differences

STEP = "checkpoints/r/l0-s000001-j2-f1"
FIRST = "checkpoints/r/l0-s000000-j1-f1"


def manifest(folder: Path, step: str, **changes: Any) -> str:
    """Write one; its sha."""
    content = {
        "step": 1, "instance": "0" * 32, "parent": "", "metrics": {"loss": 0.5, "tokens_per_s": 3.0}, "files": [{"bytes": 4}],
    }  # fmt: skip
    raw = json.dumps(content | changes).encode()
    (folder / step).mkdir(parents=True, exist_ok=True)
    (folder / step / "manifest.json").write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def made(folder: Path, instance: str, speed: float) -> Path:
    first = manifest(folder, FIRST, instance=instance, metrics={"tokens_per_s": speed})
    manifest(folder, STEP, instance=instance, parent=first, metrics={"loss": 0.5, "tokens_per_s": speed})
    (folder / STEP / "weights.json").write_text("{}")
    for name in ("blobs/ab/abcd", f"code/{instance[:12]}/artd/x.py", "logs/daemon.log", "artd.folder"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(instance if name.startswith(("code", "logs", "artd")) else "bytes")
    with closing(sqlite3.connect(folder / "artd.db", isolation_level=None)) as c:
        for table in TABLES:
            c.execute(f"CREATE TABLE {table} (id INTEGER, created INTEGER, sha TEXT, metrics BLOB)")
            c.execute(
                f"INSERT INTO {table} VALUES (1, {int(speed)}, 'same', ?)",
                (b'{"tokens_per_s": %d, "loss": 1}' % speed,),
            )
        c.execute("UPDATE checkpoint SET sha = ?", (instance,))
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders that differ in all that may differ."""
    return made(tmp_path / "old", "a" * 32, 3.0), made(tmp_path / "new", "b" * 32, 4.0)


def test_what_may_differ_is_no_difference(pair: tuple[Path, Path]) -> None:
    assert list(differences(*pair)) == []


@pytest.mark.parametrize("name", ["blobs/ab/abcd", f"{STEP}/weights.json"])
def test_other_bytes(pair: tuple[Path, Path], name: str) -> None:
    (pair[1] / name).write_text("other")
    assert list(differences(*pair)) == [f"{name}: its bytes differ"]


@pytest.mark.parametrize("name", ["blobs/ab/abcd", f"{STEP}/weights.json", "logs/daemon.log", "artd.folder"])
def test_another_name(pair: tuple[Path, Path], name: str) -> None:
    (pair[1] / name).rename(pair[1] / f"{name}-2")
    assert list(differences(*pair)) == [f"{name}: only the old tree makes it", f"{name}-2: only the new tree makes it"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metrics": {"loss": 0.25, "tokens_per_s": 4.0}}, ": metrics: loss: 0.5 -> 0.25"),
        ({"metrics": {"loss": 0.5}}, ": metrics: tokens_per_s: None -> (absent)"),
        ({"files": [{"bytes": 5}]}, ": files[0]: bytes: 4 -> 5"),
        ({"instance": "nobody"}, ": instance: True -> False"),
        ({"parent": "0" * 64}, ": parent: l0-s000000-j1-f1 -> " + "0" * 64),
        ({"more": 1}, ": more: (absent) -> 1"),
    ],
)
def test_another_manifest(pair: tuple[Path, Path], changes: dict[str, Any], says: str) -> None:
    parent = json.loads((pair[1] / STEP / "manifest.json").read_text())["parent"]
    same = {"instance": "b" * 32, "parent": parent, "metrics": {"loss": 0.5, "tokens_per_s": 4.0}}
    manifest(pair[1], STEP, **same | changes)
    assert list(differences(*pair)) == [f"{STEP}/manifest.json{says}"]


def test_another_order_of_keys(pair: tuple[Path, Path]) -> None:
    path = pair[1] / STEP / "manifest.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert list(differences(*pair)) == [f"{STEP}/manifest.json: its keys have another order"]


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("UPDATE job SET id = 2", "artd.db: job[0]: id: 1 -> 2"),
        ("DELETE FROM metric", "artd.db: metric"),
        ("UPDATE job SET metrics = '{\"loss\": 2}'", "artd.db: job[0]: metrics"),
        ("PRAGMA user_version = 9", "artd.db: marks: user_version: 0 -> 9"),
        ("CREATE INDEX i ON job (id)", "artd.db: schema: index i: (absent)"),
    ],
)
def test_another_database(pair: tuple[Path, Path], sql: str, says: str) -> None:
    with closing(sqlite3.connect(pair[1] / "artd.db", isolation_level=None)) as c:
        c.execute(sql)
    [line] = differences(*pair)
    assert line.startswith(says)
