"""The trainer on several GPUs against one: `python -m tools.gpu.parallel [--items alone,tp,ep,pp,cp,tpep] [--out DIR] [--tiny]`.

Purpose: for each layout a fresh trainer, its other ranks started as in a run (through torchrun), does init and two steps with
expert replay on layers of the real shape; one JSON line each, with its distance from one process and its speed. `alone` comes
first: the others are compared with it. `--tiny`: the same on a CPU, in small. Owner of: a temporary folder with base model,
batches and checkpoints. Invariants: nothing but `launch.start_ranks`, `Trainer.run` and `Trainer.committed`, as the worker calls them.
"""

from __future__ import annotations

from tools.gpu import lines  # first: it sets what torch reads  # isort: skip

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from artd.packing.batch import pack
from artd.packing.inputs import PackSpec, Source
from artd.packing.tensors import serialise
from artd_schema.codec import digest, to_json
from artd_schema.data.trajectory import RouteShape, Sampling, Turn
from artd_schema.run.spec import LoraSpec, OptimizerSpec, RunSpec, TrainerSpec
from artd_schema.wire.worker import CheckpointRef, Run
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.models import seeded
from tools.gpu import shape
from tools.gpu.jobs import stored

LAYERS = 4
SIZES = {False: (4, 8, 512, 512, 8192), True: (3, 3, 20, 12, 64)}
"""By `tiny`: groups of a batch, answers to a prompt, tokens of a prompt, of an answer, of a row."""
LAYOUTS: dict[str, dict[str, int]] = {
    "alone": {},
    "tp": {"tensor_parallel": 2},
    "ep": {"expert_parallel": 2},
    "pp": {"pipeline_parallel": 2},
    "cp": {"context_parallel": 2},
    "tpep": {"tensor_parallel": 2, "expert_parallel": 2},
    "cpep": {"context_parallel": 2, "expert_parallel": 2},
}
LIMIT = 120
"""Seconds for one layout."""
_FOLDER: list[tempfile.TemporaryDirectory[str]] = []


