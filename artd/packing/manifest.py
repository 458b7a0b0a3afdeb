"""One batch from its trajectories: assemble, share, place, fill, and say in the manifest what was done.

Owner of: no state. Invariants: pure; the manifest lists every trajectory that was asked for, in that order, packed or
not, because the rewards of all of them make the group's statistics; what was left out stands in `drops` with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from artd_schema.manifest import BatchManifest, Drop, GroupAdvantage, PackedTrajectory
from artd_schema.trajectory import Turn

from .advantages import group_statistics
from .assemble import AssemblyError, Sequence, assemble
from .plan import Placed, place, row_segments, shuffled
from .tensors import Filler, Tensors, describe
from .tree import Tree, build_tree

PACKER = "artd-tree/1"
"""Version of the packer: raised by every change that alters the bytes of a batch."""

_TURNS = msgspec.msgpack.Decoder(list[Turn])


class PackError(Exception):
    """No batch can be made. trajectory: row id (0 = none is to blame); position: path in its body, such as turns[2]."""

    def __init__(self, message: str, *, trajectory: int = 0, position: str = "", drops: tuple[Drop, ...] = ()) -> None:
        super().__init__(message)
        self.trajectory = trajectory
        self.position = position
        self.drops = drops


class PackSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What determines a batch beside its trajectories; row_length in tokens."""

    run: str
    step: int
    seed: int
    row_length: int
    scale_rewards: bool
    base_digest: str


@dataclass(frozen=True, slots=True)
class Source:
    """One trajectory of the store. body: msgpack list[Turn]; digest: sha256 hex of the body, already verified."""

    id: int
    group: int
    reward: float
    digest: str
    body: bytes


def pack(spec: PackSpec, sources: Seq[Source]) -> tuple[Tensors, BatchManifest]:
    """Tensors of shape [rows, row_length] and their manifest. Raises PackError when nothing is left to train on."""
    _refuse_repeats(sources)
    members: dict[int, list[int]] = {}
    for index, source in enumerate(sources):
        members.setdefault(source.group, []).append(index)
    advantages, groups, drops = _advantages(spec, sources, members)
    dropped = {drop.trajectory for drop in drops}
    trees: list[Tree] = []
    sequence_of: dict[Placed, Sequence] = {}
    trajectory_of: dict[Placed, int] = {}
    for indices in members.values():
        kept: list[Sequence] = []
        for index in indices:
            if sources[index].id in dropped:
                continue
            for sequence in _sequences(spec, sources[index], drops):
                key = Placed(len(trees), len(kept))
                sequence_of[key], trajectory_of[key] = sequence, index
                kept.append(sequence)
        trees.append(build_tree(kept))
    placed = place(trees, spec.row_length)
    if not placed:
        raise PackError("nothing to pack: every trajectory was dropped, see drops", drops=tuple(drops))
    filler = Filler(len(placed), spec.row_length)
    order = shuffled(len(placed), spec.seed, spec.step)
    physical = 0
    rows_of: list[set[int]] = [set() for _ in sources]
    for row, opened in enumerate(order):
        segments = row_segments(trees, placed[opened])
        physical += filler.fill(row, segments, sequence_of, trajectory_of, advantages)
        for item in placed[opened]:
            rows_of[trajectory_of[item]].add(row)
    tensors = filler.tensors
    described = describe(tensors)
    return tensors, BatchManifest(
        packer=PACKER,
        run=spec.run,
        step=spec.step,
        seed=spec.seed,
        base_digest=spec.base_digest,
        row_length=spec.row_length,
        rows=len(placed),
        tensors=described,
        token_digest=described["tokens"].sha256,
        trajectories=tuple(
            PackedTrajectory(
                id=source.id,
                digest=source.digest,
                group=source.group,
                reward=source.reward,
                advantage=advantages[index],
                rows=tuple(sorted(rows_of[index])),
            )
            for index, source in enumerate(sources)
        ),
        groups=tuple(groups),
        drops=tuple(drops),
        logical_tokens=sum(map(len, sequence_of.values())),
        physical_tokens=physical,
        trainable_tokens=int(tensors["loss_mask"].sum(dtype="int64")),
        scale_rewards=spec.scale_rewards,
    )


def fill(manifest: BatchManifest) -> float:
    """Share of the rows' positions that hold a token."""
    return manifest.physical_tokens / (manifest.rows * manifest.row_length)


def _refuse_repeats(sources: Seq[Source]) -> None:
    seen: set[int] = set()
    for source in sources:
        if source.id in seen:
            raise PackError(f"trajectory {source.id} is listed twice", trajectory=source.id, position="trajectory_ids")
        seen.add(source.id)


def _advantages(
    spec: PackSpec, sources: Seq[Source], members: dict[int, list[int]]
) -> tuple[list[float], list[GroupAdvantage], list[Drop]]:
    advantages = [0.0] * len(sources)
    groups: list[GroupAdvantage] = []
    drops: list[Drop] = []
    for group, indices in members.items():
        try:
            found = group_statistics([sources[index].reward for index in indices], spec.scale_rewards)
        except ValueError as error:
            raise PackError(f"group {group}: {error}", trajectory=sources[indices[0]].id, position="reward") from error
        groups.append(GroupAdvantage(group=group, size=len(indices), mean=found.mean, std=found.std))
        for index, advantage in zip(indices, found.advantages, strict=True):
            advantages[index] = advantage
            if found.outcome != "trainable":
                drops.append(Drop(sources[index].id, f"group {group}: {found.outcome}"))
    return advantages, groups, drops


def _sequences(spec: PackSpec, source: Source, drops: list[Drop]) -> list[Sequence]:
    """The sequences of a trajectory that can be packed; the others go to `drops`, whole: nothing is truncated."""
    try:
        sequences = assemble(_TURNS.decode(source.body))
    except AssemblyError as error:
        raise PackError(f"trajectory {source.id}: {error}", trajectory=source.id, position=error.where) from error
    except msgspec.DecodeError as error:
        message = f"trajectory {source.id}: its body is not a list of turns: {error}"
        raise PackError(message, trajectory=source.id, position="body") from error
    kept = []
    for number, sequence in enumerate(sequences):
        if len(sequence) > spec.row_length:
            reason = f"sequence {number} has {len(sequence)} tokens, more than row_length {spec.row_length}"
        elif sequence.first_trainable == len(sequence):
            reason = f"sequence {number} has no sampled tokens"
        else:
            kept.append(sequence)
            continue
        drops.append(Drop(source.id, reason))
    if not sequences:
        drops.append(Drop(source.id, "no turns"))
    return kept
