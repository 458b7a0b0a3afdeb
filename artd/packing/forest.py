"""Builds the prefix trees of a batch from every group's packable sequences.

Pure. There is one tree for each group, in the order of the groups. `drops` lists the sequences that are in no tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from artd_schema.codec import UNREADABLE
from artd_schema.data.manifest import Drop
from artd_schema.data.trajectory import Turn

from .inputs import PackError, PackSpec, Source
from .routes import AssemblyError
from .rows import Placed, row_tokens
from .sequences import Sequence, assemble
from .tree import Tree, build_tree

_TURNS = msgspec.msgpack.Decoder(list[Turn])


class Answer(NamedTuple):
    """What is measured of a turn. `tokens` counts the sampled tokens; `finish_reason` is "" if unknown."""

    tokens: int
    finish_reason: str


@dataclass(slots=True)
class Forest:
    """The trees of a batch.

    `trees` has one for each group. `by_tokens` has the trees that equal tokens alone would give, without regard to
    routes; it is filled only with expert replay. `sequence_of` and `trajectory_of` map a place to its sequence and to
    the index of its trajectory. `answers` has an entry for every turn that was read, packed or not.
    """

    trees: list[Tree] = field(default_factory=list)
    by_tokens: list[Tree] = field(default_factory=list)
    sequence_of: dict[Placed, Sequence] = field(default_factory=dict)
    trajectory_of: dict[Placed, int] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    @property
    def logical_tokens(self) -> int:
        return sum(map(len, self.sequence_of.values()))

    def count_unshared(self, rows: Seq[Seq[Placed]]) -> int:
        """Return how many tokens these rows repeat because equal tokens have different routes."""
        if not self.by_tokens:
            return 0
        lost = sum(row_tokens(self.trees, placed) - row_tokens(self.by_tokens, placed) for placed in rows)
        return max(lost, 0)  # a prefix just below `MIN_SHARED` can make the tree without routes the larger one


def grow(
    spec: PackSpec, sources: Seq[Source], members: Mapping[int, Seq[int]], dropped: Set[int], drops: list[Drop]
) -> Forest:
    """Build the trees of a batch. `members` has the indices of `sources` by group; `dropped` has the ids of
    trajectories to leave out. Sequences that cannot be packed are added to `drops`. Raises PackError."""
    forest = Forest()
    for indices in members.values():
        kept: list[Sequence] = []
        for index in indices:
            if sources[index].id in dropped:
                continue
            for sequence in _sequences(spec, sources[index], drops, forest.answers):
                place = Placed(len(forest.trees), len(kept))
                forest.sequence_of[place], forest.trajectory_of[place] = sequence, index
                kept.append(sequence)
        forest.trees.append(build_tree(kept))
        if spec.routes:
            forest.by_tokens.append(build_tree(kept, by_routes=False))
    return forest


def read_turns(source: Source) -> list[Turn]:
    """Decode a trajectory's body. Raises PackError."""
    try:
        return _TURNS.decode(source.body)
    except UNREADABLE as error:
        message = f"trajectory {source.id}: its body is not a list of turns: {error}"
        raise PackError(message, trajectory=source.id, position="body") from error


def _sequences(spec: PackSpec, source: Source, drops: list[Drop], answers: list[Answer]) -> list[Sequence]:
    """Return the sequences of a trajectory that can be packed. The others go to `drops` as a whole: nothing is
    truncated."""
    turns = read_turns(source)
    try:
        sequences = assemble(turns, spec.routes)
    except AssemblyError as error:
        raise PackError(f"trajectory {source.id}: {error}", trajectory=source.id, position=error.where) from error
    answers += [Answer(len(turn.token_ids) // 4, turn.finish_reason) for turn in turns]
    kept = []
    for number, sequence in enumerate(sequences):
        if len(sequence) > spec.row_length:
            reason = f"sequence {number} has {len(sequence)} tokens, more than row_length {spec.row_length}"
            drops.append(Drop(source.id, reason, "too_long", int(sequence.mask.sum(dtype="int64"))))
        elif sequence.first_trainable == len(sequence):
            drops.append(Drop(source.id, f"sequence {number} has no sampled tokens", "no_tokens"))
        else:
            kept.append(sequence)
    if not sequences:
        drops.append(Drop(source.id, "no turns", "no_turns"))
    return kept
