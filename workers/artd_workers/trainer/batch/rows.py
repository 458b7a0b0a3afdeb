"""Reads packed rows, verified against their manifest, with the tree's mask and the scored tokens.

It turns `[rows, S]` tensors, and the replay bundle if there is one, into `PackedRow`s. Query q sees key k if k's segment is q's
own or an ancestor of it, and k is not later. A trained token at index i is predicted at i - 1, in the same segment. Anything
that the packer does not promise is a BatchError, which is permanent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from artd_schema.codec import UNREADABLE
from artd_schema.data.manifest import BatchManifest
from artd_schema.data.trajectory import RouteShape
from artd_workers.trainer.placement import ahead
from artd_workers.trainer.tree_mask import hidden

from .replay_bundle import BatchError, Bundle, ReplayFiles, read_bundle

DTYPES = {
    "tokens": torch.int32,
    "segment_ids": torch.int32,
    "parent_ids": torch.int32,
    "position_ids": torch.int32,
    "loss_mask": torch.uint8,
    "old_logprobs": torch.float32,
    "advantages": torch.float32,
    "weights": torch.float32,
    "temperatures": torch.float32,
    "policy_epochs": torch.int32,
    "trajectory_index": torch.int32,
}


@dataclass(frozen=True)
class PackedRow:
    """One row without its padding.

    Per token [s]: `tokens` and `positions` int64; `until` int64, the end of the tokens that may see it (see `tree_mask`). Per
    trained token [n], in row order: `at` = index of its predictor, `targets`, `old_logprobs`, `advantages`, `weights`,
    `temperatures`, `epochs` (-1 = unknown), `trajectories` (index in the manifest), `segments` (id in the row), `sequences` and
    `groups` (numbers in the batch, from 0). `routes`: expert ids [MoE layers, s, topk] to replay (uint8 or int32), None when no
    experts are replayed.
    """

    tokens: Tensor
    positions: Tensor
    until: Tensor
    at: Tensor
    targets: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    temperatures: Tensor
    epochs: Tensor
    trajectories: Tensor
    segments: Tensor
    sequences: Tensor
    groups: Tensor
    routes: Tensor | None = None

    @property
    def hidden_from(self) -> Tensor:
        """The dense mask: bool [s, s] (query, key), True where the query must not see the key."""
        return hidden(self.until)

    def to(self, device: torch.device) -> PackedRow:
        """Copy the row to a device, without waiting.

        `until` and the routes stay on the CPU, where the model and its replay read them first.
        """
        if device.type == "cpu":
            return self
        stay = ("until", "routes")
        return replace(
            self, **{f.name: ahead(getattr(self, f.name), device) for f in fields(self) if f.name not in stay}
        )


@dataclass(frozen=True)
class Batch:
    """Rows with at least one trained token, in order.

    `counts`: trained tokens of each trajectory [trajectories]. `coverage`: share of the packed tokens whose routes are known,
    None when no experts are replayed. `parts`: the minibatch of each row, rising; () = all are one.
    """

    manifest: BatchManifest
    sha: str
    rows: tuple[PackedRow, ...]
    counts: Tensor
    coverage: float | None = None
    parts: tuple[int, ...] = ()

    @property
    def trained(self) -> int:
        return int(self.counts.sum())

    @property
    def sequences(self) -> int:
        """The number of trained sequences."""
        return 1 + max(int(row.sequences.max()) for row in self.rows)

    def minibatches(self) -> list[Batch]:
        """Return the minibatches as batches of their own: what a loss is divided by belongs to the minibatch. Sequences are numbered from
        0 in each."""
        if not self.parts:
            return [self]
        found = []
        for part in dict.fromkeys(self.parts):
            rows = [row for row, own in zip(self.rows, self.parts, strict=True) if own == part]
            first = min(int(row.sequences.min()) for row in rows)
            counts = torch.bincount(torch.cat([row.trajectories for row in rows]), minlength=len(self.counts))
            renumbered = tuple(replace(row, sequences=row.sequences - first) for row in rows)
            found.append(replace(self, rows=renumbered, counts=counts, parts=()))
        return found


def read_batch(
    tensors: Path,
    manifest: Path,
    sha: str,
    vocab_size: int,
    shape: RouteShape | None = None,
    replay: ReplayFiles | None = None,
) -> Batch:
    """Read and verify a batch. Raises BatchError, and OSError when a file cannot be read.

    `sha`: sha256 of the manifest file. `shape`: of the routes to replay, None = replay no experts. `replay`: the files of the
    batch's bundle.
    """
    raw = manifest.read_bytes()
    if hashlib.sha256(raw).hexdigest() != sha:
        raise BatchError(f"{manifest} does not have the sha256 {sha[:16]} that the job names: the batch is damaged")
    try:
        described = msgspec.json.decode(raw, type=BatchManifest)
        columns = load_file(tensors)
    except (*UNREADABLE, SafetensorError, json.JSONDecodeError) as error:
        raise BatchError(f"batch {sha[:16]} cannot be read: {error}") from None
    _verify(columns, described)
    return make_batch(columns, described, sha, vocab_size, read_bundle(replay, shape, described))


def _verify(columns: dict[str, Tensor], manifest: BatchManifest) -> None:
    for name, dtype in DTYPES.items():
        info, tensor = manifest.tensors.get(name), columns.get(name)
        if info is None or tensor is None:
            raise BatchError(f"the batch has no tensor {name}")
        if tensor.dtype != dtype or tuple(tensor.shape) != (manifest.rows, manifest.row_length):
            raise BatchError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {(manifest.rows, manifest.row_length)}"
            )
        if hashlib.sha256(tensor.contiguous().numpy().data).hexdigest() != info.sha256:
            raise BatchError(f"{name} does not have the sha256 of the manifest: the batch file is damaged")


def make_batch(
    columns: dict[str, Tensor], manifest: BatchManifest, sha: str, vocab_size: int, bundle: Bundle | None = None
) -> Batch:
    """Check the packer's rules and cut the rows. Raises BatchError."""
    groups = _groups(manifest)
    counts = torch.zeros(len(groups), dtype=torch.int64)
    rows: list[PackedRow] = []
    parts = manifest.minibatches or ()
    if parts and (len(parts) != manifest.rows or list(parts) != sorted(parts)):
        raise BatchError(
            f"the manifest puts {len(parts)} rows into minibatches {parts}, and the batch has {manifest.rows}"
        )
    kept: list[int] = []
    sequences = 0
    for index in range(columns["tokens"].shape[0]):
        row = {name: tensor[index] for name, tensor in columns.items()}
        try:
            packed = _row(row, vocab_size, groups, sequences, partial(bundle.row, index) if bundle else None)
        except BatchError as error:
            raise BatchError(f"row {index}: {error}") from None
        if len(packed.at):
            rows.append(packed)
            kept.extend(parts[index : index + 1])
            sequences = int(packed.sequences[-1]) + 1
            counts += torch.bincount(packed.trajectories, minlength=len(counts))
    if not rows:
        raise BatchError("no token of the batch is trained")
    coverage = bundle.coverage(int((columns["segment_ids"] >= 0).sum())) if bundle else None
    return Batch(manifest, sha, tuple(rows), counts, coverage, tuple(kept))


