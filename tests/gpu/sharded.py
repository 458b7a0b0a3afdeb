"""Every weight trained on two GPUs that share each row: `python -m tests.gpu.sharded [--out DIR] [--tiny]`.

Purpose: the two steps of `tests.gpu.full` on 4 layers of the real shape, by one process and then by two with half the masters and
moments each; one JSON line for each process and one that compares, appended to DIR/sharded.jsonl. `--tiny`: on a CPU, in small.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu import lines  # first: it sets the environment

import torch  # isort: skip
import torch.distributed as dist

from artd_schema.spec import RunSpec, TrainerSpec
from artd_workers.trainer import placement, ranks
from artd_workers.trainer.packed import Batch
from artd_workers.trainer.parallel import Parallel
from tests.gpu.full import LOSS, two_steps

LIMIT = 120
"""Seconds for the two processes."""


def two(tiny: bool) -> Iterator[dict[str, Any]]:
    """One process first, here; the two get its batches, with their routes."""
    given: list[Batch] = []
    kind = "float32" if tiny else "bfloat16"
    wanted, _, line = two_steps(tiny, kind, given)
    yield line
    gc.collect()
    if not tiny:
        torch.cuda.empty_cache()
    found = together(given, kind, tiny)
    yield from found
    yield {
        "what": "two processes against one",
        "loss": (loss := max(abs(a - b["loss"]) for one in found for a, b in zip(one["loss"], wanted, strict=True))),
        "loss_bound": LOSS, "within": loss <= LOSS,
        "grad_norm_relative": [a / b["grad_norm"] - 1 for a, b in zip(found[0]["grad_norm"], wanted, strict=True)],
        "weights_equal": found[0]["weights"] == found[1]["weights"],
    }  # fmt: skip


def together(given: list[Batch], kind: str, tiny: bool) -> list[dict[str, Any]]:
    """The lines of both processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(given, Path(folder) / "batches.pt")
        own = [sys.executable, "-m", "tests.gpu.sharded", "--rank", folder, kind, str(int(tiny))]
        started = [subprocess.Popen([*own, str(number)]) for number in range(2)]
        try:
            ended = [one.wait(timeout=LIMIT) for one in started]
        finally:
            for one in started:
                one.kill()
        if any(ended):
            raise RuntimeError(f"the processes ended with {ended}: see above")
        return [json.loads((Path(folder) / f"rank-{number}.json").read_text()) for number in range(2)]


def rank(folder: Path, kind: str, tiny: bool, number: int) -> None:
    """One of the two."""
    parallel = Parallel(cp=2)
    placement.prepare(RunSpec(model="/drawn", trainer=TrainerSpec(device="cpu" if tiny else "cuda")))
    ranks.met(2, number, folder, cuda=not tiny)
    ranks.grouped(parallel, number)
    _, _, line = two_steps(tiny, kind, torch.load(folder / "batches.pt", weights_only=False), parallel)
    (folder / f"rank-{number}.json").write_text(json.dumps(line | {"rank": number}))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "1", int(sys.argv[5]))
        sys.exit(0)
    sys.exit(lines.main("sharded", {"two": two}))
