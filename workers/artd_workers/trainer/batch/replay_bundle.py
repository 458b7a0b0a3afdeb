"""Reads the replay bundle of a batch, verified against its manifest, its batch and its model.

The bundle gives expert ids per packed row. It must belong to this batch (digest of its tokens) and this model (`RouteShape`).
Every token has routes but a sequence's last one, which the engine never reads. Anything else is a BatchError, which is
permanent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from artd_schema.codec import UNREADABLE
from artd_schema.data.manifest import BatchManifest, ReplayManifest
from artd_schema.data.routes import FEW, NOTHING, id_outside, ids_equal
from artd_schema.data.trajectory import RouteShape


class BatchError(ValueError):
    """The batch is not what its manifest or the packer's rules say. Training it again would fail again."""


@dataclass(frozen=True)
class ReplayFiles:
    """The files of a replay bundle: its tensors (safetensors) and its manifest (JSON)."""

    tensors: Path
    manifest: Path


@dataclass(frozen=True)
class Bundle:
    """A verified bundle.

    `routes`: uint8 or int32 [layers, rows, S, topk]. `covered`: bool [rows, S], True where the engine reported routes. `batch`:
    the batch that it belongs to.
    """

    manifest: ReplayManifest
    batch: BatchManifest
    routes: Tensor
    covered: Tensor

    def row(self, index: int, row: dict[str, Tensor], spans: list[tuple[int, int, int]]) -> Tensor:
        """Return the routes [layers, s, topk] of one packed row. Raises BatchError, which names trajectory and position.

        `row`: its columns [s], without padding. `spans`: (segment, start, end) of its segments.
        """
        parents = {int(row["parent_ids"][start]) for segment, start, _ in spans if row["parent_ids"][start] != segment}
        lasts = {end - 1 for segment, _, end in spans if segment not in parents}
        routes, covered, size = self.routes[:, index], self.covered[index], len(row["tokens"])
        where = _namer(row, self.batch)
        _check_covered(covered, size, lasts, where)
        _check_ids(routes, covered, self.manifest.shape, where)
        return routes[:, :size].contiguous()

    def coverage(self, tokens: int) -> float:
        """Return the share of the batch's packed tokens whose routes are known. Raises BatchError when the counts differ."""
        if tokens != self.manifest.tokens:
            raise BatchError(f"the replay bundle is of {self.manifest.tokens} tokens, and the batch has {tokens}")
        return self.manifest.covered / tokens


def read_bundle(files: ReplayFiles | None, shape: RouteShape | None, batch: BatchManifest) -> Bundle | None:
    """Read and verify the bundle of a batch. Returns None when the run replays no experts.

    `shape`: of the model's routes, None for a dense model or with expert_replay=false. Raises BatchError, and OSError when a
    file cannot be read.
    """
    if shape is None:
        if files is not None or batch.replay:
            raise BatchError(
                "the batch has a replay bundle, but this run replays no experts: it belongs to another run"
            )
        return None
    if files is None or not batch.replay:
        raise BatchError(
            "expert_replay is on, and the batch has no replay bundle: its trajectories lack routes; sample them again "
            "through artd's gateway, or start a run with expert_replay=false"
        )
    raw = files.manifest.read_bytes()
    if hashlib.sha256(raw).hexdigest() != batch.replay:
        raise BatchError(f"{files.manifest} does not have the sha256 {batch.replay[:16]} that the batch names: damaged")
    try:
        described = msgspec.json.decode(raw, type=ReplayManifest)
        columns = load_file(files.tensors)
    except (*UNREADABLE, SafetensorError) as error:
        raise BatchError(f"replay bundle {batch.replay[:16]} cannot be read: {error}") from None
    return make_bundle(columns, described, shape, batch)


def make_bundle(
    columns: dict[str, Tensor], described: ReplayManifest, shape: RouteShape, batch: BatchManifest
) -> Bundle:
    """Check that a bundle is the one of this batch and this model. Raises BatchError."""
    _match(described, shape, batch)
    wide = (torch.uint8, "U8") if shape.width == 1 else (torch.uint16, "U16")
    size = (batch.rows, batch.row_length)
    routes = _tensor(columns, described, "routes", *wide, (shape.layers, *size, shape.topk))
    covered = _tensor(columns, described, "covered", torch.uint8, "U8", size)
    if int(covered.max()) > 1 or int(covered.sum()) != described.covered:
        raise BatchError(
            f"the replay bundle says {described.covered} tokens have routes, its tensor {int(covered.sum())}"
        )
    # torch lacks most kernels for uint16.
    return Bundle(described, batch, routes if shape.width == 1 else routes.to(torch.int32), covered.bool())


