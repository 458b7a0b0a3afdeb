"""The trainer on one GPU, measured: `python -m tools.gpu.trainer [--items step,parity,...] [--out DIR] [--tiny]`.

Purpose: one JSON line for each item, appended to DIR/trainer.jsonl as soon as it is known, the most valuable first; each item
in a process of its own, so that none can spoil another. `--tiny`: the same on a CPU, in small, to try the script.
Needs Megatron-Core, and on a GPU Transformer Engine, and this repository's packages on PYTHONPATH.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.gpu import lines  # first: it sets the environment

import torch  # isort: skip

from artd_schema.run.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.placement import CPU
from artd_workers.trainer.step.step import Optimizer, train_step
from tools.gpu import long, replay, rows
from tools.gpu.jobs import worker
from tools.gpu.policies import dense, errors, gradient, made, made_like, on, scored, until
from tools.gpu.timing import Item, profile, sharing, speed

LIMIT = 300
"""Seconds for one item."""


def step(tiny: bool) -> Iterator[dict[str, Any]]:
    """4 layers of the real shape: logprobs by each attention, then two train steps on a tree with replayed routes."""
    policy, lora = made(2 if tiny else 4, tiny, on(tiny))
    size, vocab = 64 if tiny else 512, policy.plan.vocab_size
    batch = rows.with_routes(policy, rows.packed(1, 8, size, size, 9 * size + 8, vocab))
    optimizer = Optimizer.make(lora, OptimizerSpec(lr=1e-4))
    first = train_step(policy, optimizer, batch, LossSpec(), 0)
    second = train_step(policy, optimizer, batch, LossSpec(), 0)
    routers = policy.plan.routes.layers
    yield {
        "what": "train steps", "layers": policy.plan.layers, "tokens": [len(row.tokens) for row in batch.rows],
        "trained": batch.trained, "calls": first["replay_calls"], "wanted_calls": routers * len(batch.rows),
        "first": first, "second": second,
    }  # fmt: skip
    by_until, by_dense, live = (
        scored(policy, batch, seen, replayed) for seen, replayed in ((until, True), (dense, True), (until, False))
    )
    del optimizer, lora
    exact, _ = made(policy.plan.layers, tiny, on(tiny, dtype=torch.float32))
    exact.lora.load({name: tensor.cpu() for name, tensor in policy.lora.state().items()})
    truth, truth_until = scored(exact, batch, dense), scored(exact, batch, until)
    yield {
        "what": "logprobs against fp32 with a dense mask", "tokens": len(truth), "mean_abs_logprob": float(truth.abs().mean()),
        "flex": errors(by_until, truth), "dense": errors(by_dense, truth), "fp32_flex": errors(truth_until, truth),
        "live_routes": errors(live, truth), "ratio_rms": errors(by_until, truth)["rms"] / max(errors(by_dense, truth)["rms"], 1e-30),
    }  # fmt: skip


def toys() -> dict[str, Batch]:
    return {"tree": rows.packed(2, 4, 40, 24, 300, 512), "chain": rows.packed(2, 1, 40, 160, 200, 512)}


def reference(file: Path) -> None:
    """What the CPU's placement makes of the toy: adapter, and for each batch routes, logprobs and gradient."""
    plain, lora = made(2, True, CPU, 8)
    found: dict[str, Any] = {"adapter": {name: tensor.clone() for name, tensor in lora.state().items()}}
    for name, batch in toys().items():
        batch = rows.with_routes(plain, batch)
        found[name] = ([row.routes for row in batch.rows], scored(plain, batch, until), gradient(plain, batch))
    torch.save(found, file)


def parity(tiny: bool) -> Iterator[dict[str, Any]]:
    """A toy by the CPU's placement against the others, on a tree and on a chain."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.pt"
        # Where Transformer Engine is at hand Megatron's router asks it for every product, also on the CPU, where it has none.
        paths = [
            p for p in os.environ.get("PYTHONPATH", "").split(":") if not (Path(p) / "transformer_engine").is_dir()
        ]
        own = [sys.executable, "-m", "tools.gpu.trainer", "--reference", str(file)]
        subprocess.run(own, check=True, env=os.environ | {"PYTHONPATH": ":".join(paths), "CUDA_VISIBLE_DEVICES": ""})
        plain = torch.load(file)
    for dtype, placement in {"fp32": on(tiny, dtype=torch.float32), "bf16": on(tiny)}.items():
        policy = made_like(plain["adapter"], placement)
        for name, batch in toys().items():
            routes, wanted, slope = plain[name]
            batch = replace(
                batch,
                coverage=1.0,
                rows=tuple(replace(r, routes=one) for r, one in zip(batch.rows, routes, strict=True)),
            )
            found = gradient(policy, batch)
            yield {
                "what": f"{name}: {placement.device} {dtype} against the CPU's placement", "tokens": batch.trained,
                "logprobs": errors(scored(policy, batch, until), wanted),
                "gradient_relative": float((found - slope).norm() / slope.norm()),
            }  # fmt: skip


ITEMS: dict[str, Item] = {
    "step": step,
    "parity": parity,
    "speed8": speed(8, [0]),
    "speed48": speed(48, [0]),
    "speed48again": speed(48, [20, 8]),
    "long48": long.longest,
    "long4": long.growth,
    "short48": long.short(48),
    "replay": replay.cost,
    "replaykernels": replay.kernels,
    "profile": profile,
    "sharing": sharing,
    "worker": worker,
}


def machine(tiny: bool) -> dict[str, Any]:
    import importlib.metadata as metadata

    found: dict[str, Any] = {"what": "machine", "torch": torch.__version__, "python": platform.python_version()}
    found |= {name: metadata.version(name) for name in ("megatron-core", "transformer-engine") if not tiny}
    if not tiny:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return found | {"date": time.strftime("%Y-%m-%d")}


def main() -> int:
    args = lines.parsed("trainer", ITEMS)
    print(json.dumps(machine(args.tiny)), flush=True)
    failed, end = 0, math.inf if args.tiny else time.monotonic() + args.limit
    for name in args.items.split(","):
        left = int(min(LIMIT, end - time.monotonic()))
        own = ["--alone", "--items", name, "--out", str(args.out), "--limit", str(left), *["--tiny"] * args.tiny]
        words = [sys.executable, "-m", "tools.gpu.trainer", *own]
        failed += left < 1 or subprocess.run(words, check=False).returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--reference"]:
        sys.exit(reference(Path(sys.argv[2])))
    if sys.argv[1:2] == ["--alone"]:
        del sys.argv[1]
        sys.exit(lines.main("trainer", ITEMS))
    sys.exit(main())
