"""What tests of the trainer's process share: specs, batches, checkpoint files, pushes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from artd_schema.codec import digest
from artd_schema.data.manifest import CheckpointManifest, WeightTable
from artd_schema.run.spec import LoraSpec, OptimizerSpec, RunSpec
from artd_schema.wire import worker as w
from artd_workers.transfer import gloo

from . import rig
from .fake_daemon import FakeDaemon


def spec_for(folder: Path, **changes: object) -> RunSpec:
    fields: dict[str, object] = {
        "model": str(folder), "row_length": 256, "threads": 1, "seed": 3,
        "lora": LoraSpec(rank=rig.RANK, alpha=rig.ALPHA), "optimizer": OptimizerSpec(lr=0.01),
    }  # fmt: skip
    return RunSpec(**(fields | changes))


def batches(daemon: FakeDaemon, count: int) -> list[rig.WrittenBatch]:
    """One batch per step, sampled by the policy before it."""
    return [rig.write_batch(daemon.work / "batches", step, epoch=step - 1) for step in range(1, count + 1)]


def files(ref: w.CheckpointRef) -> dict[str, bytes]:
    """Every file of a checkpoint but its manifest, which tells of the job too."""
    return files_in(Path(ref.dir))


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def manifest(ref: w.CheckpointRef) -> CheckpointManifest:
    return msgspec.json.decode((Path(ref.dir) / "manifest.json").read_bytes(), type=CheckpointManifest)


def table_of(ref: w.CheckpointRef) -> WeightTable:
    return msgspec.json.decode((Path(ref.dir) / "weights.json").read_bytes(), type=WeightTable)


# ---- live pushes ----------------------------------------------------------------------------------------------------


def push_of(ref: w.CheckpointRef, rendezvous: Path, number: int = 1, fence: int = 1) -> w.Push:
    return w.Push(push=number, fence=fence, checkpoint=ref, mode="merged", source="live", name=f"r@{ref.step}", drain_s=1.0,
                  deadline_s=30.0, rendezvous=str(rendezvous))  # fmt: skip


def receive(group: object, table: WeightTable) -> dict[str, torch.Tensor]:
    """The tensors of a push, each with its hash checked."""
    out = {}
    for entry in table.tensors:
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        gloo.broadcast(group, tensor, 20.0)
        assert digest(tensor.view(-1).view(torch.uint8).numpy().tobytes()) == entry.sha256, entry.name
        out[entry.name] = tensor
    return out
