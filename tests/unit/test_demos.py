"""What the examples decide by themselves: when training goes on and ends, and which gates an exit code stands for."""

from __future__ import annotations

import asyncio
import copy
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo
import moe

from artd import config
from artd_client import Stalled

PROBE = {
    "replay": {"tokens": 4096, "top_kl": 1e-5, "mae": 0.1, "mean_abs_pct": 1.0, "top1": 1.0, "top_overlap": 1.0},
    "live": {"tokens": 4096, "top_kl": 4e-5, "mae": 0.1, "mean_abs_pct": 1.0, "top1": 1.0, "top_overlap": 1.0},
}
PROBES: dict[str, dict[str, Any]] = {"before": PROBE, "after": PROBE}


def outcome(before: float = 0.5, after: float = 0.95) -> demo.Outcome:
    def evaluation(mean: float) -> demo.Evaluation:
        return demo.Evaluation([("p", "a", mean - 0.01), ("p", "a", mean + 0.01)])

    return demo.Outcome(before=evaluation(before), after=evaluation(after))


class Run:
    """Steps come when enough groups with variance were sampled."""

    def __init__(self, needed: int) -> None:
        self.needed, self.groups, self.step = needed, 0, 0

    async def wait(self, step: int) -> Any:
        if self.groups < self.needed:
            raise Stalled(step - 1, self.groups, self.groups, self.needed)
        self.groups, self.step = 0, step
        return SimpleNamespace(step=step, metrics={"loss": 0.0})


def learn(rewards: list[float], steps: int, **more: Any) -> tuple[demo.Outcome, list[int]]:
    run, counts, made = Run(2), [], outcome()

    async def groups(count: int) -> list[list[float]]:
        counts.append(count)
        run.groups += 1 if len(counts) == 1 else 2
        return [[rewards[len(counts) - 1]] * 2]

    asyncio.run(demo.learn(run, steps, groups, made, **more))
    return made, counts


def test_training_takes_further_groups_when_too_few_can_be_trained() -> None:
    made, counts = learn([0.1, 0.3, 0.5, 0.7], 3)
    assert [len(step) for step in made.rewards] == [2, 1, 1] and counts == [0, 1, 2, 3], "no group is sampled twice"
    assert made.curve() == pytest.approx([0.2, 0.5, 0.7])


def test_training_ends_at_its_goal() -> None:
    made, _ = learn([0.1, 0.1, 0.5, 0.9, 0.95, 1.0], 5, goal=0.9)
    assert made.curve() == pytest.approx([0.1, 0.5, 0.9])


def test_the_gates_hold() -> None:
    gates = moe.gates(outcome(), PROBES, moe.LEARNING_STEPS)
    assert all(gates.values()) and len(gates) == 6
    assert demo.verdict(gates) == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("name", "way", "value"), [("top_kl", "replay", 1.1e-5), ("tokens", "live", 3999)])
def test_a_probe_that_fails_a_gate_ends_with_1(when: str, name: str, way: str, value: float) -> None:
    probes = copy.deepcopy(PROBES)
    probes[when][way][name] = value
    for steps in (1, moe.LEARNING_STEPS):
        assert demo.verdict(moe.gates(outcome(), probes, steps)) == 1


def test_learning_is_asked_for_only_with_all_the_steps() -> None:
    assert demo.verdict(moe.gates(outcome(after=0.89), PROBES, moe.LEARNING_STEPS)) == 1
    assert demo.verdict(moe.gates(outcome(after=0.51), PROBES, 3)) == 0
    assert demo.verdict(moe.gates(outcome(before=0.7), PROBES, 3)) == 1


def test_the_table_has_every_number() -> None:
    lines = moe.table(PROBES).splitlines()
    assert len(lines) == 2 + len(moe.ROWS) and "4096 tokens before, 4096 tokens after" in lines[0]
    assert lines[-1].split() == ["top-20", "KL,", "nats", "1.00e-05", "4.00e-05", "1.00e-05", "4.00e-05"]


def test_held_out_prompts_are_never_trained_on() -> None:
    trained = {tuple(moe.prompt(0, "train", i)) for i in range(moe.LEARNING_STEPS * moe.GROUPS)}
    held_out = {tuple(moe.prompt(0, "held out", i)) for i in range(moe.HELD_OUT)}
    assert len(held_out) == moe.HELD_OUT and not trained & held_out
    assert all(0 <= token < moe.VOCABULARY for ids in trained for token in ids)


def test_the_reward_is_the_share_of_the_lower_half() -> None:
    half = moe.VOCABULARY // 2
    assert moe.reward([0, half - 1, half, moe.VOCABULARY - 1]) == 0.5


@pytest.mark.parametrize("named", [None, "/srv/artd.toml"])
def test_a_demo_s_daemon_reads_no_settings_but_those_that_are_named(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's artd.toml may name GPU interpreters, or the port of a daemon that runs."""
    monkeypatch.setenv("ARTD_CONFIG", named or "")
    if not named:
        del os.environ["ARTD_CONFIG"]
    (tmp_path / "artd").write_text(f'#!/bin/sh\necho "$1 ${{ARTD_CONFIG-none}}" >>{tmp_path}/calls\n')
    (tmp_path / "artd").chmod(0o700)
    monkeypatch.setattr(demo, "BIN", tmp_path)

    async def once() -> None:
        async with demo.daemon(SimpleNamespace(data_dir=str(tmp_path / "data"))):
            pass

    asyncio.run(once())
    read = named or os.devnull
    assert (tmp_path / "calls").read_text().splitlines() == [f"start {read}", f"stop {read}"]


def test_no_settings_are_settings() -> None:
    assert config.read(Path(os.devnull)) == config.Settings()


def test_a_second_demo_goes_on_and_fresh_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder stays, and is deleted only when asked and only the demo's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "argv", ["examples/capitals.py"])
    monkeypatch.setattr(demo, "BIN", tmp_path)
    (tmp_path / "artd").write_text("#!/bin/sh\n")
    (tmp_path / "artd").chmod(0o700)

    async def once(data_dir: str | None, fresh: bool) -> Path:
        async with demo.daemon(SimpleNamespace(data_dir=data_dir, seed=3, fresh=fresh)) as folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "kept").touch(exist_ok=True)
            return Path(folder)

    folder = asyncio.run(once(None, False))
    assert folder == tmp_path / "xdg" / "artd" / "demo" / "capitals-3" and (folder / "kept").exists()
    (folder / "older").touch()
    asyncio.run(once(None, False))
    assert (folder / "older").exists()
    asyncio.run(once(None, True))
    assert not (folder / "older").exists()
    with pytest.raises(SystemExit, match="delete .* yourself"):
        asyncio.run(once(str(folder), True))
    assert (folder / "kept").exists()


def test_training_goes_on_with_new_steps_and_new_groups() -> None:
    run, counts, made = Run(1), [], outcome()
    made.first, made.sampled = 4, 24

    async def groups(count: int) -> list[list[float]]:
        counts.append(count)
        run.groups += 1
        return [[0.5, 0.7]]

    asyncio.run(demo.learn(run, 2, groups, made))
    assert [step.step for step in made.steps] == [4, 5] and counts == [24, 25]


def test_the_demo_ends_with_three_commands_on_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    demo.hints("capitals", "/a b/data")
    said = capsys.readouterr().out
    assert said.count("--data-dir '/a b/data'") == 3 and "--fresh" in said
