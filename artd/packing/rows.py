"""Chooses which sequences share a row: best fit by the tokens that a sequence adds to a row, given the prefixes already
there.

A pure function of the trees and the row length. No row holds more than `row_length` tokens. Every sequence is in
exactly one row. A row's segments are in preorder, and each is a contiguous part of one sequence.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from .tree import Tree


@dataclass(frozen=True, slots=True)
class Placed:
    """A sequence of a tree, by its indices."""

    tree: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of `owner` in a row. `parent` is the index of the parent segment in the row; a root has its
    own index. `leaf` says that the owner ends here."""

    start: int
    end: int
    parent: int
    owner: Placed
    leaf: bool


@dataclass(slots=True)
class _Row:
    free: int
    placed: list[Placed] = field(default_factory=list)
    nodes: set[tuple[int, int]] = field(default_factory=set)


def place(trees: Seq[Tree], row_length: int, groups: Collection[int] | None = None) -> list[list[Placed]]:
    """Return the sequences of each row, rows in the order in which they were opened. `groups` are the indices of the trees to place, None of
    all. Raises ValueError if one sequence is longer than a row.

    Groups are placed in descending order of their longest sequence, and so are the sequences of a group. Each sequence
    goes to the row where it adds the fewest tokens; among equal ones, to the row with the least room. If it fits
    nowhere, it opens a new row.
    """
    rows: list[_Row] = []
    room: list[tuple[int, int]] = []  # (free, row), sorted
    costs = [[_cost(tree, sequence) for sequence in range(len(tree.leaves))] for tree in trees]
    chosen = (n for n, tree in enumerate(trees) if tree.leaves and (groups is None or n in groups))
    for number in sorted(chosen, key=lambda n: (-max(costs[n]), n)):
        tree = trees[number]
        holders: set[int] = set()  # rows that hold some of this group
        for sequence in sorted(range(len(tree.leaves)), key=lambda s: (-costs[number][s], s)):
            if costs[number][sequence] > row_length:
                raise ValueError(f"tree {number}, sequence {sequence}: longer than a row of {row_length} tokens")
            path = tree.path(sequence)
            index, added = _best(rows, room, holders, number, tree, path, costs[number][sequence])
            if index == len(rows):
                rows.append(_Row(row_length))
            else:
                room.pop(bisect_left(room, (rows[index].free, index)))
            row = rows[index]
            row.free -= added
            row.placed.append(Placed(number, sequence))
            row.nodes.update((number, node) for node in path)
            insort(room, (row.free, index))
            holders.add(index)
    return [row.placed for row in rows]


def _cost(tree: Tree, sequence: int) -> int:
    return tree.nodes[tree.leaves[sequence]].end


def _best(
    rows: list[_Row],
    room: list[tuple[int, int]],
    holders: set[int],
    number: int,
    tree: Tree,
    path: list[int],
    cost: int,
) -> tuple[int, int]:
    """Return the best row and the tokens that the sequence adds to it. `len(rows)` as the row asks for a new one."""
    best = (cost + 1, 0, len(rows))
    for index in holders:
        row = rows[index]
        added = sum(tree.nodes[n].end - tree.nodes[n].start for n in path if (number, n) not in row.nodes)
        if added <= row.free:
            best = min(best, (added, row.free, index))
    tightest = bisect_left(room, (cost, -1))
    if tightest < len(room):
        best = min(best, (cost, *room[tightest]))
    added, _, index = best
    return (index, cost) if index == len(rows) else (index, added)


def row_tokens(trees: Seq[Tree], placed: Seq[Placed]) -> int:
    """Return the number of tokens that these sequences take when they share a row."""
    held = {(item.tree, node) for item in placed for node in trees[item.tree].path(item.sequence)}
    return sum(trees[tree].nodes[node].end - trees[tree].nodes[node].start for tree, node in held)


def row_segments(trees: Seq[Tree], placed: Seq[Placed]) -> list[Segment]:
    """Return the segments of one row in preorder. A node with one child in this row is merged with that child."""
    segments: list[Segment] = []
    by_tree: dict[int, list[Placed]] = {}
    for item in placed:
        by_tree.setdefault(item.tree, []).append(item)
    for number in sorted(by_tree):
        _tree_segments(trees[number], sorted(by_tree[number], key=lambda item: item.sequence), segments)
    return segments


def _tree_segments(tree: Tree, items: list[Placed], segments: list[Segment]) -> None:
    owner: dict[int, Placed] = {}
    children: dict[int, set[int]] = {}
    for item in items:
        below = -1
        for node in tree.path(item.sequence):
            owner.setdefault(node, item)
            if below >= 0:
                children.setdefault(node, set()).add(below)
            below = node
    joined: dict[int, int] = {}  # node -> segment that holds its tokens
    begins: dict[int, tuple[int, int]] = {}  # node -> (start, parent segment) that it inherits from a merged parent
    for node in sorted(owner):
        info = tree.nodes[node]
        start, parent = begins[node] if node in begins else (info.start, joined.get(info.parent, -1))
        below_it = children.get(node, set())
        if len(below_it) == 1:
            begins[next(iter(below_it))] = (start, parent)
            continue
        own = len(segments)
        segments.append(Segment(start, info.end, parent if parent >= 0 else own, owner[node], info.leaf >= 0))
        joined[node] = own


def permutation(count: int, seed: int, step: int) -> list[int]:
    """Return a permutation of range(count), sorted by the sha256 of seed, step and index, so that it is the same on
    every Python."""
    return sorted(range(count), key=lambda index: hashlib.sha256(f"{seed}:{step}:{index}".encode()).digest())


def divide(trees: Seq[Tree], count: int, seed: int, step: int) -> list[set[int]]:
    """Divide the groups that have sequences into `count` minibatches of as many groups each, or one more; into fewer if there are not so
    many groups. Which group goes where is drawn from the seed and the step."""
    held = [number for number, tree in enumerate(trees) if tree.leaves]
    drawn = [held[index] for index in permutation(len(held), seed, step)]
    parts = min(count, len(held))
    return [set(drawn[part::parts]) for part in range(parts)]
