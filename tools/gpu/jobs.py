"""The trainer itself on a GPU: init and two train jobs from a checkpoint folder, and the second again in a fresh process.

Purpose: the item `worker` of `tools.gpu.trainer`; `python -m tools.gpu.jobs FOLDER` is its second process. Owner of: a
temporary folder with base model, batches and checkpoints. Invariants: nothing but `Trainer.run` and `Trainer.committed`, as
the daemon's messages would call them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from artd_schema.data.manifest import ADAPTER_FILE, OPTIMIZER_FILE, WeightEntry, WeightTable
from artd_schema.run.spec import EngineSpec, LoraSpec, OptimizerSpec, RunSpec, TrainerSpec
from artd_schema.wire.worker import CheckpointRef, Run
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.deadline import Deadline
from artd_workers.models.registry import plan_for
from artd_workers.trainer.checkpoint import folder as checkpoint
from artd_workers.trainer.trainer import Trainer
from artd_workers.transfer.merge import BaseWeights, adapter_targets, merge

from . import rows, shape

SIZES = {False: (8, 512, 512, 8192), True: (4, 16, 12, 160)}
"""By `tiny`: answers a prompt, tokens of a prompt, of an answer, of a row."""


def worker(tiny: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.perf_counter()
        spec = prepare(folder, tiny)
        yield {"what": "base model and batches written", "seconds": time.perf_counter() - started}
        trainer = made(spec)
        yield from done_by(trainer, folder)
        yield served(folder / "step-2", spec)
        yield one_by_one(trainer)
        yield again_afresh(folder, ADAPTER_FILE)


def done_by(trainer: Trainer, folder: Path) -> Iterator[dict[str, Any]]:
    """Every job, one after the other; leaves in parent.json which checkpoint step 1 is."""
    parent = None
    for job in jobs(folder):
        done = trainer.run(replaced(job, parent))
        parent = CheckpointRef(run="gpu", step=job.step, epoch=job.epoch, lineage=0, sha=done.sha, dir=job.dir)
        trainer.mark_committed(parent, 1)
        if job.step == 1:
            (folder / "parent.json").write_bytes(msgspec.json.encode(parent))
        yield {"what": f"{job.kind} job of step {job.step}", "seconds": done.seconds} | kept(done.metrics)


def again_afresh(folder: Path, weights: str) -> dict[str, Any]:
    """Step 2 in a process of its own, from step 1's checkpoint, beside the one that `done_by` made."""
    subprocess.run([sys.executable, "-m", "tools.gpu.jobs", str(folder)], check=True)
    again = json.loads((folder / "again.json").read_bytes())
    apart = compared(folder / "step-2", folder / "again", weights)
    return {"what": "step 2 again, restored in a fresh process"} | again | apart


