"""Every weight trained on two GPUs that share each row: `python -m tools.gpu.sharded [--items two,megatron,nudged] [--out DIR] [--tiny]`.

Purpose: `two`: the two steps of `tools.gpu.full` on 4 layers of the real shape, by one process and then by two with half the
masters and moments each; `megatron`: three steps by the two, and the same by Megatron's own distributed optimizer, in bf16, fp32 and
with clipped gradients (`stepped.CASES`), beside what one other rounding grows to; `nudged`: this by one process on one GPU, in bf16 and
fp32. One JSON line for each process or way and one that compares, appended to DIR/sharded.jsonl. `--tiny`: on a CPU, in small.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.gpu import lines  # first: it sets the environment

import torch  # isort: skip
import torch.distributed as dist

from artd_schema.run.spec import RunSpec, TrainerSpec
from artd_workers.trainer import placement
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.parallel import ranks
from artd_workers.trainer.parallel.layout import ALONE, Parallel
from tools.gpu import full
from tools.gpu.full import LOSS, two_steps
from tools.gpu.policies import on

LIMIT = {"two": 120, "stepped": 180}
"""Seconds for the processes, by what they do; for `stepped` in each case."""
STEPS = 3


def two(tiny: bool) -> Iterator[dict[str, Any]]:
    """One process first, here; the two get its batches, with their routes."""
    given: list[Batch] = []
    kind = "float32" if tiny else "bfloat16"
    wanted, _, line = two_steps(tiny, kind, given)
    yield line
    gc.collect()
    if not tiny:
        torch.cuda.empty_cache()
    found = together("two", given, kind, tiny, 2)
    yield from found
    yield {
        "what": "two processes against one",
        "loss": (loss := max(abs(a - b["loss"]) for one in found for a, b in zip(one["loss"], wanted, strict=True))),
        "loss_bound": LOSS, "within": loss <= LOSS,
        "grad_norm_relative": [a / b["grad_norm"] - 1 for a, b in zip(found[0]["grad_norm"], wanted, strict=True)],
        "weights_equal": found[0]["weights"] == found[1]["weights"],
    }  # fmt: skip


def megatron(tiny: bool) -> Iterator[dict[str, Any]]:
    from tools.gpu import stepped

    yield from stepped_by(2, list(stepped.CASES), tiny)


def nudged(tiny: bool) -> Iterator[dict[str, Any]]:
    yield from stepped_by(1, ["bfloat16", "float32"], tiny)


def stepped_by(world: int, cases: list[str], tiny: bool) -> Iterator[dict[str, Any]]:
    """The batches' routes are one process's, in each case the same."""
    from tools.gpu import stepped

    policy, _ = full.built(tiny, on(tiny), ALONE)
    given = full.batches(policy, tiny, STEPS)
    del policy
    gc.collect()
    if not tiny:
        torch.cuda.empty_cache()
    for case in cases:
        yield from stepped.told(case, [one["lines"] for one in together("stepped", given, case, tiny, world)])


def together(item: str, given: list[Batch], kind: str, tiny: bool, world: int) -> list[dict[str, Any]]:
    """What all processes found. item: of LIMIT; kind: a dtype, or one of `stepped.CASES`."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(given, Path(folder) / "batches.pt")
        own = [sys.executable, "-m", "tools.gpu.sharded", "--rank", item, folder, kind, str(int(tiny)), str(world)]
        started = [subprocess.Popen([*own, str(number)]) for number in range(world)]
        try:
            statuses = ended(started, LIMIT[item])
        finally:
            for one in started:
                one.kill()
        if any(status != 0 for status in statuses):
            raise RuntimeError(f"after {LIMIT[item]} s at most the processes had ended with {statuses}: see above")
        return [json.loads((Path(folder) / f"rank-{number}.json").read_text()) for number in range(world)]


def ended(started: list[subprocess.Popen[bytes]], limit: float) -> list[int | None]:
    """Statuses when all have ended, or one has failed, for which another would wait, or the time is up."""
    end = time.monotonic() + limit
    while None in (found := [one.poll() for one in started]) and not any(found) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def rank(item: str, folder: Path, kind: str, tiny: bool, world: int, number: int) -> None:
    """One of the processes."""
    parallel = Parallel(cp=world)
    placement.prepare(RunSpec(model="/drawn", trainer=TrainerSpec(device="cpu" if tiny else "cuda")))
    ranks.meet(world, number, folder, cuda=not tiny)
    ranks.make_groups(parallel, number)
    given = torch.load(folder / "batches.pt", weights_only=False)
    if item == "two":
        found = two_steps(tiny, kind, given, parallel)[2] | {"rank": number}
    else:
        from tools.gpu import stepped

        dtype, limit = stepped.CASES[kind]
        where = on(tiny, dtype=getattr(torch, dtype))
        found = {"lines": stepped.compared(lambda: full.built(tiny, where, parallel), given, limit, tiny)}
    (folder / f"rank-{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5] == "1", *map(int, sys.argv[6:]))
        sys.exit(0)
    sys.exit(lines.main("sharded", {"two": two, "megatron": megatron, "nudged": nudged}))
