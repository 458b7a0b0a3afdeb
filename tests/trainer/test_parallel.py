"""A run's first jobs by several processes: what one process makes of them, whatever the layout, and from each other's checkpoints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from artd_schema.run.spec import RunSpec, TrainerSpec
from artd_workers.models.base import UnsupportedModel
from artd_workers.models.registry import plan_for
from artd_workers.trainer.parallel.context import pad_row
from artd_workers.trainer.parallel.layout import Parallel
from artd_workers.trainer.placement import Placement

from . import moe_rig, parallel_rig
from .moe_rig import ROWS
from .parallel_rig import ALONE, Jobs, apart

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
FAST: dict[str, dict[str, Any]] = {
    "tensor": {"sizes": {"tp": 2}, "grouped": True},
    "expert": {"sizes": {"ep": 2}, "grouped": True},
    "stages": {"sizes": {"pp": 2}, "grouped": True},
    "context": {"sizes": {"cp": 2}, "grouped": True},
}
SLOW: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tensor, experts one by one": {"sizes": {"tp": 2}, "grouped": False},
        "expert, one by one": {"sizes": {"ep": 2}, "grouped": False},
        "tensor and expert": {"sizes": {"tp": 2, "ep": 2}, "grouped": True},
        "context and expert": {"sizes": {"cp": 2, "ep": 2}, "grouped": True},
    },
    4: {
        "tensor and context": {"sizes": {"tp": 2, "cp": 2}, "grouped": True},
        "tensor and stages": {"sizes": {"tp": 2, "pp": 2}, "grouped": True},
        "expert and stages": {"sizes": {"ep": 2, "pp": 2}, "grouped": True},
        "expert over tensor": {"sizes": {"tp": 2, "ep": 4}, "grouped": True},
        "context in stages": {"sizes": {"cp": 2, "pp": 2, "ep": 2}, "grouped": True},
    },
}
LAYOUTS = FAST | SLOW[2] | SLOW[4]
EACH = [
    *FAST,
    *(pytest.param(name, marks=pytest.mark.slow) for some in SLOW.values() for name in some),
]
CLOSE = {"adapter": 1e-3, "optimizer": 2e-3, "canary": 5e-5}
"""AdamW divides by the size of a gradient, so the smallest ones' rounding shows."""


@dataclass(frozen=True)
class Alone:
    """What one process did, and what rounding to bf16 would do to it."""

    folder: Path
    metrics: list[dict[str, float]]
    rounding: dict[str, float]


