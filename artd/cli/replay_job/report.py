"""Prints the result of `artd replay-job`: one JSON document, or a table of what was compared and the verdict.

The verdict follows from the rows alone. A table that leaves out rows that differ says how many.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from artd.cli import show
from artd_schema.wire.replay_job import ReplayReport, ReplayRow

SHOWN_PARTS = ("metrics", "batch", "replay", "canary", "state.json", "files")
"""Parts of which every row is shown. Of other parts (tensors, settings), rows that differ are shown, up to SHOWN."""
FIRST = ("loss", "grad_norm")
SHOWN = 20
VERDICTS = {
    "equal": "is bit for bit the committed one",
    "close": "is the committed one within tolerance",
    "different": "is NOT the committed one",
}


def verdict(report: ReplayReport) -> Literal["equal", "close", "different"]:
    """Return `equal` (bit for bit), `close` (another environment, and within tolerance) or `different`."""
    if all(good(row, tolerant=False) for row in report.rows):
        return "equal"
    return "close" if report.environment and all(good(row, tolerant=True) for row in report.rows) else "different"


def good(row: ReplayRow, tolerant: bool) -> bool:
    """Return whether a row agrees with the replay; a measured time always does."""
    return row.equal is None or row.equal or (tolerant and row.close)


def document(data: Path, row: show.Row, report: ReplayReport, keep: Path | None) -> None:
    job = {key: row[key] for key in ("id", "run", "kind", "step", "epoch", "fence")}
    content = {"job": job, "verdict": verdict(report), "kept": str(keep) if keep else None}
    content |= {key: value for key, value in msgspec.to_builtins(report).items() if key != "error"}
    show.print_document("artd.replay-job/1", data, content)


def tell(row: show.Row, report: ReplayReport, keep: Path | None) -> None:
    rows, hidden = _select_rows(report)
    inside = Counter(r.part for r in report.rows)
    tolerant = bool(report.environment)
    cells = [(_name(r, inside), _cell(r.committed), _cell(r.replayed), _equal(r, tolerant)) for r in rows]
    show.table(("name", "committed", "replayed", "equal"), cells)
    if hidden:
        print(f"... and {hidden} more that differ (--json has all)")
    if tolerant:
        others = "; ".join(f"{e.name} {e.committed or '-'} -> {e.replayed or '-'}" for e in report.environment)
        print(f"compared with tolerance, because the environment differs: {others}")
    took = f"{report.seconds:.1f} s with {report.threads} thread{'s' if report.threads != 1 else ''}"
    print(f"job {row['id']} replayed in {took}: the result {VERDICTS[verdict(report)]}")
    if keep:
        print(keep)


def _select_rows(report: ReplayReport) -> tuple[list[ReplayRow], int]:
    """Return the rows worth a line, metrics first, and how many rows that differ were left out."""
    always = [row for row in report.rows if row.part in SHOWN_PARTS]
    others = [row for row in report.rows if row.part not in SHOWN_PARTS and not good(row, bool(report.environment))]
    always.sort(key=lambda row: (row.part != "metrics", row.name not in FIRST))
    return always + others[:SHOWN], max(0, len(others) - SHOWN)


def _name(row: ReplayRow, inside: Counter[str]) -> str:
    if row.part == "files" and row.name.endswith(".safetensors") and inside[row.name]:
        return f"{row.name} ({inside[row.name]} tensors)"
    return row.name if row.part in ("metrics", "files") else f"{row.part}: {row.name}"


def _cell(value: str | int | float | None) -> str:
    """Format a value; a sha256 by its first digits."""
    if value is None:
        return "-"
    return (value[:12] if len(value) == 64 else value) if isinstance(value, str) else repr(value)


def _equal(row: ReplayRow, tolerant: bool) -> str:
    if row.equal is None:
        return "(time)"
    word = "yes" if row.equal else "close" if good(row, tolerant) else "NO"
    return word if row.equal or row.difference is None else f"{word} ({row.difference:.1e})"
