"""Formats output: JSON documents, tables, colours and times.

JSON gives every time in milliseconds and, beside it, as ISO text in UTC.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from artd_schema.text.plain import CONTROLS, plain
from artd_schema.wire.worker_names import label

from . import terminal

Row = dict[str, Any]
TIMES = ("at", "created", "touched", "started", "ended", "since", "deadline", "not_before")
_COLOURS = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}
GOOD = ("ready", "busy", "active", "live", "succeeded", "committed", "trained", "ok")
BAD = ("broken", "quarantined", "failed", "stopped", "degraded")
BETWEEN = ("backoff", "paused", "starting", "draining", "sending", "running", "abandoned", "discarded")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def iso(ms: int | None) -> str | None:
    """Return a time such as `2026-01-02T03:04:05.678Z`."""
    if ms is None:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000)) + f".{ms % 1000:03d}Z"


def stamp_times(row: Mapping[str, Any]) -> Row:
    """Return the row with a key `X_iso` after each time X."""
    out: Row = {}
    for key, value in row.items():
        out[key] = value
        if key in TIMES:
            out[f"{key}_iso"] = iso(value or None)
    return out


def document(verb: str, data: Path, **content: Any) -> None:
    """Print the one JSON document of a verb of artctl."""
    print_document(f"artctl.{verb}/1", data, content)


def print_document(schema: str, data: Path, content: Mapping[str, Any]) -> None:
    """Print one JSON document: the keys that every document starts with, then `content`."""
    head = stamp_times({"schema": schema, "at": now_ms()}) | {"data_dir": str(data)}
    print(to_json(head | dict(content), 1))


def line(row: Mapping[str, Any]) -> None:
    """Print one object of a stream of JSON lines, and flush it."""
    print(to_json(row), flush=True)


def paint(text: str, colour: str) -> str:
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if terminal.coloured() else text


def state(text: str, width: int = 0) -> str:
    word = text.rstrip()
    colour = "green" if word in GOOD else "red" if word in BAD else "yellow" if word in BETWEEN else "dim"
    return paint(text.ljust(width), colour)


def span(ms: float) -> str:
    """Return a duration in its two largest units: `850ms`, `12s`, `3m04s`, `2h14m`, `5d03h`."""
    if ms < 1000:
        return f"{max(0, int(ms))}ms"
    s = int(ms // 1000)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s // 60 % 60:02d}m"
    return f"{s // 86400}d{s // 3600 % 24:02d}h"


def ago(ms: int | None) -> str:
    return f"{span(now_ms() - ms)} ago" if ms else "-"


def clock(ms: int) -> str:
    """Return the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(ms / 1000))


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


_NUMBER = re.compile(r"(?:[+-]?[0-9.]+(?:e[+-]?[0-9]+)?%?|nan|[+-]?inf)?")
_IN_JSON = {code: f"\\u{code:04x}" for code in CONTROLS if code >= 127}
"""Code point -> escape, for control characters that `json.dumps` leaves as they are."""


def to_json(value: object, indent: int | None = None) -> str:
    """Return JSON for a terminal or a program; control characters of any kind are escaped."""
    return json.dumps(value, indent=indent, ensure_ascii=False).translate(_IN_JSON)


def one_line(text: str, width: int = 100) -> str:
    text = plain(" ".join(text.split()))
    return text if len(text) <= width else text[: width - 1] + "…"


LEAST = 8
"""Columns that a text keeps at least in a table that is cut to the terminal; numbers and states are never cut."""
SHORT_HEAD = 5
"""Columns that a heading keeps."""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns: numbers to the right, a column named `state` in colour. It is cut to the width of the terminal."""
    body = [list(row) for row in rows]
    if not body:
        return
    texts = [["" if cell is None else plain(str(cell)) for cell in row] for row in body]
    inner = [max(len(row[i]) for row in texts) for i in range(len(columns))]
    numeric = [all(_is_number(row[i]) for row in body) for i in range(len(columns))]
    full = [max(len(name), width) for name, width in zip(columns, inner, strict=True)]
    least = [
        max(width, min(len(name), SHORT_HEAD)) if right or name == "state" else min(whole, LEAST)
        for name, whole, width, right in zip(columns, full, inner, numeric, strict=True)
    ]
    widths = terminal.fit(full, least, terminal.width())
    parts = list(zip(columns, widths, numeric, strict=False))
    print(paint("  ".join(_cell(name, width, right) for name, width, right in parts).rstrip(), "dim"))
    for row in texts:
        cells = [_cell(text, width, right) for text, (_, width, right) in zip(row, parts, strict=False)]
        painted = [state(cell) if name == "state" else cell for cell, (name, _, _) in zip(cells, parts, strict=True)]
        print("  ".join(painted).rstrip())
    if len(widths) < len(columns):
        print(paint(f"left out: {', '.join(columns[len(widths) :])}; --wide shows every column", "dim"))


def _cell(text: str, width: int, right: bool) -> str:
    text = text if len(text) <= width else text[: width - 1] + "…"
    return text.rjust(width) if right else text.ljust(width)


def _is_number(cell: object) -> bool:
    if isinstance(cell, str):
        return bool(_NUMBER.fullmatch(cell))
    return cell is None or isinstance(cell, int | float)


def worker_label(worker: Row, run: Row | None) -> str:
    """Return what people call a worker: its kind and number, and its run unless that is `run`."""
    own = label(worker["kind"], worker["replica"])
    return own if _is_of(worker, run) else f"{own} of {worker['run']}"


def worker_log(worker: Row, run: Row | None) -> str:
    """Return the shortest name by which `artctl logs` finds a worker's log; `run` is the one that people look at."""
    return str(worker["kind"] if _is_of(worker, run) and not worker["replica"] else worker["name"])


def _is_of(worker: Row, run: Row | None) -> bool:
    return worker["run"] is None or (run is not None and worker["run"] == run["name"])