def prepare(folder: Path, tiny: bool, config: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """Write base model, batches and spec. config: of another model; changes: of the spec."""
    members, prompt, answer, length = SIZES[tiny]
    config, device = config or shape.config(2 if tiny else 4, tiny), "cpu" if tiny else "cuda"
    plan, base = plan_for(config), folder / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    weights = shape.RandomWeights(plan, config, device)
    names = list(weights)
    for number in range(0, len(names), 400):
        part = {one: weights[one].cpu() for one in names[number : number + 400]}
        save_file(part, base / f"part-{number:05d}.safetensors", metadata={"format": "pt"})
    for step in (1, 2):
        fields = rows.written(
            folder, f"batch-{step}", *rows.drawn(3, members, prompt, answer, length, plan.vocab_size, step)
        )
        (folder / f"batch-{step}.fields").write_text(json.dumps(fields))
    engine, trained = ("float32", "float32") if tiny else ("bfloat16", "bfloat16")
    spec = msgspec.structs.replace(RunSpec(
        model=str(base), seed=3, row_length=length, lora=LoraSpec(rank=16, alpha=32), optimizer=OptimizerSpec(lr=1e-4),
        engine=EngineSpec(dtype=engine), trainer=TrainerSpec(device=device, dtype=trained), expert_replay=False,
    ), **changes)  # fmt: skip
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    return spec


def made(spec: RunSpec) -> Trainer:
    return Trainer(TrainerConfig(run="gpu", spec=spec, base_digest="base"), {"torch": str(torch.__version__)})


def jobs(folder: Path) -> list[Run]:
    """Init, and a train job for each batch; parents are put in later."""
    found = []
    for step in range(3):
        fields = json.loads((folder / f"batch-{step}.fields").read_text()) if step else {}
        found.append(Run(job=step + 1, fence=1, kind="train" if step else "init", step=step, epoch=step, lineage=0,
                         dir=str(folder / f"step-{step}"), instance="i", **fields))  # fmt: skip
    return found


def replaced(job: Run, parent: CheckpointRef | None, **fields: Any) -> Run:
    return msgspec.structs.replace(job, parent=parent, **fields)


def kept(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in ("loss", "grad_norm", "tokens_per_s", "trained_tokens") if name in metrics}


def served(step: Path, spec: RunSpec) -> dict[str, Any]:
    """Every 50th adapted tensor of the weight table, merged again on the CPU."""
    listed, base, dtype = entries(step), BaseWeights(spec.model), getattr(torch, spec.engine.dtype)
    targets = list(adapter_targets(load_file(step / ADAPTER_FILE)).items())[::50]
    scale = spec.lora.alpha / spec.lora.rank
    same = [checkpoint.is_listed(merge(base[name], a, b, scale, dtype), listed[name]) for name, (a, b) in targets]
    return {"what": "served tensors merged again on the CPU", "tensors": len(same), "equal": sum(same)}


def one_by_one(trainer: Trainer) -> dict[str, Any]:
    """What is resident, tensor by tensor as the stock push takes it; every 50th is compared with the weight table."""
    resident = trainer.resident
    assert resident is not None
    snapshot = trainer.snapshot_of(CheckpointRef(
        run=resident.run, step=resident.step, epoch=resident.step, lineage=0, sha=resident.sha, dir=""
    ))  # fmt: skip
    assert snapshot is not None
    kept, started = [], time.perf_counter()
    with snapshot.hold(Deadline(60.0), lambda: None):
        for number, (entry, tensor) in enumerate(snapshot.tensors):
            kept += [] if number % 50 else [(entry, tensor)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    same = sum(checkpoint.is_listed(tensor.cpu(), entry) for entry, tensor in kept)
    return {
        "what": "tensors one by one", "device": snapshot.device, "ways": trainer.transfers(), "tensors": len(kept),
        "equal": same, "seconds": seconds,
    }  # fmt: skip


def entries(step: Path) -> dict[str, WeightEntry]:
    """A checkpoint's weight table by name."""
    table = msgspec.json.decode((step / "weights.json").read_bytes(), type=WeightTable)
    return {entry.name: entry for entry in table.tensors}


def stored(step: Path, name: str) -> dict[str, Tensor]:
    """What a checkpoint has under this name, in however many files."""
    files = checkpoint.shards_of(name, os.listdir(step))
    return {key: tensor for file in files for key, tensor in load_file(step / file).items()}


def compared(one: Path, two: Path, weights: str = ADAPTER_FILE) -> dict[str, Any]:
    """Differences of two checkpoints of the same step. weights: the file of what is trained."""
    found: dict[str, Any] = {}
    for name in (weights, OPTIMIZER_FILE):
        ours, theirs = stored(one, name), stored(two, name)
        assert list(ours) == list(theirs)
        found[name] = max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in ours)
    tables = [list(entries(step).values()) for step in (one, two)]
    same = sum(a == b for a, b in zip(*tables, strict=True))
    states = [(step / "state.json").read_bytes() for step in (one, two)]
    return {"largest_difference": found, "served_equal": [same, len(tables[0])], "state_equal": states[0] == states[1]}


def again(folder: Path) -> None:
    """Step 2 from the committed step 1, by a trainer that knows nothing else."""
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=RunSpec)
    parent = msgspec.json.decode((folder / "parent.json").read_bytes(), type=CheckpointRef)
    job = replaced(jobs(folder)[2], parent, dir=str(folder / "again"))
    done = made(spec).run(job)
    (folder / "again.json").write_text(json.dumps({"seconds": done.seconds} | kept(done.metrics)))


if __name__ == "__main__":
    again(Path(sys.argv[1]))
