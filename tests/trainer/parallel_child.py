"""One rank of several that do a run's first jobs together, in one layout after the other.

Argument: JSON {rank, world, folder, layouts}. The ranks meet in `folder`, which holds a base model, batches and what one process made of
them (see `parallel_rig`). Rank 0 prints one JSON line: the metrics of each job of each layout, and what went wrong on purpose.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from artd_schema.spec import RunSpec
from artd_workers.trainer import placement, ranks
from artd_workers.trainer.parallel import Parallel
from artd_workers.trainer.placement import Placement
from artd_workers.trainer.ranks import RankError
from artd_workers.trainer.step import Cancelled

from . import parallel_rig
from .parallel_rig import Jobs


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    folder, rank = Path(given["folder"]), given["rank"]
    meeting = folder / f"meeting-{given['world']}"
    meeting.mkdir(exist_ok=True)
    ranks.met(given["world"], rank, meeting, cuda=False)
    report = {}
    for name, layout in given["layouts"].items():
        together = ranks.grouped(Parallel(**layout["sizes"]), rank)
        # A layer's experts are one parameter, as on a GPU, or many.
        placement.of = partial(_placed, layout["grouped"])
        jobs = Jobs(folder, name, together, **layout.get("spec", {}))
        report[name] = led(jobs) if rank == 0 else jobs.followed(7, 5 if rank == given["world"] - 1 else -1)
        rounding = jobs.rounding()
        if rank == 0:
            report[name] |= {"rounding": rounding, "elements": jobs.elements()}
        parallel_state.destroy_model_parallel()
    print(json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _placed(grouped: bool, _spec: RunSpec, _layers: int) -> Placement:
    return Placement(grouped=grouped)


def led(jobs: Jobs) -> dict[str, Any]:
    """Init and two steps; the second again from one process's first; and three that fail, from which the next one recovers."""
    found: dict[str, Any] = {"metrics": jobs.straight()}
    try:
        jobs.run(2, "lost", jobs.out / "1", batch="nowhere")
    except Exception as error:
        found["lost"] = repr(error)
    asked = iter((False, True))
    try:
        jobs.run(2, "stopped", jobs.out / "1", lambda: next(asked))
    except Cancelled as error:
        found["stopped"] = repr(error)
    try:
        jobs.run(2, "elsewhere", jobs.out / "1")
    except RankError as error:
        found["elsewhere"] = repr(error)
    found["again"] = jobs.run(2, "again", jobs.given / parallel_rig.ALONE / "1")
    return found


if __name__ == "__main__":
    main()
