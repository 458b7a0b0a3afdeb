"""Every finding of the reviews has an answer: a test that exists, the issue that owns it, or a reason."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = re.compile(r"^- ([a-z]+\.[A-Z0-9.]+): ", re.M)
ANSWERED = re.compile(r"^\| ([a-z]+\.[A-Z0-9.]+) \| ([^|]+?) \| ([^|]*?) ?\|$", re.M)
ISSUES = ("agents", "fleet", "house", "learning", "models", "seeing")
UNANSWERED = 10
"""At the most: findings that are left as they are, each with its reason."""


def answers() -> list[tuple[str, str, str]]:
    """(id, answer, words)."""
    return ANSWERED.findall((ROOT / "tests/attack/FINDINGS.md").read_text())


def test_every_finding_has_an_answer() -> None:
    listed = LISTED.findall((ROOT / "tests/attack/LISTS.md").read_text())
    assert len(listed) == len(set(listed)) > 100
    assert set(listed) == {name for name, _, _ in answers()}


def test_every_answer_is_a_test_an_issue_or_a_reason() -> None:
    reasons = 0
    for name, answer, words in answers():
        if answer.startswith("issue:"):
            assert answer.removeprefix("issue:") in ISSUES, name
        elif answer == "no":
            reasons += 1
            assert words, f"{name}: no reason"
        else:
            file, _, function = answer.partition("::")
            text = (ROOT / file).read_text()
            assert re.search(rf"^ *(async )?def {re.escape(function)}\(", text, re.M), (
                f"{name}: {answer} does not exist"
            )
    assert reasons <= UNANSWERED


def test_no_line_is_overlooked() -> None:
    rows = [line for line in (ROOT / "tests/attack/FINDINGS.md").read_text().splitlines() if line.startswith("|")]
    assert len(rows) == len(answers()) + 2, "a line that this test cannot read"
