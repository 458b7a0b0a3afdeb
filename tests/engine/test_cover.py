"""Pieces that are rows: exactly those that tile a tensor pass, and the first fault is named, against counting every element."""

from __future__ import annotations

import random
import re

import pytest

from artd_workers.transfer.coverage import CoverError, Piece, check


def tiling(draw: random.Random, size: int, pitch: int) -> list[Piece]:
    """Bands of whole lines, some of them together, some in columns, which are cut at lines of their own; then a plain rest."""
    pieces: list[Piece] = []
    top, lines, shift = 0, size // pitch, draw.randrange(pitch)
    lines -= 1 if shift and lines else 0
    if shift:
        pieces.append((0, 0, min(shift, size)))
    while top < lines and shift < size:
        rows, at = draw.randint(1, lines - top), shift + top * pitch
        cuts = sorted({0, pitch, *(draw.randrange(pitch) for _ in range(draw.randrange(3)))})
        if len(cuts) == 2:
            pieces.append((0, at, rows * pitch))
        for left, right in zip(cuts, cuts[1:], strict=False) if len(cuts) > 2 else ():
            middle = draw.randint(0, rows)
            for first, last in ((0, middle), (middle, rows)):
                if first < last:
                    pieces.append((0, at + first * pitch + left, (last - first) * (right - left), right - left, pitch))
        top += rows
    if (end := shift + top * pitch) < size:
        pieces.append((0, end, size - end))
    draw.shuffle(pieces)
    return pieces


def counted(pieces: list[Piece], size: int) -> list[int]:
    """In how many pieces each element is; behind the last, whether any piece reaches out."""
    out = [0] * (size + 1)
    for _, at, count, *rows in pieces:
        width, pitch = rows or (count, 0)
        for i in range(count):
            element = at + i // width * pitch + i % width
            out[element if 0 <= element < size else size] += 1
    return out


def spoilt(draw: random.Random, pieces: list[Piece], size: int) -> list[Piece]:
    """One piece is left out, given twice, moved by one, or narrower by one."""
    out = list(pieces)
    number = draw.randrange(len(out))
    _, at, count, *rows = out.pop(number)
    what = draw.randrange(4)
    if what == 1:
        out += [pieces[number]] * 2
    elif what == 2:
        out.append((0, at + draw.choice((-1, 1)), count, *rows))
    elif what == 3 and (rows or [count])[0] > 1:
        width, pitch = rows or (count, 0)
        out.append((0, at, count // width * (width - 1), width - 1, pitch) if rows else (0, at, count - 1))
    return out


@pytest.mark.parametrize("seeds", [range(400), range(400, 800)])
def test_exactly_what_tiles_passes_and_the_first_fault_is_named(seeds: range) -> None:
    for seed in seeds:
        one_tiling(seed)


def one_tiling(seed: int) -> None:
    draw = random.Random(seed)
    pitch = draw.randint(1, 9)
    size = pitch * draw.randint(1, 12) + draw.randrange(3)
    right = tiling(draw, size, pitch)
    assert counted(right, size) == [1] * size + [0]
    check("our", ["a"], [size], right)
    wrong = spoilt(draw, right, size)
    counts = counted(wrong, size)
    with pytest.raises(CoverError, match="our a: ") as told:
        check("our", ["a"], [size], wrong)
    if found := re.search(r"elements (-?\d+) to (-?\d+) are in (no|two)", str(told.value)):
        first, last = int(found[1]), int(found[2])
        if first >= 0:
            assert all(count == 1 for count in counts[:first])
            assert all((count == 0) == (found[3] == "no") and count != 1 for count in counts[first : last + 1])
            return
    assert counts[size]


def test_other_pitches_in_one_tensor() -> None:
    """The second part's lines are shorter, and the tensor ends in the middle of one."""
    columns: list[Piece] = [(0, 0, 12, 4, 6), (0, 4, 6, 2, 6), (0, 18, 6, 2, 5), (0, 20, 9, 3, 5)]
    check("our", ["a"], [33], columns)
    with pytest.raises(CoverError, match="our a: elements 20 to 22 are in no piece"):
        check("our", ["a"], [33], columns[:3])
    with pytest.raises(CoverError, match="our a: elements 4 to 5 are in two pieces"):
        check("our", ["a"], [33], [*columns, (0, 4, 2)])
    with pytest.raises(CoverError, match="our a: pieces reach to element 32, but it has 32"):
        check("our", ["a"], [32], columns)


@pytest.mark.parametrize("piece", [(1, 0, 8), (-1, 0, 8), (0, 0, 0), (0, 8, -4), (0, 0, 7, 2, 4), (0, 0, 8, 4, 2)])
def test_what_is_no_piece_is_refused(piece: Piece) -> None:
    with pytest.raises(CoverError):
        check("our", ["a"], [8], [piece, (0, 0, 8)])


def test_rows_are_whole() -> None:
    right: list[Piece] = [(0, 0, 6, 2, 4), (0, 2, 6, 2, 4)]
    check("our", ["a"], [12], right)
    with pytest.raises(CoverError, match="no whole rows"):
        check("our", ["a"], [12], [(0, 0, 7, 2, 4), right[1]])


def test_a_layer_of_experts_is_no_matter_of_its_rows() -> None:
    """128 experts of 2,048 rows, from two processes whose buffers are cut at other rows: half a million rows."""
    rows, width, experts = 2048, 384, 128
    pieces: list[Piece] = []
    for expert in range(experts):
        for rank in (0, 1):
            cut = 100 + 37 * rank + expert
            for first, last in ((0, cut), (cut, rows)):
                at = (expert * rows + first) * 2 * width + rank * width
                pieces.append((0, at, (last - first) * width, width, 2 * width))
    check("our", ["w2"], [experts * rows * 2 * width], pieces)
    with pytest.raises(CoverError, match="elements 384 to 767 are in no piece"):
        check("our", ["w2"], [experts * rows * 2 * width], pieces[:2] + pieces[3:])
