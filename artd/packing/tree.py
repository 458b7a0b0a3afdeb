"""The shared-prefix tree of one group: which tokens its sequences can have in common in a packed row.

Owner of: no state. Invariants: nodes are in preorder (the parent precedes the child, a subtree is contiguous); every
sequence ends in a leaf of its own; the token before a sequence's first trainable one, and everything after it, lies in
that leaf, because the logits at that token predict the sequence's own continuation; with expert replay a shared token has
the same routes in all its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .sequences import Sequence

MIN_SHARED = 64
"""Tokens; a common prefix shorter than this is shared only where it is a whole prompt."""


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens [start, end) of the sequences below. parent: index of a node, -1 at a root. leaf: sequence, -1 inside."""

    start: int
    end: int
    parent: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Tree:
    """nodes: preorder. leaves[i]: the node that ends sequence i."""

    nodes: tuple[Node, ...]
    leaves: tuple[int, ...]

    def path(self, sequence: int) -> list[int]:
        """Nodes from the leaf of `sequence` up to its root."""
        path = [self.leaves[sequence]]
        while (parent := self.nodes[path[-1]].parent) >= 0:
            path.append(parent)
        return path


def shareable(sequence: Sequence) -> int:
    """How many tokens of a sequence may be shared: all before the one that precedes the first trainable token."""
    return max(sequence.first_trainable - 1, 0)


def build_tree(sequences: Seq[Sequence], min_shared: int = MIN_SHARED, by_routes: bool = True) -> Tree:
    """The tree of one group's sequences, each of at least one trainable token. by_routes=False: as if routes did not
    matter."""
    limits = [shareable(sequence) for sequence in sequences]
    keys = [_key(sequence, limit, by_routes) for sequence, limit in zip(sequences, limits, strict=True)]
    width = next((len(key) // limit for key, limit in zip(keys, limits, strict=True) if limit), 1)
    order = sorted(range(len(sequences)), key=lambda index: (keys[index], index))
    common = [_common_prefix(keys[a], keys[b], width) for a, b in pairwise(order)]
    nodes: list[Node] = []
    leaves = [-1] * len(sequences)
    stack = [(0, len(order), 0, -1)] if order else []
    while stack:
        low, high, start, parent = stack.pop()
        if high - low == 1:
            index = order[low]
            leaves[index] = len(nodes)
            nodes.append(Node(start, len(sequences[index]), parent, index))
            continue
        end = min(common[low : high - 1])
        # In sorted order the first sequence is the shortest prefix of the others, if one is.
        whole_prompt = end == limits[order[low]] and end > start
        if whole_prompt or end - start >= min_shared:
            nodes.append(Node(start, end, parent, -1))
            parent, start = len(nodes) - 1, end
        cuts = [low, *(i + 1 for i in range(low, high - 1) if common[i] == end), high]
        stack.extend((a, b, start, parent) for a, b in reversed(list(pairwise(cuts))))
    return Tree(tuple(nodes), tuple(leaves))


def _key(sequence: Sequence, limit: int, by_routes: bool) -> bytes:
    """What makes the first `limit` tokens equal to others: for each its id, and with expert replay its routes. Token ids
    are never negative, so as big-endian bytes they sort as they do."""
    tokens = sequence.tokens[:limit].astype(">i4").view(np.uint8).reshape(limit, 4)
    if sequence.routes is None or not by_routes:
        return tokens.tobytes()
    routes = sequence.routes[:limit]
    return np.hstack((tokens, routes.view(np.uint8).reshape(limit, routes[0].nbytes if limit else 0))).tobytes()


def _common_prefix(a: bytes, b: bytes, width: int) -> int:
    """Whole items of `width` bytes that two keys have in common."""
    size = min(len(a), len(b))
    different = np.frombuffer(a, np.uint8, size) != np.frombuffer(b, np.uint8, size)
    first = int(different.argmax()) if size else 0
    return (first if size and different[first] else size) // width
