"""`python -m tests.soak.undisturbed FOLDER`: trains the jobs of a soak in one undisturbed process, from init on.

It runs with the megatron runtime's interpreter. Request: FOLDER/request.json. Answer: an `Answer` in JSON on stdout, without
violations when every file of every checkpoint equals the committed one byte for byte, and every reply has the logprobs of the
weights that it named. Each step starts from what this process itself made, in memory; the committed folders are only read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from artd_schema.wire.replay_job import ReplayRequest
from artd_schema.wire.worker import CheckpointRef

TOLERANCE = 2e-4  # nats: fp32 of engine and trainer


class Probe(Struct, frozen=True, kw_only=True):
    """One reply: which step it came from, and the engine's logprobs of its tokens."""

    step: int
    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Request(Struct, frozen=True, kw_only=True):
    """jobs: in the order of steps; their `run.dir` is where this process stages its own result."""

    jobs: tuple[ReplayRequest, ...]
    probes: tuple[Probe, ...]


class Answer(Struct, kw_only=True):
    """violations: (kind, what) of everything that is otherwise; files, replies: how many were compared; apart: the largest
    difference between engine and trainer in nats."""

    violations: list[tuple[str, str]] = []
    files: int = 0
    replies: int = 0
    apart: float = 0.0


def check(request: Request) -> Answer:
    """Train all of it and compare each step at once, while memory holds it."""
    from artd_workers.trainer.__main__ import versions
    from artd_workers.trainer.trainer import Trainer

    trainer = Trainer(request.jobs[0].config, versions())
    parent: CheckpointRef | None = None
    answer = Answer()
    for job in request.jobs:
        run = msgspec.structs.replace(job.run, parent=parent)
        staged = trainer.run(run)
        parent = msgspec.structs.replace(job.committed, sha=staged.sha, dir=run.dir)
        trainer.mark_committed(parent, run.fence)
        assert parent.step == run.step and trainer.resident is not None, f"step {run.step} is not the next one"
        _files(answer, Path(job.committed.dir), Path(run.dir), run.step)
        for probe in request.probes:
            if probe.step == run.step:
                _reply(answer, trainer, probe)
    return answer


def _files(answer: Answer, committed: Path, ours: Path, step: int) -> None:
    """The manifest holds job and fence, and metrics that are clocks: what it lists is compared instead."""
    names = {path.name for folder in (committed, ours) for path in folder.iterdir()} - {"manifest.json"}
    for name in sorted(names):
        answer.files += 1
        if not (committed / name).exists() or not (ours / name).exists():
            what = f"step {step}: {name} is in one of the two folders only"
        elif (committed / name).read_bytes() != (ours / name).read_bytes():
            what = f"step {step}: {name} is not what an undisturbed process makes of the same manifests"
        else:
            continue
        answer.violations.append(("other weights", what))


def _reply(answer: Answer, trainer: Any, probe: Probe) -> None:
    apart = _apart(trainer, probe)
    answer.replies += 1
    answer.apart = max(answer.apart, apart)
    if not apart <= TOLERANCE:
        what = f"{probe.name} says step {probe.step}, whose logprobs are {apart:.2g} nats apart"
        answer.violations.append(("half-served", what))


def _apart(trainer: Any, probe: Probe) -> float:
    """The largest difference between engine and trainer in nats."""
    import torch

    from artd_schema.wire.score import LIVE
    from artd_workers.trainer.tools.score import Piece, score

    tokens = torch.tensor([*probe.prompt, *probe.tokens])
    candidates = torch.zeros(len(probe.tokens), 1, dtype=torch.long)
    found = score(trainer._load_policy({}), [Piece(tokens, len(probe.prompt), candidates, None)], LIVE)["logprobs"]
    return float((found - torch.tensor(probe.logprobs)).abs().max())


def main(folder: Path) -> None:
    request = msgspec.json.decode((folder / "request.json").read_bytes(), type=Request)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what libraries print is no answer
        out.write(msgspec.json.encode(check(request)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
