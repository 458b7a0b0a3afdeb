"""Builds the prefix tree of one group: which tokens its sequences can share in a packed row.

Nodes are in preorder: a parent precedes its children, and a subtree is contiguous. Every sequence ends in a leaf of its
own. That leaf contains the token before the first trainable one and everything after it, because the logits at that
token predict the sequence's own continuation. With expert replay a shared token has the same routes in all its
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .sequences import Sequence

MIN_SHARED = 64
"""In tokens. A shorter common prefix is shared only if it is a whole prompt."""


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens [start, end) of the sequences below. `parent` is the index of a node, -1 for a root. `leaf` is the index
    of the sequence that ends here, -1 for an inner node."""

    start: int
    end: int
    parent: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Tree:
    """A prefix tree. `nodes` are in preorder; `leaves[i]` is the index of the node in which sequence i ends."""

    nodes: tuple[Node, ...]
    leaves: tuple[int, ...]

    def path(self, sequence: int) -> list[int]:
        """Return the nodes from the leaf of `sequence` up to its root."""
        path = [self.leaves[sequence]]
        while (parent := self.nodes[path[-1]].parent) >= 0:
            path.append(parent)
        return path


def shareable(sequence: Sequence) -> int:
    """Return how many tokens of a sequence may be shared: all before the one that precedes the first trainable token."""
    return max(sequence.first_trainable - 1, 0)


def build_tree(sequences: Seq[Sequence], min_shared: int = MIN_SHARED, by_routes: bool = True) -> Tree:
    """Build the tree of one group's sequences, each of at least one trainable token. With `by_routes=False` routes are
    ignored."""
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
    """Return a byte key for the first `limit` tokens: the id of each, and with expert replay its routes. Token ids are
    never negative, so their big-endian bytes sort like the ids."""
    tokens = sequence.tokens[:limit].astype(">i4").view(np.uint8).reshape(limit, 4)
    if sequence.routes is None or not by_routes:
        return tokens.tobytes()
    routes = sequence.routes[:limit]
    return np.hstack((tokens, routes.view(np.uint8).reshape(limit, routes[0].nbytes if limit else 0))).tobytes()


def _common_prefix(a: bytes, b: bytes, width: int) -> int:
    """Return how many whole items of `width` bytes two keys have in common."""
    size = min(len(a), len(b))
    different = np.frombuffer(a, np.uint8, size) != np.frombuffer(b, np.uint8, size)
    first = int(different.argmax()) if size else 0
    return (first if size and different[first] else size) // width
