"""What every script of tools/gpu rests on: results are on disk at once, one failure is a line, and what hangs ends by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, time
from tools.gpu import lines

def good(tiny):
    yield {"what": 1}

def bad(tiny):
    yield {"what": 2}
    raise ValueError("no")

def hangs(tiny):
    yield {"what": 3}
    try:
        while True:
            try:
                time.sleep(60)
            except Exception:
                pass
    finally:
        print("cleared", file=sys.stderr)

sys.exit(lines.main("s", {"bad": bad, "good": good, "hangs": hangs, "late": good}))
"""


def run(out: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, object]]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "--out", str(out), *words], capture_output=True, text=True, timeout=30
    )  # fmt: skip
    return done, [json.loads(line) for line in (out / "s.jsonl").read_text().splitlines()]


def test_a_failing_item_is_a_line_and_the_next_one_runs(tmp_path: Path) -> None:
    done, found = run(tmp_path, "--items", "bad,good")
    assert done.returncode == 1
    assert [(line["item"], line.get("what"), line.get("error")) for line in found] == [
        ("bad", 2, None), ("bad", None, "ValueError('no')"), ("good", 1, None)
    ]  # fmt: skip


def test_what_hangs_is_ended_says_where_and_keeps_what_was_known(tmp_path: Path) -> None:
    done, found = run(tmp_path, "--items", "good,hangs,late", "--limit", "1")
    assert done.returncode == 1
    assert [line.get("what") for line in found] == [1, 3, None], "no item begins after the end"
    assert "Late" in str(found[-1]["error"])
    assert "in hangs" in done.stderr and "cleared" in done.stderr
