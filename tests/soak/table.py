"""`python -m tests.soak.table FILES`: shows what any number of soaks did, and their results. A file holds one JSON object a
line: a `Hit` for each kill and pause, a `Verdict` at the end of each run."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from .cells import KILLS, PAUSES, PHASES, PROCESSES, Action, Cell, cells
from .history import KINDS

TOLD = 12  # cells that are named when they are short


class Hit(Struct, frozen=True, kw_only=True, tag=True):
    """A kill or a pause that happened. workers: fake or real; seconds from a kill until the process was ready again, and until
    the next acknowledged submit (of the daemon)."""

    process: str
    phase: str
    action: Action
    point: str
    workers: str
    ready_s: float | None = None
    acked_s: float | None = None


class Verdict(Struct, frozen=True, kw_only=True, tag=True):
    """The end of one run. found: violations by kind; what: their texts; helped: times that the operator had to retry or resume."""

    seed: int
    workers: str
    seconds: float
    steps: int
    acked: int
    replies: int
    helped: int
    found: dict[str, int]
    what: tuple[str, ...] = ()


Line = Hit | Verdict
_decode = msgspec.json.Decoder(Line).decode


def read(paths: Iterable[Path]) -> list[Line]:
    return [_decode(line) for path in paths if path.exists() for line in path.read_bytes().splitlines()]


def counts(lines: Iterable[Line]) -> Counter[tuple[Cell, Action]]:
    return Counter((Cell(hit.process, hit.phase), hit.action) for hit in lines if isinstance(hit, Hit))


def short(lines: Sequence[Line]) -> list[Cell]:
    """Cells that were hit too rarely."""
    done = counts(lines)
    return [cell for cell in cells() if done[cell, "kill"] < KILLS or done[cell, "pause"] < PAUSES]


def violations(lines: Iterable[Line]) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in lines:
        if isinstance(line, Verdict):
            found.update(line.found)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def document(lines: Sequence[Line]) -> dict[str, object]:
    """Everything as one JSON object."""
    done = counts(lines)
    verdicts = [line for line in lines if isinstance(line, Verdict)]
    return {
        "schema": "artd.soak/1",
        "cells": {
            f"{cell.process}/{cell.phase}": {"kills": done[cell, "kill"], "pauses": done[cell, "pause"]}
            for cell in cells()
        },
        "kills": {workers: _number(lines, "kill", workers) for workers in ("fake", "real")},
        "pauses": {workers: _number(lines, "pause", workers) for workers in ("fake", "real")},
        "violations": {kind: violations(lines)[kind] for kind in KINDS},
        "recovery": _recovery(lines),
        "runs": [msgspec.to_builtins(verdict) for verdict in verdicts],
        "short": [f"{cell.process}/{cell.phase}" for cell in short(lines)],
    }


def _number(lines: Iterable[Line], action: str, workers: str) -> int:
    return sum(isinstance(line, Hit) and (line.action, line.workers) == (action, workers) for line in lines)


def _recovery(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Seconds from kill to ready, by process; of the daemon also to the next acknowledged submit."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if isinstance(line, Hit) and line.action == "kill":
            for what, value in (("ready", line.ready_s), ("acked", line.acked_s)):
                if value is not None:
                    found.setdefault(f"{line.workers} {line.process} {what}", []).append(value)
    return {
        name: {"n": len(values), "median": statistics.median(values), "p95": percentile(values, 0.95)}
        for name, values in sorted(found.items())
    }


def text(lines: Sequence[Line]) -> str:
    """The same for people."""
    told, done = document(lines), counts(lines)
    known = set(cells())
    out = ["kills/pauses    " + "".join(phase.rjust(9) for phase in PHASES)]
    for process in PROCESSES:
        row = (
            f"{done[cell, 'kill']}/{done[cell, 'pause']}" if (cell := Cell(process, phase)) in known else "-"
            for phase in PHASES
        )  # fmt: skip
        out.append(process.ljust(16) + "".join(entry.rjust(9) for entry in row))
    for what in ("kills", "pauses", "violations"):
        out.append(f"{what}: " + ", ".join(f"{name} {number}" for name, number in told[what].items()))  # type: ignore[attr-defined]
    for name, figures in _recovery(lines).items():
        out.append(f"kill -> {name}: median {figures['median']:.2f} s, p95 {figures['p95']:.2f} s ({figures['n']:.0f})")
    for line in lines:
        if isinstance(line, Verdict):
            out.append(
                f"run: seed {line.seed}, {line.workers} workers, {line.seconds:.0f} s, {line.steps} steps, {line.acked} "
                f"acknowledged, {line.replies} replies, operator helped {line.helped} times"
            )
            out.extend(f"  {what}" for what in line.what)
    if left := short(lines):
        named = ", ".join(f"{cell.process}/{cell.phase}" for cell in left[:TOLD])
        out.append(f"short of hits: {len(left)} of {len(known)} cells: {named}{', ...' if left[TOLD:] else ''}")
    return "\n".join(out)


if __name__ == "__main__":
    told = read(Path(name) for name in sys.argv[1:])
    print(text(told))
    sys.exit(1 if violations(told).total() else 0)
