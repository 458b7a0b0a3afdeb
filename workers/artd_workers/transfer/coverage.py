"""Check that pieces fill tensors exactly once. Standard library only.

Pieces that are rows are compared by lines and columns, never row by row: the tensor is seen as a table whose lines
are as long as the rows' pitch, and each strip of lines in which nothing changes is checked once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Piece = tuple[int, int, int] | tuple[int, int, int, int, int]
"""(tensor, first element, count), or (tensor, first element, count, width, pitch) for rows of `width` elements that
start `pitch` elements apart; width and pitch 0 mean that there are no rows.
"""


class CoverError(ValueError):
    """Some elements are in no piece or in two. The text names the first."""


class _Run(NamedTuple):
    """Elements at .. stop - 1, or the rows in that range."""

    at: int
    stop: int
    width: int = 0
    pitch: int = 0


class _Box(NamedTuple):
    """Lines top .. bottom - 1, columns left .. right - 1."""

    top: int
    bottom: int
    left: int
    right: int


def check(what: str, names: Sequence[str], sizes: Sequence[int], pieces: Iterable[Piece]) -> None:
    """Check that the pieces fill every tensor exactly once. `sizes` has the number of elements of each tensor; `what`
    says whose tensors they are. Raises CoverError."""
    found: list[list[_Run]] = [[] for _ in names]
    for piece in pieces:
        if not 0 <= piece[0] < len(names):
            raise CoverError(f"a piece names tensor {piece[0]}, and {what} tensors are only {len(names)}")
        run = _run(*piece[1:])
        if run.stop <= run.at:
            raise CoverError(f"{what} {names[piece[0]]}: piece {piece[1:]} is empty or has no whole rows")
        found[piece[0]].append(run)
    for name, size, runs in zip(names, sizes, found, strict=True):
        fault = _rows(runs, size) if any(run.width for run in runs) else _check_tiling([run[:2] for run in runs], size)
        if fault:
            raise CoverError(f"{what} {name}: {fault}")


def _run(at: int, count: int, width: int = 0, pitch: int = 0) -> _Run:
    """Return a piece's run. A malformed piece becomes an empty run, which `check` rejects."""
    if not width:
        return _Run(at, at + count)
    if count % width or not 0 < width <= pitch:
        return _Run(at, at)
    return _Run(at, at + (count // width - 1) * pitch + width, width, pitch)


def _check_tiling(intervals: Iterable[tuple[int, int]], size: int, at: int = 0) -> str:
    """Return what is wrong with intervals that should tile 0 .. size - 1, or "". `at` is added to the element numbers
    in that text.
    """
    end, runs = 0, sorted(intervals)
    for first, stop in runs:
        if first > end:
            break
        if first < end:
            return f"elements {at + first} to {at + min(end, stop) - 1} are in two pieces"
        end = stop
    if end > size:
        return f"pieces reach to element {at + end - 1}, but it has {size}"
    if end < size:
        following = min((first for first, _ in runs if first > end), default=size)
        return f"elements {at + end} to {at + following - 1} are in no piece"
    return ""


def _rows(runs: Sequence[_Run], size: int) -> str:
    """Return what is wrong with the pieces of one tensor if some pieces consist of rows with gaps between them; "" if
    nothing is."""
    low, high = min(run.at for run in runs), max(run.stop for run in runs)
    if low < 0 or high > size:
        return f"pieces reach to element {low if low < 0 else high - 1}, but it has {size}"
    pitch = Counter(run.pitch for run in runs if run.width).most_common(1)[0][0]
    lines = -(-size // pitch)
    boxes = [box for run in runs for box in _boxes(run, pitch)]
    boxes += _plain(size, lines * pitch, pitch)  # pad the last line to the length of the others
    boxes.sort()
    bounds, active, next_box = sorted({0, lines, *(b.top for b in boxes), *(b.bottom for b in boxes)}), list[_Box](), 0
    for top, bottom in zip(bounds, bounds[1:], strict=False):
        active = [box for box in active if box.bottom > top]
        while next_box < len(boxes) and boxes[next_box].top == top:
            active.append(boxes[next_box])
            next_box += 1
        if not active:
            return f"elements {top * pitch} to {bottom * pitch - 1} are in no piece"
        if fault := _check_tiling(((box.left, box.right) for box in active), pitch, top * pitch):
            return fault
    return ""


def _boxes(run: _Run, pitch: int) -> Iterator[_Box]:
    """Yield the boxes of a run in lines of `pitch` elements."""
    if not run.width:
        yield from _plain(run.at, run.stop, pitch)
    elif run.pitch != pitch:
        for at in range(run.at, run.stop, run.pitch):
            yield from _plain(at, at + run.width, pitch)
    else:
        (top, left), rows = divmod(run.at, pitch), -(-(run.stop - run.at) // pitch)
        right = left + run.width
        yield _Box(top, top + rows, left, min(right, pitch))
        if right > pitch:
            yield _Box(top + 1, top + 1 + rows, 0, right - pitch)


def _plain(at: int, stop: int, pitch: int) -> Iterator[_Box]:
    """Yield the boxes of elements at .. stop - 1 in lines of `pitch`: the end of a line, whole lines, the start of
    one.
    """
    (top, left), (bottom, right) = divmod(at, pitch), divmod(stop, pitch)
    if top == bottom:
        if left < right:
            yield _Box(top, top + 1, left, right)
        return
    if left:
        yield _Box(top, top + 1, left, pitch)
        top += 1
    if top < bottom:
        yield _Box(top, bottom, 0, pitch)
    if right:
        yield _Box(bottom, bottom + 1, 0, right)