def _match(described: ReplayManifest, shape: RouteShape, batch: BatchManifest) -> None:
    wanted = {
        "version": (described.version, 1),
        "run": (described.run, batch.run),
        "step": (described.step, batch.step),
        "token_digest": (described.token_digest, batch.token_digest),
        "shape": (described.shape, shape),
        "rows": (described.rows, batch.rows),
        "row_length": (described.row_length, batch.row_length),
    }
    for name, (found, right) in wanted.items():
        if found != right:
            raise BatchError(f"the replay bundle is not of this batch and model: its {name} is {found}, not {right}")


def _tensor(
    columns: dict[str, Tensor],
    described: ReplayManifest,
    name: str,
    dtype: torch.dtype,
    code: str,
    size: tuple[int, ...],
) -> Tensor:
    info, tensor = described.tensors.get(name), columns.get(name)
    if info is None or tensor is None:
        raise BatchError(f"the replay bundle has no tensor {name}")
    if tensor.dtype != dtype or tuple(tensor.shape) != size or (info.dtype, tuple(info.shape)) != (code, size):
        raise BatchError(f"{name} of the replay bundle is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {size}")
    if hashlib.sha256(tensor.contiguous().numpy().data).hexdigest() != info.sha256:
        raise BatchError(f"{name} of the replay bundle does not have the sha256 of its manifest: the file is damaged")
    return tensor


def _namer(row: dict[str, Tensor], batch: BatchManifest) -> Callable[[int], str]:
    """Return a function that names a position of the row in an error."""

    def name(at: int) -> str:
        if at >= len(row["tokens"]):
            return f"position {at} (padding)"
        owner = int(row["trajectory_index"][at])
        known = 0 <= owner < len(batch.trajectories)
        whose = f"trajectory {batch.trajectories[owner].id}" if known else "a prefix that trajectories share"
        return f"position {at} (token {int(row['position_ids'][at])} of {whose})"

    return name


def _check_covered(covered: Tensor, size: int, lasts: set[int], where: Callable[[int], str]) -> None:
    if covered[size:].any():
        raise BatchError(f"position {size + int(covered[size:].nonzero()[0])} is padding and has routes")
    for at in (~covered[:size]).nonzero()[:, 0].tolist():
        if at not in lasts:
            raise BatchError(f"{where(at)} has no routes, and later tokens depend on it: the capture has a hole there")


def _check_ids(routes: Tensor, covered: Tensor, shape: RouteShape, where: Callable[[int], str]) -> None:
    """Check expert ids. `routes`: [layers, S, topk] with padding; `covered`: [S]. Raises BatchError."""
    ids = routes.to(torch.int32)
    outside = ids >= shape.experts
    if (at := _first(outside.any(-1))) is not None:
        layer, position = at
        first = int(ids[layer, position][outside[layer, position]][0])
        raise BatchError(f"{where(position)}: {id_outside(layer, first, shape)}")
    ordered = ids.sort(-1).values
    if (at := _first((ordered[..., 1:] == ordered[..., :-1]).any(-1))) is not None:
        layer, position = at
        raise BatchError(f"{where(position)}: {ids_equal(layer, ids[layer, position].tolist())}")
    if (at := _first((ids != torch.arange(shape.topk)).any(-1) & ~covered)) is not None:
        raise BatchError(f"{where(at[1])} is marked as not covered, and has routes in MoE layer {at[0]}")
    few = (
        shape.topk == 1 and int(covered.sum()) * shape.layers <= FEW
    )  # so few may really all be expert 0; intake allows it too
    if shape.experts > 1 and covered.any() and not few and not ids[:, covered].any():
        first = int(covered.nonzero()[0])
        raise BatchError(f"all routes from {where(first)} on are 0: {NOTHING}")


def _first(bad: Tensor) -> tuple[int, int] | None:
    """Return (layer, position) of the earliest marked position of `bad` [layers, S], None when there is none."""
    if not bad.any():
        return None
    position, layer = bad.t().nonzero()[0].tolist()
    return layer, position
