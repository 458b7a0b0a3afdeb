"""A script of `tools/gpu` as a benchmark: run in a process of its own, its JSON lines read back, its failures told at the end.

Owner of: no state. Invariant: what it wrote before it failed counts, and a failure is an exit status of 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.report import Report

Line = dict[str, Any]


def lines(name: str, words: Sequence[object], out: Path, env: Mapping[str, str]) -> list[Line]:
    """What `python -m tools.gpu.NAME WORDS --out DIR` says of each item, as far as it came; a last line has `failed`."""
    out.mkdir(parents=True, exist_ok=True)
    own = [sys.executable, "-m", f"tools.gpu.{name}", *map(str, [*words, "--out", out])]
    status = subprocess.run(own, env=env, check=False, stdout=subprocess.DEVNULL).returncode
    said = out / f"{name}.jsonl"
    found = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
    return found + ([{"item": f"tools.gpu.{name}", "failed": f"exit status {status}"}] if status else [])


def finish(report: Report, found: Sequence[Line], as_json: bool, failure: str = "failed") -> int:
    """Print the report, and what failed to stderr; the exit status. failure: what a script's line calls it."""
    met = report.finish(as_json)
    failed = [f"{line['item']}: {line[key]}" for line in found for key in {failure, "failed"} if key in line]
    print(*failed, sep="\n", file=sys.stderr)
    return int(met != 0 or bool(failed))
