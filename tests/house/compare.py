"""Compare two data folders that had the same rollouts, byte by byte and row by row, but for what MAY_DIFFER lists.

No daemon runs on the folders; nothing here writes to them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MAY_DIFFER = {
    "manifest.json: instance": "a copied folder is a new instance: its name is drawn",
    "manifest.json: metrics.tokens_per_s": "a clock's reading",
    "manifest.json: parent": "the sha of such a manifest; it must be that of a checkpoint of the same name in its own folder",
    "code/*": "named by a digest of the modules, whose folders may change",
    "logs/*, daemon.json, artd.lock, gateway.json, tmp/*": "words, times, process ids, ports and tokens; their names must be the same",
    "artd.folder": "a token that is drawn where a database is made",
    "artd.db-wal, artd.db-shm": "SQLite's own, there or not as somebody reads",
    "artd.db: times": "columns and keys of CLOCKS",
    "artd.db: checkpoint.sha, checkpoint.bytes": "of such a manifest",
    "artd.db: TABLES left out": "what a daemon's life leaves: processes, pushes, events, pauses, requests, its own settings",
}
CONTENTS = ("blobs", "checkpoints")
"""Folders whose files `differences` compares byte by byte; elsewhere it compares the names."""
FEW = 5
"""Lines about one manifest or table."""
CLOCKS = frozenset(
    {"created", "started", "ended", "deadline", "at", "not_before", "seconds", "mtime_ns", "inode", "spawn"}
)
CLOCK_METRICS = frozenset({"tokens_per_s"})
TABLES: dict[str, frozenset[str]] = {
    "run": frozenset(), "trajectory_group": frozenset(), "group_count": frozenset(), "trajectory": frozenset(),
    "trajectory_data": frozenset(), "batch": frozenset(), "blob": frozenset(), "job": frozenset(), "attempt": frozenset(),
    "checkpoint": frozenset({"sha", "bytes"}), "metric": frozenset(),
}  # fmt: skip
"""Table -> columns that are left out besides CLOCKS."""


def differences(theirs: Path, ours: Path) -> Iterator[str]:
    """Yield one line for each difference. `theirs` is the old tree's folder, `ours` the new tree's."""
    yield from _names(theirs, ours)
    for path in sorted(_files(theirs) & _files(ours)):
        if path.split("/")[0] not in CONTENTS:
            continue
        if path.endswith(f"/{MANIFEST}"):
            yield from _manifests(theirs, ours, path)
        elif (theirs / path).read_bytes() != (ours / path).read_bytes():
            yield f"{path}: its bytes differ"
    yield from _databases(theirs, ours)


def compared(folder: Path) -> int:
    """Return the number of files that `differences` compares byte by byte."""
    return sum(path.split("/")[0] in CONTENTS for path in _files(folder))


# ---- files ----------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> set[str]:
    """Return the relative names of all files; `code` stands for every file in DATA/code."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return {"code" if name.startswith("code/") else name for name in found} - {"artd.db-wal", "artd.db-shm"}


def _names(theirs: Path, ours: Path) -> Iterator[str]:
    old, new = _files(theirs), _files(ours)
    yield from (f"{name}: only the old tree makes it" for name in sorted(old - new))
    yield from (f"{name}: only the new tree makes it" for name in sorted(new - old))


def _manifests(theirs: Path, ours: Path, path: str) -> Iterator[str]:
    """Compare two manifests, without what MAY_DIFFER lists, and the order of their keys."""
    pair = [_manifest(folder, path) for folder in (theirs, ours)]
    yield from _few(path, found := list(_values(path, *pair)))
    if json.dumps(pair[0]) != json.dumps(pair[1]) and not found:
        yield f"{path}: its keys have another order"


def _manifest(folder: Path, path: str) -> dict[str, Any]:
    found = dict(json.loads((folder / path).read_bytes()))
    found["instance"] = bool(re.fullmatch("[0-9a-f]{32}", str(found["instance"])))
    for name in CLOCK_METRICS & found["metrics"].keys():
        found["metrics"][name] = None
    found["parent"] = step_of(folder, found["parent"])
    return found


def step_of(folder: Path, sha: str) -> str:
    """Return the name of the checkpoint whose manifest has this sha, or the sha when there is none."""
    for other in folder.glob(f"checkpoints/*/*/{MANIFEST}"):
        if hashlib.sha256(other.read_bytes()).hexdigest() == sha:
            return other.parent.name
    return sha


def _few(where: str, lines: list[str]) -> Iterator[str]:
    """Yield the first lines, and how many there are."""
    yield from lines[:FEW]
    if len(lines) > FEW:
        yield f"{where}: {len(lines)} values differ"


def _values(where: str, old: Any, new: Any) -> Iterator[str]:
    """Yield one line for each leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _values(f"{where}: {key}", old.get(key, "(absent)"), new.get(key, "(absent)"))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _values(f"{where}[{number}]", a, b)
    elif repr(old) != repr(new):
        yield f"{where}: {str(old)[:80]} -> {str(new)[:80]}"


# ---- the database ---------------------------------------------------------------------------------------------------


def _databases(theirs: Path, ours: Path) -> Iterator[str]:
    old, new = (_database(folder) for folder in (theirs, ours))
    for part in old:
        where = f"artd.db: {part}"
        yield from _few(where, list(_values(where, old[part], new[part])))


def _database(folder: Path) -> dict[str, Any]:
    """Return the `marks` of the file, the `schema` as SQLite has it, and the rows of TABLES by name."""
    with closing(sqlite3.connect(f"file:{folder / 'artd.db'}?mode=ro", uri=True)) as c:
        c.row_factory = sqlite3.Row
        marks = {
            name: c.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id", "page_size")
        }
        schema = c.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
        rows = {table: _rows(c, table, without | CLOCKS) for table, without in TABLES.items()}
        return {"marks": marks, "schema": {f"{kind} {name}": sql for kind, name, sql in schema}} | rows


def _rows(c: sqlite3.Connection, table: str, without: frozenset[str]) -> list[dict[str, Any]]:
    """Return the rows of a table, sorted: SQLite promises no order."""
    found = [
        {name: _plain(name, row[name]) for name in row.keys() if name not in without}  # noqa: SIM118
        for row in c.execute(f"SELECT * FROM {table}")
        if not ("name" in row.keys() and row["name"] in CLOCK_METRICS)  # noqa: SIM118
    ]
    return sorted(found, key=repr)


def _plain(name: str, value: Any) -> Any:
    """Drop the clocks of a column that is JSON; return other values as they are."""
    if not isinstance(value, bytes) or name == "body":
        return value
    try:
        return _timeless(json.loads(value))
    except ValueError:
        return value


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(v) for key, v in value.items() if key not in CLOCKS | CLOCK_METRICS}
    return [_timeless(v) for v in value] if isinstance(value, list) else value
