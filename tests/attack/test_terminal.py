"""What users and models wrote is text on a terminal: nothing of it moves the cursor or breaks a table."""

from __future__ import annotations

import re

import pytest

from artd.cli import show

NASTY = "g\n\x1b[2J\x1b]0;title\x07\x00\r\x7f\x9b31m\u202eevil\u2028end"


def test_a_table_has_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    show.table(("id", "group"), [(1, NASTY), (2, "plain")])
    out = capsys.readouterr().out
    assert len(out.splitlines()) == out.count("\n") == 3
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", out) is None
    assert r"g\x0a\x1b[2J\x1b]0;title\x07\x00\x0d\x7f\x9b31m\u202eevil\u2028end" in out


def test_a_line_of_the_status_is_one_line() -> None:
    assert "\x1b" not in show.one_line(NASTY, 500) and "\n" not in show.one_line(NASTY, 500)


def test_other_letters_stay() -> None:
    text = "Zürich 東京 🙂 e\u0301"
    assert show.plain(text) == text
