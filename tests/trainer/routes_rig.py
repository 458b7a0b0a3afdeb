"""What the replay tests share: random routes, and replay bundles written beside a batch as the packing child writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from artd_schema.codec import digest, to_json
from artd_schema.data.manifest import BatchManifest, ReplayManifest, TensorInfo
from artd_schema.data.trajectory import RouteShape
from artd_workers.trainer.batch.replay_bundle import ReplayFiles
from artd_workers.trainer.batch.rows import Batch, read_batch

from . import rig

CODES = {torch.uint8: "U8", torch.uint16: "U16"}
Columns = dict[str, Tensor]


def random_routes(shape: RouteShape, *size: int, seed: int = 0) -> Tensor:
    """Distinct ids [layers, *size, topk], int64."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(shape.layers, *size, shape.experts, generator=generator)
    return noise.argsort(-1)[..., : shape.topk]


def lasts(columns: Columns) -> Tensor:
    """Bool [rows, S], True at the last token of each sequence, found token by token from the packer's rules."""
    out = torch.zeros_like(columns["tokens"], dtype=torch.bool)
    for row in range(len(out)):
        segments, parents = columns["segment_ids"][row].tolist(), columns["parent_ids"][row].tolist()
        for at, segment in enumerate(segments):
            goes_on = any(
                other == segment or parent == segment
                for other, parent in zip(segments[at + 1 :], parents[at + 1 :], strict=True)
            )
            out[row, at] = segment >= 0 and not goes_on
    return out


def bundle_columns(columns: Columns, shape: RouteShape, seed: int = 0) -> Columns:
    """`routes` and `covered` of a batch, with ids 0 .. topk-1 in padding and last tokens."""
    covered = (columns["segment_ids"] >= 0) & ~lasts(columns)
    routes = random_routes(shape, *covered.shape, seed=seed)
    routes[:, ~covered] = torch.arange(shape.topk)
    return {
        "routes": routes.to(torch.uint8 if shape.width == 1 else torch.uint16),
        "covered": covered.to(torch.uint8),
    }


def describe(bundle: Columns, columns: Columns, manifest: BatchManifest, shape: RouteShape) -> ReplayManifest:
    tensors = {
        name: TensorInfo(CODES[t.dtype], tuple(t.shape), hashlib.sha256(t.contiguous().numpy().data).hexdigest())
        for name, t in bundle.items()
    }
    return ReplayManifest(
        run=manifest.run, step=manifest.step, token_digest=manifest.token_digest, shape=shape, rows=manifest.rows,
        row_length=manifest.row_length, tensors=tensors, tokens=int((columns["segment_ids"] >= 0).sum()),
        covered=int(bundle["covered"].sum()),
    )  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A batch with its bundle on disk."""

    batch: Path
    manifest: Path
    sha: str
    replay: ReplayFiles

    def read(self, shape: RouteShape | None, replay: ReplayFiles | None = None) -> Batch:
        return read_batch(self.batch, self.manifest, self.sha, 1024, shape, replay or self.replay)


def write(
    folder: Path,
    columns: Columns,
    trajectories: int,
    shape: RouteShape,
    *,
    change: Callable[[Columns], None] = lambda bundle: None,
    say: Callable[[ReplayManifest], ReplayManifest] = lambda manifest: manifest,
    seed: int = 0,
) -> Written:
    """Write a batch and its bundle. change: alters the bundle's tensors before, say: its manifest after digests are taken."""
    manifest = rig.manifest_of(columns, trajectories)
    bundle = bundle_columns(columns, shape, seed)
    change(bundle)
    raw = to_json(say(describe(bundle, columns, manifest, shape)))
    folder.mkdir(parents=True, exist_ok=True)
    files = ReplayFiles(folder / "replay.safetensors", folder / "replay.json")
    save_file(bundle, files.tensors)
    files.manifest.write_bytes(raw)
    described = to_json(msgspec.structs.replace(manifest, replay=digest(raw)))
    save_file(columns, folder / "batch.safetensors")
    (folder / "batch.json").write_bytes(described)
    return Written(folder / "batch.safetensors", folder / "batch.json", digest(described), files)
