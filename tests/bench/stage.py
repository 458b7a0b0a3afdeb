"""A checkpoint onto the disk and back: `python -m tests.bench.stage [--json] [--layers 9] [--rounds 3] [--dir DIR] [--device cuda]`.

Adapters of rank 16 on all linears of Qwen3-30B-A3B's layers (nine: 0.6 GB in 7,000 tensors) with AdamW's two moments,
staged as `trainer.checkpoint` does it, and in turns with it one step after the other: each file made as one object by the
safetensors library, then hashed, then written and fsynced. Run it with the trainer's interpreter (it imports torch). DIR: on the
disk that is measured, default the temporary folder's; device: where the tensors lie. Goal: at least 1.5 times as fast as one after the other.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from artd_schema.data.manifest import ADAPTER_FILE, OPTIMIZER_FILE, Canary
from artd_schema.wire.worker import CheckpointRef
from artd_workers.trainer.checkpoint import folder as checkpoint
from artd_workers.trainer.checkpoint import tensor_file
from artd_workers.trainer.checkpoint.folder import STATE, Staging, State
from tests.bench.report import Report, parser

FASTER = 1.5
RANK, HIDDEN, INNER, EXPERTS, QUERY, KEY = 16, 2048, 768, 128, 4096, 512
DENSE = {"q_proj": (QUERY, HIDDEN), "k_proj": (KEY, HIDDEN), "v_proj": (KEY, HIDDEN), "o_proj": (HIDDEN, QUERY)}
SPARSE = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
Files = dict[str, dict[str, Tensor]]


def drawn(layers: int, device: str) -> dict[str, Tensor]:
    """An adapter in PEFT names; the experts of a layer are parts of one tensor, as in the trainer."""
    out: dict[str, Tensor] = {}
    for layer in range(layers):
        stem = f"base_model.model.model.layers.{layer}"
        for name, (rows, columns) in DENSE.items():
            out[f"{stem}.self_attn.{name}.lora_A.weight"] = torch.randn(RANK, columns, device=device)
            out[f"{stem}.self_attn.{name}.lora_B.weight"] = torch.randn(rows, RANK, device=device)
        for name, (rows, columns) in SPARSE.items():
            a = torch.randn(EXPERTS, RANK, columns, device=device)
            b = torch.randn(EXPERTS, rows, RANK, device=device)
            for expert in range(EXPERTS):
                out[f"{stem}.mlp.experts.{expert}.{name}.lora_A.weight"] = a[expert]
                out[f"{stem}.mlp.experts.{expert}.{name}.lora_B.weight"] = b[expert]
    return out


def contents(layers: int, device: str) -> Files:
    moments = {f"{name}.{key}": one for key in ("exp_avg", "exp_avg_sq") for name, one in drawn(layers, device).items()}
    return {ADAPTER_FILE: drawn(layers, device), OPTIMIZER_FILE: moments | {"step": torch.tensor(1)}}


def staged(folder: Path, files: Files) -> str:
    """As the trainer does it; the manifest's sha256."""
    with Staging(folder) as staging:
        for name, tensors in files.items():
            (staging.add_shards if name == OPTIMIZER_FILE else staging.tensors)(name, tensors)
        staging.json(STATE, State(step=1))
        staging.weights("merged", ())
        return staging.finish(
            run="r", step=1, epoch=1, lineage=0, parent="", batch="", base_digest="", spec_digest="", instance="", job=1,
            fence=1, canary=Canary(prompts=(), logprobs=(), max_abs=1.0, mean_abs=1.0),
        )  # fmt: skip


def one_by_one(folder: Path, files: Files, seconds: dict[str, float]) -> None:
    """One step after the other; their seconds are added up."""
    folder.mkdir()
    for name, tensors in files.items():
        with timed(seconds, "copy to the host"):
            there = {key: value.cpu().contiguous() for key, value in tensors.items()}
        with timed(seconds, "serialise"):
            data = save(there, {"format": "pt"})
        with (folder / name).open("wb") as file:
            with timed(seconds, "write"):
                file.write(data)
            with timed(seconds, "fsync"):
                os.fsync(file.fileno())
        with timed(seconds, "sha256"):
            hashlib.sha256(data).hexdigest()


def read_one_by_one(folder: Path, files: Files) -> None:
    """Whole files, hashed, and then each tensor copied."""
    for name in files:
        data = (folder / name).read_bytes()
        hashlib.sha256(data).hexdigest()
        load(data)


@contextmanager
def timed(into: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    into[name] = into.get(name, 0.0) + time.perf_counter() - started


def taken(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def alone(files: Files) -> dict[str, float]:
    """What bounds a pipeline: the chunks by themselves, and hashing the larger file."""
    made = taken(lambda: [sum(map(len, tensor_file.chunks(tensors))) for tensors in files.values()])
    larger = max(sum(one.nbytes for one in tensors.values()) for tensors in files.values())
    block, sha = memoryview(bytes(32 << 20)), hashlib.sha256()
    hashed = taken(lambda: [sha.update(block) for _ in range(larger // len(block))])
    return {"chunks made, and no more": made, "sha256 of the larger file, and no more": hashed}


def peak() -> float:
    """GB of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=9)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--dir", type=Path, default=None)
    options.add_argument("--device", default="cpu")
    args = options.parse_args()
    files = contents(args.layers, args.device)
    cut = {ADAPTER_FILE: files[ADAPTER_FILE]} | checkpoint.shards(OPTIMIZER_FILE, files[OPTIMIZER_FILE])
    size = sum(one.nbytes for tensors in files.values() for one in tensors.values()) / 1e9
    report = Report(f"staging {size:.2f} GB in {sum(map(len, files.values()))} tensors")
    rows: dict[str, list[float]] = {name: [] for name in ("staged", "one", "read", "read one")}
    steps: dict[str, float] = {}
    shas: list[str] = []
    held, grown = peak(), dict[str, float]()
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="artd-stage-") as name:
        new, old = Path(name) / "new", Path(name) / "old"
        for number in range(args.rounds):
            os.sync()
            rows["staged"].append(taken(lambda: shas.append(staged(new, files))))
            grown.setdefault("staging", peak() - held)
            ref = CheckpointRef(run="r", step=1, epoch=1, lineage=0, sha=shas[-1], dir=str(new))
            rows["read"].append(taken(partial(checkpoint.read, ref, ADAPTER_FILE)))
            os.sync()
            rows["one"].append(taken(lambda: one_by_one(old, cut, steps)))
            grown.setdefault("staging one after the other", peak() - held)
            rows["read one"].append(taken(lambda: read_one_by_one(old, cut)))
            for file in cut:
                assert number or (old / file).read_bytes() == (new / file).read_bytes(), "not the same bytes"
            shutil.rmtree(old)
    median = {name: statistics.median(seconds) for name, seconds in rows.items()}
    report.add("staged", median["staged"], "s")
    report.add("one after the other", median["one"], "s")
    for step, seconds in steps.items():
        report.add(f"  {step}, mean", seconds / args.rounds, "s")
    report.add("one after the other / staged", median["one"] / median["staged"], "x", FASTER)
    for step, seconds in alone(cut).items():
        report.add(f"  {step}", seconds, "s")
    report.add("read back", median["read"], "s")
    report.add("read back one after the other", median["read one"], "s")
    report.add("read back one after the other / read back", median["read one"] / median["read"], "x")
    for what, size in grown.items():
        report.add(f"memory grown at most until after {what}", size, "GB")
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
