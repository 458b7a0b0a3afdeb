"""Every weight trained by two processes that share each row: what one process makes of it, with half the masters each."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from artd_schema.data.manifest import MODEL_FILE, OPTIMIZER_FILE
from artd_workers.trainer.placement import Placement

from . import parallel_rig, rig
from .parallel_rig import ALONE, Jobs
from .test_parallel import Alone, run

pytestmark = [pytest.mark.torch, pytest.mark.slow]
TWO = "two"
LAYOUT = {TWO: {"sizes": {"cp": 2}, "grouped": True, "spec": {"parameters": "full"}}}
CLOSE = 1e-5
"""Relative, of a tensor: the ranks' gradients are added up in another order."""


@dataclass(frozen=True)
class Done:
    """What one process did, how many numbers it steps, and the first rank's report."""

    folder: Path
    alone: list[dict[str, float]]
    elements: int
    found: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("sharded")
    parallel_rig.prepare(folder)
    jobs = here(folder, ALONE)
    alone = Alone(folder, jobs.straight(), {})
    ranks = run(alone, 2, LAYOUT)
    return Done(folder, alone.metrics, jobs.elements(), ranks.first[TWO])


def here(folder: Path, name: str) -> Jobs:
    """By this process."""
    jobs = Jobs(folder, name, parameters="full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("artd_workers.trainer.placement.of", lambda spec, layers: Placement(grouped=True))
        jobs.trainer._load_policy({})
    return jobs


def apart(one: Path, two: Path) -> float:
    """Largest relative difference of a tensor of two checkpoints."""
    found = []
    for name in (MODEL_FILE, OPTIMIZER_FILE):
        ours, theirs = load_file(one / name), load_file(two / name)
        assert list(ours) == list(theirs)
        found += [rig.relative(ours[key].float(), theirs[key].float()) for key in ours]
    return max(found)


def test_two_processes_train_as_one(done: Done) -> None:
    for step in (1, 2):
        found, wanted = done.found["metrics"][step], done.alone[step]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        assert apart(done.folder / TWO / str(step), done.folder / ALONE / str(step)) <= CLOSE


def test_each_has_half_the_masters(done: Done) -> None:
    """But for what fills up weights of an odd number of elements."""
    assert done.elements / 2 <= done.found["elements"] <= done.elements / 2 + 100


def test_a_checkpoint_does_not_tell_how_many_wrote_it(done: Done) -> None:
    for name in (MODEL_FILE, OPTIMIZER_FILE, "weights.json", "state.json"):
        ours, theirs = ((done.folder / one / "0" / name).read_bytes() for one in (TWO, ALONE))
        assert ours == theirs, name
    back = here(done.folder, "back")
    metrics = back.run(2, "2", done.folder / TWO / "1")
    assert metrics["loss"] == pytest.approx(done.found["metrics"][2]["loss"], rel=1e-5)
    assert apart(back.out / "2", done.folder / TWO / "2") <= CLOSE


def test_a_job_that_stops_leaves_nothing_behind(done: Done) -> None:
    """The one after it, to which the stopped one's gradients could have been added, is as by one process."""
    assert done.found["stopped"].startswith("Cancelled(") and "FileNotFoundError" in done.found["lost"]
    assert apart(done.folder / TWO / "again", done.folder / ALONE / "2") <= CLOSE


def test_fresh_processes_go_on_to_the_same_bits(done: Done, tmp_path: Path) -> None:
    """Step 2 of two that have only step 1's files is step 2 of the two that made them."""
    shutil.copytree(done.folder / "base", tmp_path / "base")
    for name in ("batch-1.json", "batch-2.json"):
        shutil.copy(done.folder / name, tmp_path)
    shutil.copytree(done.folder / TWO / "1", tmp_path / ALONE / "1")
    run(Alone(tmp_path, [], {}), 2, LAYOUT)
    for name in (MODEL_FILE, OPTIMIZER_FILE):
        found, wanted = (one / name for one in (tmp_path / TWO / "again", done.folder / TWO / "2"))
        assert found.read_bytes() == wanted.read_bytes(), name
