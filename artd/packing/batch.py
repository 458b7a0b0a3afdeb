"""Makes one batch from its trajectories: assembles sequences, shares prefixes, places and fills rows, and writes the
manifests.

Pure. The manifest lists every trajectory of the request, in that order, packed or not, because the rewards of all of
them determine the group's statistics. `drops` lists what was left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from msgspec import UNSET

from artd_schema.codec import digest, to_json
from artd_schema.data.manifest import BatchManifest, PackedTrajectory, ReplayManifest
from artd_schema.data.trajectory import RouteShape

from .advantages import judge
from .forest import Forest, grow
from .inputs import PackError, PackSpec, Source
from .measures import measure
from .replay import fill_routes
from .rows import Placed, Segment, divide, permutation, place, row_segments
from .tensors import Filler, Tensors, describe
from .tree import Tree

PACKER = "artd-tree/2"
"""The packer's version. Every change that alters the bytes of a batch raises it."""


class Bundle(NamedTuple):
    """A batch's replay bundle."""

    tensors: Tensors
    manifest: ReplayManifest


class Packed(NamedTuple):
    """A batch. `tensors` maps names to arrays of shape [rows, row_length]; `replay` is None without expert replay."""

    tensors: Tensors
    manifest: BatchManifest
    replay: Bundle | None


def pack(spec: PackSpec, sources: Seq[Source]) -> Packed:
    """Pack the trajectories into a batch. Raises PackError if nothing is left to train on, or a trajectory is damaged."""
    _refuse_repeats(sources)
    members: dict[int, list[int]] = {}
    for index, source in enumerate(sources):
        members.setdefault(source.group, []).append(index)
    advantages, groups, drops = judge(spec, sources, members)
    forest = grow(spec, sources, members, {drop.trajectory for drop in drops}, drops)
    parts = _place(spec, forest.trees)
    if not parts:
        raise PackError("nothing to pack: every trajectory was dropped, see drops", drops=tuple(drops))
    placed = [row for part in parts for row in part]
    rows = [row_segments(forest.trees, items) for items in placed]
    rows_of: list[set[int]] = [set() for _ in sources]
    for row, items in enumerate(placed):
        for item in items:
            rows_of[forest.trajectory_of[item]].add(row)
    tensors, physical = _fill(spec, rows, forest, advantages)
    described = describe(tensors)
    token_digest = described["tokens"].sha256
    replay = _bundle(spec, spec.routes, rows, forest, token_digest, physical) if spec.routes else None
    manifest = BatchManifest(
        packer=PACKER,
        run=spec.run,
        step=spec.step,
        seed=spec.seed,
        base_digest=spec.base_digest,
        row_length=spec.row_length,
        rows=len(rows),
        tensors=described,
        token_digest=token_digest,
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
        logical_tokens=forest.logical_tokens,
        physical_tokens=physical,
        trainable_tokens=int(tensors["loss_mask"].sum(dtype="int64")),
        scale_rewards=spec.scale_rewards,
        replay=digest(to_json(replay.manifest)) if replay else "",
        unshared_tokens=forest.count_unshared(placed),
        metrics=measure(sources, [bool(rows) for rows in rows_of], forest, drops),
        advantages=spec.advantages,
        learning=spec.learning,
        minibatches=tuple(number for number, part in enumerate(parts) for _ in part) if len(parts) > 1 else UNSET,
    )
    return Packed(tensors, manifest, replay)


def fill(manifest: BatchManifest) -> float:
    """Return the share of the rows' positions that hold a token, from 0 to 1."""
    return manifest.physical_tokens / (manifest.rows * manifest.row_length)


def _place(spec: PackSpec, trees: Seq[Tree]) -> list[list[list[Placed]]]:
    """Place the sequences of each minibatch into rows of its own, and shuffle these. Each group is in one minibatch."""
    count = (spec.learning.optimizer.minibatches if spec.learning else UNSET) or 1
    found = []
    for groups in divide(trees, count, spec.seed, spec.step):
        opened = place(trees, spec.row_length, groups)
        found.append([opened[number] for number in permutation(len(opened), spec.seed, spec.step)])
    return found


def _refuse_repeats(sources: Seq[Source]) -> None:
    seen: set[int] = set()
    for source in sources:
        if source.id in seen:
            raise PackError(f"trajectory {source.id} is listed twice", trajectory=source.id, position="trajectory_ids")
        seen.add(source.id)


def _fill(spec: PackSpec, rows: Seq[Seq[Segment]], forest: Forest, advantages: Seq[float]) -> tuple[Tensors, int]:
    """Return the batch's tensors and the number of tokens in them."""
    filler = Filler(len(rows), spec.row_length)
    physical = 0
    for row, segments in enumerate(rows):
        physical += filler.fill(row, segments, forest.sequence_of, forest.trajectory_of, advantages)
    return filler.tensors, physical


def _bundle(
    spec: PackSpec, shape: RouteShape, rows: Seq[Seq[Segment]], forest: Forest, token_digest: str, physical: int
) -> Bundle:
    tensors = fill_routes(shape, spec.row_length, rows, forest.sequence_of)
    manifest = ReplayManifest(
        run=spec.run,
        step=spec.step,
        token_digest=token_digest,
        shape=shape,
        rows=len(rows),
        row_length=spec.row_length,
        tensors=describe(tensors),
        tokens=physical,
        covered=int(tensors["covered"].sum(dtype="int64")),
    )
    return Bundle(tensors, manifest)