@dataclass(frozen=True)
class Done:
    """The ranks' reports by layout: rank 0's findings, and what the others raised."""

    folder: Path
    alone: Alone
    first: dict[str, Any]
    others: list[dict[str, Any]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("ranks")
    parallel_rig.prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("artd_workers.trainer.placement.of", lambda spec, layers: Placement())
        jobs = Jobs(folder, ALONE)
        return Alone(folder, jobs.straight(), jobs.rounding())


@pytest.fixture(scope="module")
def fast(alone: Alone) -> Done:
    return run(alone, 2, FAST)


@pytest.fixture(scope="module")
def slow_2(alone: Alone) -> Done:
    return run(alone, 2, SLOW[2])


@pytest.fixture(scope="module")
def slow_4(alone: Alone) -> Done:
    return run(alone, 4, SLOW[4])


@pytest.fixture
def done(layout: str, request: pytest.FixtureRequest) -> Done:
    """Of the ranks that did this layout."""
    return request.getfixturevalue("fast" if layout in FAST else f"slow_{2 if layout in SLOW[2] else 4}")


def run(alone: Alone, processes: int, layouts: dict[str, dict[str, Any]]) -> Done:
    """Run all ranks."""
    job = {"folder": str(alone.folder), "world": processes, "layouts": layouts}
    environment = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.parallel_child", json.dumps(job | {"rank": rank})],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        said = [rank.communicate(timeout=270 * processes / 2) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert not any(rank.returncode for rank in ranks), "\n".join(error for _, error in said)
    first, *others = (json.loads(out.splitlines()[-1]) for out, _ in said)
    return Done(alone.folder, alone, first, others)


@pytest.mark.parametrize("layout", EACH)
def test_several_processes_train_as_one(done: Done, layout: str) -> None:
    for step in (1, 2):
        found, wanted = done.first[layout]["metrics"][step], done.alone.metrics[step]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        same = found.keys() - {"tokens_per_s", "replay_calls"}
        assert same == wanted.keys() - {"tokens_per_s", "replay_calls"}
        assert {name: found[name] for name in same} == pytest.approx({name: wanted[name] for name in same}, rel=1e-4)
        distance = apart(done.folder / layout / str(step), done.folder / ALONE / str(step))
        assert all(distance[name] < CLOSE[name] for name in CLOSE), distance
        # The canary's bound, which the closest decision of all routers widens to 4, is that of all ranks; else it follows what
        # nudges make of the scores, which ranks draw in another order.
        bounds = [parallel_rig.manifest(done.folder / name / str(step)).canary.max_abs for name in (layout, ALONE)]
        assert bounds[1] / 3 <= bounds[0] <= bounds[1] * 3


@pytest.mark.parametrize("layout", EACH)
def test_several_processes_lose_as_much_to_bf16_as_one(done: Done, layout: str) -> None:
    """Of the step that both made from one process's checkpoint: each element counted once, whoever has it. The room that an
    engine's canary gets is drawn by the ranks in parts of their own."""
    found, wanted = done.first[layout]["rounding"], done.alone.rounding
    names = wanted.keys() - {"room"}
    assert {name: found[name] for name in names} == pytest.approx({name: wanted[name] for name in names}, rel=1e-4)
    assert wanted["merge_kl"] > 1e-5 and wanted["room"] > 1e-3
    assert wanted["room"] / 2 < found["room"] < wanted["room"] * 2


@pytest.mark.parametrize("layout", EACH)
def test_each_rank_replays_the_routes_of_its_rows(done: Done, layout: str) -> None:
    sizes = Parallel(**LAYOUTS[layout]["sizes"])
    turns, layers = -(-parallel_rig.GROUPS // sizes.replicas), moe_rig.SHAPE.layers // sizes.pp
    assert done.first[layout]["metrics"][1]["replay_calls"] == turns * layers


@pytest.mark.parametrize("layout", EACH)
def test_no_rank_has_the_logits_of_a_row_or_of_all_words(done: Done, layout: str) -> None:
    """The first rank; in a pipeline that is one without a head, and one that shares a row's tokens has its prompts."""
    sizes = Parallel(**LAYOUTS[layout]["sizes"])
    own = 0 if sizes.pp > 1 or sizes.cp > 1 else parallel_rig.CHUNK
    assert done.first[layout]["logits"] == {str(moe_rig.VOCAB): 0} | {str(moe_rig.VOCAB // sizes.tp): own}


@pytest.mark.parametrize("layout", EACH)
def test_a_checkpoint_does_not_tell_how_many_wrote_it(done: Done, layout: str) -> None:
    start = [load_file(done.folder / name / "0" / "adapter_model.safetensors") for name in (layout, ALONE)]
    assert {name: t.numpy().tobytes() for name, t in start[0].items()} == {
        name: t.numpy().tobytes() for name, t in start[1].items()
    }
    again = apart(done.folder / layout / "again", done.folder / ALONE / "2")
    assert all(again[name] < CLOSE[name] for name in CLOSE), again


@pytest.mark.parametrize("layout", EACH)
def test_one_process_goes_on_from_a_checkpoint_of_two(done: Done, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("artd_workers.trainer.placement.of", lambda spec, layers: Placement())
    back = Jobs(done.folder, f"back-{layout}")
    metrics = back.run(2, "2", done.folder / layout / "1")
    assert metrics["loss"] == pytest.approx(done.first[layout]["metrics"][2]["loss"], rel=1e-5)
    distance = apart(back.out / "2", done.folder / layout / "2")
    assert all(distance[name] < CLOSE[name] for name in CLOSE), distance


@pytest.mark.parametrize("layout", EACH)
def test_ranks_fail_and_stop_together_and_go_on(done: Done, layout: str) -> None:
    first = done.first[layout]
    assert "FileNotFoundError" in first["lost"] and re.match(
        r"Cancelled\(['\"]cancelled (after 2 of 3 rows|before the)", first["stopped"]
    )
    last = len(done.others)
    assert first["elsewhere"] == f"RankError('rank {last}: OSError: no such mount')"
    for rank, other in enumerate(done.others, 1):
        elsewhere = first["elsewhere"] if rank < last else "OSError('no such mount')"
        assert other[layout] == [first["lost"], first["stopped"], elsewhere]


def test_nobody_waits_for_the_slowest_at_every_row(fast: Done) -> None:
    """Each look tells what was said at the one before it; the last one tells all."""
    first, (other,) = fast.first["looks"], [report["looks"] for report in fast.others]
    assert max(first["seconds"]) < 0.5, "the first rank waited for one that came 0.8 s later"
    assert first["said"] == other["said"] == [False, True] and first["now"] and other["now"]


def test_a_layout_that_no_model_has_is_refused() -> None:
    sizes = TrainerSpec(tensor_parallel=2, context_parallel=3, pipeline_parallel=2, expert_parallel=12)
    layout = Parallel.of(RunSpec(model="m", trainer=sizes))
    assert (
        layout == Parallel(tp=2, ep=12, pp=2, cp=3) and layout.world == sizes.processes == 24 and layout.replicas == 2
    )
    with pytest.raises(ValueError, match="one must divide the other"):
        Parallel.of(RunSpec(model="m", trainer=TrainerSpec(tensor_parallel=3, expert_parallel=2)))


@pytest.mark.parametrize(
    ("layout", "change", "error"),
    [
        (Parallel(tp=4), {}, "tensor_parallel=4 does not divide the model's 2 query groups"),
        (Parallel(ep=3), {}, "expert_parallel=3 does not divide the model's 8 experts"),
        (Parallel(tp=2), {"moe_intermediate_size": 15}, "tensor_parallel=2 does not divide the model's 15 channels of an"),
        (Parallel(ep=2), {"mlp_only_layers": [0, 1, 2, 3]}, "the model has no experts"),
        (Parallel(pp=3), {}, "pipeline_parallel=3 does not divide the model's 4 layers"),
        (Parallel(pp=2), {"tie_word_embeddings": True}, "first and last stage would share a weight"),
        (Parallel(pp=2), {"mlp_only_layers": [0, 1]}, "a stage would have no layer with experts"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_cut_so(layout: Parallel, change: dict[str, Any], error: str) -> None:
    with pytest.raises(UnsupportedModel, match=error):
        layout.check(plan_for(moe_rig.CONFIG | change))
    Parallel(tp=2, ep=2).check(plan_for(moe_rig.CONFIG))


def test_sizes_that_the_process_groups_lack_are_refused() -> None:
    moe_rig.policy()
    with pytest.raises(ValueError, match=r"tp=2.* the process groups have Parallel\(tp=1, ep=1"):
        moe_rig.policy(Parallel(tp=2))


def test_padding_sees_itself_and_is_not_seen() -> None:
    row = ROWS[2]
    size = len(row.tokens)
    tokens, positions, hidden_from = pad_row(row.tokens, row.positions, row.hidden_from, 4)
    assert len(tokens) == len(positions) == len(hidden_from) == 12 and size == 11
    assert torch.equal(tokens[:size], row.tokens) and torch.equal(hidden_from[:size, :size], row.hidden_from)
    assert hidden_from[:size, size:].all() and hidden_from[size:].sum() == 11 and not hidden_from[11, 11]
    assert pad_row(row.tokens, row.positions, row.hidden_from, 1)[0] is row.tokens
