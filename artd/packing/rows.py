"""Which sequences share a row: best fit by the tokens that a sequence adds to a row, given the prefixes already there.

Owner of: no state. Invariants: a pure function of the trees and the row length; no row holds more than `row_length`
tokens; every sequence is in exactly one row; a row's segments are in preorder, each a contiguous run of one sequence.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from .tree import Tree


@dataclass(frozen=True, slots=True)
class Placed:
    """One sequence of one tree."""

    tree: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of `owner`. parent: segment of the row, own index at a root. leaf: the owner ends here."""

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


def place(trees: Seq[Tree], row_length: int) -> list[list[Placed]]:
    """Rows in the order in which they were opened. Raises ValueError when a sequence alone is longer than a row.

    Groups go by their longest sequence, descending, and so do the sequences of a group. Each goes to the row where it
    adds the fewest tokens, of these to the one with the least room; a new row is opened when it fits nowhere.
    """
    rows: list[_Row] = []
    room: list[tuple[int, int]] = []  # (free, row), sorted
    costs = [[_cost(tree, sequence) for sequence in range(len(tree.leaves))] for tree in trees]
    for number in sorted((n for n, tree in enumerate(trees) if tree.leaves), key=lambda n: (-max(costs[n]), n)):
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
    """(row, added tokens); row == len(rows) asks for a new one."""
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
    """Tokens that these sequences take when they share a row."""
    held = {(item.tree, node) for item in placed for node in trees[item.tree].path(item.sequence)}
    return sum(trees[tree].nodes[node].end - trees[tree].nodes[node].start for tree, node in held)


def row_segments(trees: Seq[Tree], placed: Seq[Placed]) -> list[Segment]:
    """The segments of one row in preorder: a node with one child in this row is joined with that child."""
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
    begins: dict[int, tuple[int, int]] = {}  # node -> (start, parent segment) inherited from a joined parent
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


def shuffled(count: int, seed: int, step: int) -> list[int]:
    """A permutation of range(count), the same on every Python: sorted by the sha256 of seed, step and index."""
    return sorted(range(count), key=lambda index: hashlib.sha256(f"{seed}:{step}:{index}".encode()).digest())
