"""Marks of progress: every row forward and backward, every phase, every file, so that a job which hangs is told from a long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from artd_schema.data.manifest import MANIFEST_FILE
from artd_schema.run.spec import LossSpec, OptimizerSpec
from artd_schema.wire import worker as w
from artd_workers.trainer.checkpoint import writer
from artd_workers.trainer.checkpoint.writer import Files
from artd_workers.trainer.step.step import Optimizer, train_step

from . import rig
from .jobs import spec_for
from .test_checkpoint import FIELDS
from .test_losses import make_batch
from .test_memory import Desk

pytestmark = pytest.mark.torch
CHUNKS = 1
"""Written before their file is whole: of the moments, whose file is a header and two dtypes."""


class Marks:
    """What is called for each; how many came by then."""

    made = 0

    def __call__(self) -> None:
        self.made += 1


def test_every_row_is_marked_forward_and_backward(toy_folders: dict[str, Path]) -> None:
    policy, batch, marks = rig.make_policy(toy_folders["llama"]), make_batch(), Marks()
    seen: list[int] = []

    def asked() -> bool:
        seen.append(marks.made)
        return False

    train_step(policy, Optimizer.make(policy.lora, OptimizerSpec()), batch, LossSpec(), 0, marks, asked)
    rows = len(batch.rows)
    assert rows > 1 and marks.made == 2 * rows
    assert seen == [*range(0, 2 * rows, 2), 2 * rows], "as they are done"


def test_every_phase_and_file_of_a_job_is_marked(tmp_path: Path, toy_folders: dict[str, Path]) -> None:
    desk = Desk(tmp_path, spec_for(toy_folders["llama"]))
    parent: w.CheckpointRef | None = None
    for step, phases in enumerate(
        (
            "build initialise canary collect merge stage",
            "read_batch train canary collect merge stage",
            "restore read_batch train canary collect merge stage",
        )
    ):
        order, marks = desk.order(step, parent), Marks()
        staged = desk.trainer.run(order, marks)
        assert set(staged.seconds) == set(phases.split())
        files = {path.name for path in Path(order.dir).iterdir()} - {MANIFEST_FILE}
        rows = len(load_file(order.batch)["tokens"]) if step else 0
        assert marks.made == 2 * rows + len(staged.seconds) + len(files) + CHUNKS
        parent = w.CheckpointRef(run="r", step=step, epoch=step, lineage=0, sha=staged.sha, dir=order.dir)
        if step == 0:
            desk.trainer.mark_committed(parent, order.fence)


def test_a_large_file_is_marked_while_it_is_written(tmp_path: Path) -> None:
    """What waits in memory to be written is no progress."""
    marks, seen = Marks(), list[int]()

    def chunks() -> Iterator[memoryview]:
        for _ in range(10):
            seen.append(marks.made)
            yield memoryview(b"chunk")

    with Files(tmp_path / "one", marks) as files:
        files.stream("large", chunks())
        files.finish(**FIELDS)
    lag = writer.BUFFERS
    assert seen == [max(0, number - lag + 1) for number in range(10)] and marks.made == 10 - lag + 1 + 1
