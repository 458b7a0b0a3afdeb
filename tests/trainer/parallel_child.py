"""One rank of several that do a run's first jobs together, in one layout after the other.

Argument: JSON {rank, world, folder, layouts}. The ranks meet in `folder`, which holds a base model, batches and the results of
one process (see `parallel_rig`). Rank 0 prints one JSON line: the metrics of each job of each layout, and the planted errors.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from artd_schema.run.spec import RunSpec
from artd_workers.trainer import placement
from artd_workers.trainer.model import logits as head
from artd_workers.trainer.parallel import ranks
from artd_workers.trainer.parallel.layout import Parallel
from artd_workers.trainer.parallel.ranks import RankError, Ranks
from artd_workers.trainer.placement import Placement
from artd_workers.trainer.step import job as step_job
from artd_workers.trainer.step.step import Cancelled, train_step

from . import moe_rig, parallel_rig
from .parallel_rig import Jobs
from .seen import Logits

HIDDEN = moe_rig.CONFIG["hidden_size"]


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    folder, rank = Path(given["folder"]), given["rank"]
    meeting = folder / f"meeting-{given['world']}"
    meeting.mkdir(exist_ok=True)
    ranks.meet(given["world"], rank, meeting, cuda=False)
    head.CHUNK = parallel_rig.CHUNK
    report = {}
    for name, layout in given["layouts"].items():
        together = ranks.make_groups(Parallel(**layout["sizes"]), rank)
        # A layer's experts are one parameter, as on a GPU, or many.
        placement.of = partial(_placed, layout["grouped"])
        jobs = Jobs(folder, name, together, **layout.get("spec", {}))
        seen = [Logits(words, words * HIDDEN) for words in {moe_rig.VOCAB, moe_rig.VOCAB // together.parallel.tp}]
        step_job.train_step = partial(watched, seen)
        report[name] = led(jobs) if rank == 0 else jobs.followed(7, 5 if rank == given["world"] - 1 else -1)
        rounding = jobs.rounding()
        if rank == 0:
            logits = {str(one.words): one.tokens for one in seen}
            report[name] |= {"rounding": rounding, "elements": jobs.elements(), "logits": logits}
        if "looks" not in report:
            report["looks"] = looked(together)
        parallel_state.destroy_model_parallel()
    print(json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def watched(seen: list[Logits], *args: Any) -> dict[str, float]:
    """A step of training, looked at."""
    with ExitStack() as stack:
        for one in seen:
            stack.enter_context(one)
        return train_step(*args)


def _placed(grouped: bool, _spec: RunSpec, _layers: int) -> Placement:
    return Placement(grouped=grouped)


def looked(together: Ranks) -> dict[str, Any]:
    """Rank 0 looks twice while the others come late to the first look; what each look gave it, and how long it took."""
    answers, said, seconds = iter((True, False, False)), list[bool](), list[float]()
    looks = together.poll(lambda: next(answers))
    for pause in (0.0, 1.2):
        time.sleep(pause if together.first else 0.8)
        started = time.monotonic()
        said.append(looks())
        seconds.append(time.monotonic() - started)
    return {"said": said, "seconds": seconds, "now": looks.now()}


def led(jobs: Jobs) -> dict[str, Any]:
    """Init and two steps; the second again from one process's first; and three that fail, from which the next one recovers."""
    found: dict[str, Any] = {"metrics": jobs.straight()}
    try:
        jobs.run(2, "lost", jobs.out / "1", batch="nowhere")
    except Exception as error:
        found["lost"] = repr(error)
    asked = chain((False,), repeat(True))
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