def item(name: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """One layout in processes of its own."""
    if not _FOLDER:
        _FOLDER.append(tempfile.TemporaryDirectory(prefix="parallel-"))
        prepare(Path(_FOLDER[0].name), tiny)
    folder = Path(_FOLDER[0].name)
    own = [sys.executable, "-m", "tools.gpu.parallel", "--layout", name, str(folder), str(int(tiny))]
    subprocess.run(own, check=True, timeout=LIMIT, env=os.environ | ({"OMP_NUM_THREADS": "1"} if tiny else {}))
    found = json.loads((folder / name / "metrics.json").read_text())
    yield {"what": f"{LAYOUTS[name] or 'one process'}, {LAYERS} layers"} | found
    if name != "alone" and (folder / "alone").is_dir():
        yield {"what": "distance from one process"} | distance(folder, name, found["steps"])


def distance(folder: Path, name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the losses, of the gradients' norm, and of the first step's gradients themselves (relative)."""
    alone = json.loads((folder / "alone" / "metrics.json").read_text())["steps"]
    moments = [stored(folder / one / "1", "optimizer.safetensors") for one in (name, "alone")]
    ours, theirs = (torch.cat([m[key].flatten() for key in m if key.endswith(".exp_avg")]) for m in moments)
    return {
        "loss": [a["loss"] - b["loss"] for a, b in zip(steps, alone, strict=True)],
        "loss_within_2e-3": all(abs(a["loss"] - b["loss"]) <= 2e-3 for a, b in zip(steps, alone, strict=True)),
        "grad_norm_relative": [a["grad_norm"] / b["grad_norm"] - 1 for a, b in zip(steps, alone, strict=True)],
        "gradient_relative": float((ours - theirs).norm() / theirs.norm()),
        "speed": steps[1]["tokens_per_s"] / alone[1]["tokens_per_s"],
    }


# ---- what is trained ------------------------------------------------------------------------------------------------


def prepare(folder: Path, tiny: bool) -> None:
    """Write the base model, and a batch with routes for each step."""
    config = shape.config(LAYERS, tiny)
    seeded.make(folder / "base", config)
    routed = RouteShape(layers=LAYERS, topk=config["num_experts_per_tok"], experts=config["num_experts"])
    for step in (1, 2):
        (folder / f"batch-{step}.json").write_text(
            json.dumps(written(folder, step, routed, config["vocab_size"], tiny))
        )


def written(folder: Path, step: int, routed: RouteShape, vocab: int, tiny: bool) -> dict[str, str]:
    """Pack a batch; the fields of a Run that name its files."""
    spec = PackSpec(
        run="gpu", step=step, seed=0, row_length=SIZES[tiny][4], scale_rewards=True, base_digest="base", routes=routed
    )
    columns, manifest, replay = pack(spec, sources(step, routed, vocab, tiny))
    assert replay is not None
    files = {
        "batch": serialise(columns), "manifest": to_json(manifest), "replay": serialise(replay.tensors),
        "replay_manifest": to_json(replay.manifest),
    }  # fmt: skip
    for name, data in files.items():
        (folder / f"{name}-{step}").write_bytes(data)
    return {name: str(folder / f"{name}-{step}") for name in files} | {"batch_sha": digest(files["manifest"])}


def sources(step: int, routed: RouteShape, vocab: int, tiny: bool) -> list[Source]:
    groups, members, prompt, answer, _ = SIZES[tiny]
    generator = torch.Generator().manual_seed(step)
    found = []
    for number in range(groups * members):
        if number % members == 0:
            asked = torch.randint(3, vocab, (prompt,), generator=generator, dtype=torch.int32)
        said = torch.randint(3, vocab, (answer,), generator=generator, dtype=torch.int32)
        logprobs = -torch.rand(answer, generator=generator) - torch.tensor(float(vocab)).log()
        turn = Turn(
            prompt_ids=asked.numpy().tobytes(), token_ids=said.numpy().tobytes(), logprobs=logprobs.numpy().tobytes(),
            sampling=Sampling(temperature=1.0), policy_epoch=((0, step - 1),),
            routes=routes_of(torch.cat((asked, said)), routed).numpy().tobytes(),
        )  # fmt: skip
        body = msgspec.msgpack.encode([turn])
        found.append(
            Source(id=number + 1, group=number // members + 1, reward=float(number % 2), digest=digest(body), body=body)
        )
    return found


def routes_of(tokens: torch.Tensor, routed: RouteShape) -> torch.Tensor:
    """Routes uint8 [tokens, layers, topk] that depend on the token and its place, so that a shared prompt has the same."""
    first = tokens.long() * 7919 + torch.arange(len(tokens)) * 104_729
    layers, step = torch.arange(routed.layers) * 31, routed.experts // routed.topk
    spread = first[:, None, None] + layers[:, None] + torch.arange(routed.topk) * step
    return (spread % routed.experts).sort(-1).values.to(torch.uint8)


# ---- one layout, as its rank 0 --------------------------------------------------------------------------------------


def led(name: str, folder: Path, tiny: bool) -> None:
    """Init and two steps; metrics and checkpoints below folder/name."""
    kind = TrainerSpec(device="cpu") if tiny else TrainerSpec(device="cuda", dtype="bfloat16")
    spec = RunSpec(
        model=str(folder / "base"), seed=3, rollout_weights_mode="lora", row_length=SIZES[tiny][4], lora=LoraSpec(),
        optimizer=OptimizerSpec(lr=1e-4), threads=1 if tiny else 0, trainer=msgspec.structs.replace(kind, **LAYOUTS[name]),
    )  # fmt: skip
    from artd_workers.trainer import placement

    placement.prepare(spec)
    from artd_workers.trainer.parallel import launch
    from artd_workers.trainer.trainer import Trainer

    config = TrainerConfig(run="gpu", spec=spec, base_digest="base")
    with launch.start_ranks(launch.layout(spec), cuda=not tiny) as ranks:
        ranks.send_order(msgspec.msgpack.encode(config))
        steps = jobs(Trainer(config, {}, ranks), folder, name)
    memory = {} if tiny else {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}
    (folder / name / "metrics.json").write_text(json.dumps({"init": steps[0], "steps": steps[1:]} | memory))


def jobs(trainer: Any, folder: Path, name: str) -> list[dict[str, Any]]:
    """Init and two steps; metrics of each."""
    parent, steps = None, []
    for step in range(3):
        files = json.loads((folder / f"batch-{step}.json").read_text()) if step else {}
        job = Run(job=step + 1, fence=1, kind="train" if step else "init", step=step, epoch=step, lineage=0,
                  dir=str(folder / name / str(step)), instance="i", parent=parent, **files)  # fmt: skip
        staged = trainer.run(job)
        parent = CheckpointRef(run="gpu", step=step, epoch=step, lineage=0, sha=staged.sha, dir=job.dir)
        trainer.mark_committed(parent, 1)
        kept = ("loss", "grad_norm", "tokens_per_s", "trained_tokens", "physical_tokens", "replay_calls")
        steps.append({key: staged.metrics[key] for key in kept if key in staged.metrics} | {"seconds": staged.seconds})
    return steps


if __name__ == "__main__":
    if sys.argv[1:2] == ["--layout"]:
        led(sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "1")
        sys.exit(0)
    sys.exit(lines.main("parallel", {name: partial(item, name) for name in LAYOUTS}))
