"""The planted bugs of `make test-teeth` can still be planted, and their tests can still be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.teeth.bugs.all_bugs import BUGS
from tests.teeth.bugs.bug import Bug

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_its_place_stands_once_and_its_test_is_there(bug: Bug) -> None:
    assert (ROOT / bug.file).read_text().count(bug.good) == 1
    file, _, name = bug.test.partition("::")
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
    assert bug.says, "for which reason is it red?"


def test_no_name_is_used_twice() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)