def _groups(manifest: BatchManifest) -> Tensor:
    """Return the group of each trajectory [trajectories]; groups are numbered from 0 in the manifest's order."""
    numbers: dict[int, int] = {}
    found = [numbers.setdefault(member.group, len(numbers)) for member in manifest.trajectories]
    return torch.tensor(found, dtype=torch.int64)


def _row(
    row: dict[str, Tensor], vocab_size: int, groups: Tensor, sequences: int, routes: Callable[..., Tensor] | None
) -> PackedRow:
    """Cut a row. `groups`: the group of each trajectory; `sequences`: how many sequences the rows before this one train;
    `routes`: see `Bundle.row`."""
    size = int((row["segment_ids"] >= 0).sum())
    if (row["segment_ids"][:size] < 0).any():
        raise BatchError("padding lies between tokens, not in one tail")
    if row["loss_mask"][size:].any():
        raise BatchError("a padded position is marked as trained")
    row = {name: tensor[:size] for name, tensor in row.items()}
    tokens, segments, positions = (row[name].long() for name in ("tokens", "segment_ids", "position_ids"))
    if size and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        raise BatchError(f"a token id lies outside the vocabulary of {vocab_size}")
    spans = list(_spans(segments.tolist()))
    until = subtree_ends(spans, _ancestors(row, spans))
    trained = row["loss_mask"].bool().nonzero()[:, 0]
    at = trained - 1
    if len(trained) and (int(at.min()) < 0 or (segments[at] != segments[trained]).any()):
        raise BatchError("a trained token begins its segment, so nothing in the row predicts it")
    scored = {name: row[name][trained] for name in ("old_logprobs", "advantages", "weights", "temperatures")}
    owners = row["trajectory_index"][trained].long()
    _check_scored(scored, owners, len(groups))
    # The packer puts the trained tokens of a sequence into one segment of its own.
    number = torch.unique_consecutive(segments[trained], return_inverse=True)[1]
    return PackedRow(
        tokens, positions, until, at, tokens[trained], scored["old_logprobs"], scored["advantages"],
        scored["weights"], scored["temperatures"], row["policy_epochs"][trained].long(), owners,
        segments[trained], sequences + number, groups[owners], routes(row, spans) if routes else None,
    )  # fmt: skip


