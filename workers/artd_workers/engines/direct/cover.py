"""Whether pieces fill tensors exactly once. Owner of: no state; standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class CoverError(ValueError):
    """Some elements are in no piece, or in two; names the first."""


def check(what: str, names: Sequence[str], sizes: Sequence[int], pieces: Iterable[tuple[int, int, int]]) -> None:
    """pieces: (tensor, first element, count). what: says whose tensors these are. Raises CoverError."""
    found: list[list[tuple[int, int]]] = [[] for _ in names]
    for tensor, at, count in pieces:
        found[tensor].append((at, at + count))
    for name, size, runs in zip(names, sizes, found, strict=True):
        end = 0
        for at, stop in sorted(runs):
            if at > end:
                break
            if at < end:
                raise CoverError(f"{what} {name}: elements {at} to {min(end, stop) - 1} are in two pieces")
            end = stop
        if end != size:
            following = min((at for at, _ in runs if at > end), default=size)
            if end > size:
                raise CoverError(f"{what} {name}: pieces reach to element {end - 1}, but it has {size}")
            raise CoverError(f"{what} {name}: elements {end} to {following - 1} are in no piece")
