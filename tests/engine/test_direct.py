"""What both sides of a direct push share and what needs no torch: the page and the cover check. The rest: tests/trainer."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from artd_workers.transfer.coverage import CoverError, check
from artd_workers.transfer.ring import Page


def test_both_sides_see_one_page(tmp_path: Path) -> None:
    ours = Page.make(tmp_path / "page")
    assert stat.S_IMODE((tmp_path / "page").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Page.make(tmp_path / "page")
    theirs = Page.open(tmp_path / "page")
    assert (theirs.fence, theirs.ready, theirs.done, theirs.failed) == (-1, 0, 0, False)
    ours.begin(7)
    ours.ready = 3
    theirs.done += 2
    assert (theirs.fence, theirs.ready, ours.done, theirs.failed) == (7, 3, 2, False)
    ours.fail()
    assert theirs.failed
    ours.begin(8)
    assert (theirs.fence, theirs.ready, theirs.done, theirs.failed) == (8, 0, 0, False)
    ours.close()
    theirs.close()


def test_a_page_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Page.open(tmp_path / "page")


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([(0, 0, 4), (0, 4, 6), (1, 0, 3)], ""),
        ([(1, 0, 3), (0, 6, 4), (0, 0, 6)], ""),
        ([(0, 0, 10)], "our b: elements 0 to 2 are in no piece"),
        ([(0, 0, 4), (0, 5, 5), (1, 0, 3)], "our a: elements 4 to 4 are in no piece"),
        ([(0, 0, 4), (0, 3, 7), (1, 0, 3)], "our a: elements 3 to 3 are in two pieces"),
        ([(0, 0, 10), (1, 0, 3), (1, 0, 3)], "our b: elements 0 to 2 are in two pieces"),
        ([(0, 0, 9), (1, 0, 3)], "our a: elements 9 to 9 are in no piece"),
        ([(0, 0, 11), (1, 0, 3)], "our a: pieces reach to element 10, but it has 10"),
        ([(0, 1, 9), (1, 0, 3)], "our a: elements 0 to 0 are in no piece"),
    ],
)
def test_pieces_cover_each_element_once(pieces: list[tuple[int, int, int]], says: str) -> None:
    if not says:
        check("our", "ab", [10, 3], pieces)
        return
    with pytest.raises(CoverError, match=says):
        check("our", "ab", [10, 3], pieces)
