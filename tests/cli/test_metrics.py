"""`artctl metrics` and `artctl diff`; `artctl logs` of all files by time; `artctl groups`, `batches`, and listings by split."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from artd.cli import log_times
from tests.cli.conftest import Call
from tests.cli.rows import SPEC, Made


@pytest.fixture
def curve(data: Path, frozen: None) -> Made:
    """Run toy with steps 0 to 3, the last of which a rollback left and trained again; run other with one step."""
    made = Made(data)
    other = made.run("other", "finished", 1, spec=SPEC | {"seed": 7})
    run = made.run(step=2)
    for owner, step, lineage, loss, left in (
        (other, 1, 0, 0.5, 0),
        (run, 1, 0, 0.25, 0),
        (run, 2, 0, 0.9, 1),
        (run, 2, 1, 0.125, 0),
    ):
        found = {"loss": loss, "reward_mean": step / 4, "own": 1.0}
        job = made.job(
            owner,
            "train",
            step,
            "succeeded",
            batch_id=_batch(made, owner, step, lineage),
            metrics=found,
            seconds={"train": 2.0},
        )
        folder = f"checkpoints/x/{owner}-l{lineage}-s{step}"
        given = {"lineage": lineage, "abandoned": left, "epoch": 10 * lineage + step, "dir": folder, "sha": "5" * 64}
        made.row(
            "checkpoint", run_id=owner, step=step, job_id=job, state="committed", bytes=1, created=1000 + step, **given
        )
    return made


def _batch(made: Made, run: int, step: int, lineage: int) -> int:
    sha = made.blob(f"{run}{lineage}{step}".zfill(64))
    sizes = {"trajectories": 8, "tokens": 100, "fill": 0.98, "created": 1}
    return made.row("batch", run_id=run, step=step, state="trained", tensors=sha, manifest=sha, **sizes)


def test_metrics_of_the_present_chain(curve: Made, artctl: Call) -> None:
    code, out, _ = artctl("metrics")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["step", "2", "1"]
    assert out.splitlines()[0].split() == ["step", "committed", "reward_mean", "loss"]
    assert out.splitlines()[1].split()[-2:] == ["0.5", "0.125"]
    assert artctl("metrics", "-m", "own", "-n", "1")[1].splitlines()[1].split()[-1] == "1"
    assert artctl("metrics", "--csv")[1].splitlines()[1:] == ["1,1,1001,0.25,1.0,0.25", "2,12,1002,0.125,1.0,0.5"]
    steps = json.loads(artctl("metrics", "--json")[1])["steps"]
    assert [(row["step"], row["epoch"], row["metrics"]["loss"]) for row in steps] == [(2, 12, 0.125), (1, 1, 0.25)]
    assert "own" in artctl("metrics", "--all")[1]
    code, _, err = artctl("metrics", "other", "-m", "los")
    assert code == 5 and "run other has no metric 'los' (did you mean loss?)" in err
    assert artctl("metrics", "nope")[0] == 5


def test_two_steps_side_by_side(curve: Made, artctl: Call) -> None:
    rows = {line.split()[0]: line.split()[1:] for line in artctl("diff", "1", "2")[1].splitlines()}
    assert rows["metric"] == ["toy@1", "toy@2", "change"]
    assert rows["loss"] == ["0.25", "0.125", "-0.125", "(-50%)"] and rows["own"] == ["1", "1"]
    told = json.loads(artctl("diff", "other@1", "1", "--json")[1])
    assert (told["first"], told["second"]) == ("other@1", "toy@1")
    assert told["spec"] == [{"name": "seed", "first": 7, "second": None}]
    assert {"name": "seconds.train", "first": 2.0, "second": 2.0} in told["metrics"]
    assert artctl("diff", "1", "9")[0] == 5 and artctl("diff", "1", "x")[0] == 2


def test_groups_batches_and_splits(made: Made, artctl: Call) -> None:
    groups = json.loads(artctl("groups", "--state", "open", "--json")[1])["groups"]
    assert [row["name"] for row in groups] == ["held", "g4"]
    assert [row["step"] for row in json.loads(artctl("batches", "--json")[1])["batches"]] == [3, 2]
    assert "98.0%" in artctl("batches")[1]

    def ids(*words: str) -> list[int]:
        return [row["id"] for row in json.loads(artctl("trajectories", *words, "--json")[1])["trajectories"]]

    assert ids("--split", "eval") == [4] == ids("--split", "eval", "--run", "toy", "--group", "held")
    assert ids("--split", "train", "--state", "discarded") == [3] and ids("--split", "train", "--group", "held") == []


# ---- logs -----------------------------------------------------------------------------------------------------------------

LOGS = {
    "daemon": "2026-01-02T03:04:05.000Z INFO artd a\n2026-01-02T03:04:09.000Z INFO artd d\n",
    "trainer-2": "no time yet\n2026-01-02 03:04:06,500 INFO x: b\n  and more of it\n",
    "engine-2-0-server": "(EngineCore) INFO 01-02 03:04:07 [core.py:1] c\n",
}


@pytest.fixture
def logged(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(log_times.time, "localtime", lambda: time.gmtime(1_767_323_045))
    (made.data / "logs").mkdir()
    for name, text in LOGS.items():
        (made.data / "logs" / f"{name}.log").write_text(text)
    return made


def test_all_logs_by_time(logged: Made, artctl: Call) -> None:
    code, out, _ = artctl("logs")
    assert code == 0 and [(line.partition("|")[0].strip(), line[-1]) for line in out.splitlines()] == [
        ("daemon", "a"), ("trainer", "t"), ("trainer", "b"), ("trainer", "t"), ("server", "c"), ("daemon", "d"),
    ]  # fmt: skip
    assert [line[-1] for line in artctl("logs", "-n", "2")[1].splitlines()] == ["c", "d"]
    assert artctl("logs", "-n", "0")[1] == ""


def test_logs_since(logged: Made, artctl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    out = artctl("logs", "--since", "2026-01-02T03:04:06Z", "--json")[1]
    assert [row["line"][-1] for row in json.loads(out)["lines"]] == ["t", "b", "t", "c", "d"]
    monkeypatch.setattr(log_times.time, "time", lambda: 1_767_323_050.0)
    assert [line[-1] for line in artctl("logs", "daemon", "--since", "3s")[1].splitlines()] == ["d"]
    code, _, err = artctl("logs", "--since", "yesterday")
    assert code == 2 and "'yesterday' is not a time" in err


def test_a_text_that_only_looks_like_a_time() -> None:
    assert log_times.time_of("2026-02-31T00:00:00Z", 2026) is None
    assert log_times.times_of(["x", "y"]) == [0.0, 0.0]