def _check_scored(scored: dict[str, Tensor], owners: Tensor, trajectories: int) -> None:
    for name, values in scored.items():
        if not torch.isfinite(values).all():
            raise BatchError(f"{name} of a trained token is not finite")
    if (scored["old_logprobs"] > 0).any():
        raise BatchError("a logprob of a trained token is positive")
    if (scored["temperatures"] <= 0).any():
        raise BatchError(
            "a trained token was sampled at temperature 0: greedy tokens have no policy gradient, leave them out"
        )
    if ((owners < 0) | (owners >= trajectories)).any():
        raise BatchError("a trained token belongs to no trajectory of the manifest")


def _spans(segments: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (segment, start, end) of each run of one segment's tokens. Raises BatchError when a segment has two runs."""
    seen: set[int] = set()
    start = 0
    for i in range(1, len(segments) + 1):
        if i == len(segments) or segments[i] != segments[start]:
            if segments[start] in seen:
                raise BatchError(f"segment {segments[start]} is not one run of tokens")
            seen.add(segments[start])
            yield segments[start], start, i
            start = i


def _ancestors(row: dict[str, Tensor], spans: list[tuple[int, int, int]]) -> dict[int, set[int]]:
    """Return each segment's ancestors and itself. Raises BatchError for a tree or positions that break the rules."""
    parents, positions = row["parent_ids"].tolist(), row["position_ids"].tolist()
    known: dict[int, set[int]] = {}
    ends: dict[int, int] = {}
    for segment, start, end in spans:
        parent = parents[start]
        if any(value != parent for value in parents[start:end]):
            raise BatchError(f"segment {segment} has more than one parent")
        if parent != segment and parent not in known:
            raise BatchError(f"the parent {parent} of segment {segment} does not come before it")
        first = 0 if parent == segment else ends[parent]
        if positions[start:end] != list(range(first, first + end - start)):
            raise BatchError(f"the positions of segment {segment} do not go on from {first}")
        known[segment] = {segment} | (set() if parent == segment else known[parent])
        ends[segment] = first + end - start
    return known


def subtree_ends(spans: list[tuple[int, int, int]], ancestors: dict[int, set[int]]) -> Tensor:
    """Return `until` int64 [s] of a row's (segment, start, end) runs. Raises BatchError when they are not in preorder."""
    ends: dict[int, int] = {}
    for segment, start, end in spans:
        for above in ancestors[segment] - {segment}:
            if ends[above] != start:
                raise BatchError(
                    f"segment {segment} does not follow what else is below segment {above}: not in preorder"
                )
            ends[above] = end
        ends[segment] = end
    lengths = torch.tensor([end - start for _, start, end in spans], dtype=torch.int64)
    return torch.tensor([ends[segment] for segment, _, _ in spans], dtype=torch.int64).repeat_interleave(lengths)
