"""What the examples share: a daemon of their own, the training loop with its progress, report, picture and verdict."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artd.runtimes.registry import RuntimeMissing
from artd_client import ArtdError, Stalled
from artd_schema.paths import data_home

BIN = Path(sys.executable).parent


@dataclass
class Evaluation:
    """Rewards of samples on held-out prompts."""

    samples: list[tuple[str, str, float]] = field(default_factory=list)

    def add(self, prompt: str, answer: str, reward: float) -> None:
        self.samples.append((prompt, answer, reward))

    @property
    def mean(self) -> float:
        return statistics.fmean(reward for _, _, reward in self.samples)

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval of the mean (normal approximation)."""
        return 1.96 * statistics.stdev(reward for _, _, reward in self.samples) / math.sqrt(len(self.samples))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half_width:.3f} ({len(self.samples)} samples)"


@dataclass
class Outcome:
    """What was seen. rewards: per step, per group, per sample; first: step that the first of them is; sampled: groups of earlier demos; example: the newest prompt,
    answer and reward."""

    before: Evaluation
    first: int = 1
    sampled: int = 0
    example: tuple[str, str, float] | None = None
    after: Evaluation | None = None
    steps: list[Any] = field(default_factory=list)
    rewards: list[list[list[float]]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    learning: float = field(default_factory=time.monotonic)

    def add(self, step: Any, rewards: list[list[float]]) -> None:
        self.steps.append(step)
        self.rewards.append(rewards)

    def curve(self) -> list[float]:
        return [statistics.fmean(value for group in step for value in group) for step in self.rewards]

    def varied(self, steps: int) -> float:
        """Share of groups with variance in the first steps."""
        groups = [group for step in self.rewards[:steps] for group in step]
        return sum(max(group) > min(group) for group in groups) / len(groups)

    def mismatch(self) -> tuple[float, float, int]:
        """(MAE, max, tokens) of |trainer's - engine's logprob| over every token that the step's own policy sampled."""
        tokens = [int(step.metrics["mismatch_tokens"]) for step in self.steps]
        weighted = sum(step.metrics["mismatch_mae"] * n for step, n in zip(self.steps, tokens, strict=True))
        return weighted / sum(tokens), max(step.metrics["mismatch_max"] for step in self.steps), sum(tokens)


@contextlib.asynccontextmanager
async def daemon(args: argparse.Namespace) -> AsyncIterator[str]:
    """`artd start --detach` on a data folder of this demo's own, which stays, and `artd stop --drain 0` at the end, whatever happens.

    The user's ~/.config/artd/artd.toml (interpreters, GPUs, a port) is another daemon's: neither this one reads it nor what the
    demo calls meanwhile (`artctl mismatch`). A file that $ARTD_CONFIG names counts.
    """
    os.environ.setdefault("ARTD_CONFIG", os.devnull)
    folder = _folder(args)
    print(f"starting the daemon on {folder}", flush=True)
    start = await asyncio.create_subprocess_exec(str(BIN / "artd"), "start", "--detach", "--data-dir", folder)
    try:
        if await start.wait():
            raise SystemExit(1)
        yield folder
    finally:
        _stop(folder)


def _folder(args: argparse.Namespace) -> str:
    """The data folder; with --fresh an older demo's is deleted first."""
    folder = args.data_dir or str(data_home() / "artd" / "demo" / f"{Path(sys.argv[0]).stem}-{args.seed}")
    if getattr(args, "fresh", False) and Path(folder).exists():
        if args.data_dir:
            raise SystemExit(f"error: --fresh deletes the demo's own folder only. Next: delete {folder} yourself")
        _stop(folder)
        shutil.rmtree(folder)
    return folder


def _stop(folder: str) -> None:
    """Blocking on purpose: a second Ctrl-C must not leave the daemon behind."""
    subprocess.run([str(BIN / "artd"), "stop", "--drain", "0", "--data-dir", folder], check=False)


def hints(run: str, folder: str) -> None:
    """What to try on the run that the demo leaves."""
    where = f"--data-dir {shlex.quote(folder)}"
    print("\nthe run is kept, and the same demo goes on with it (--fresh starts anew). Try on it:")
    for command, what in (
        (f"artctl jobs {where}", "its steps with loss and reward"),
        (f"artctl export {run} ./{run}-adapter {where}", "the trained adapter as a PEFT folder"),
        (f"artd start --detach {where}", "serve it; then `artctl status` names the OpenAI endpoint"),
    ):
        print(f"  {BIN / command}\n      # {what}")


def guard(main: Callable[[argparse.Namespace], Awaitable[int]], args: argparse.Namespace) -> int:
    """Run, with Ctrl-C and SIGTERM ending it in order: exit 130 with the daemon stopped. What artd refuses is one line."""

    async def run() -> int:
        task = asyncio.ensure_future(main(args))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        print("interrupted", file=sys.stderr)
        return 130
    except (ArtdError, RuntimeMissing) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


# ---- training -------------------------------------------------------------------------------------------------------


async def learn(
    run: Any,
    steps: int,
    groups: Callable[[int], Awaitable[list[list[float]]]],
    outcome: Outcome,
    goal: float = math.inf,
) -> None:
    """Train for `steps` more, or until a step's mean reward is `goal`. groups(count): sample and submit the groups from the
    count-th on; gives each group's rewards."""
    count = outcome.sampled
    for number in range(outcome.first, outcome.first + steps):
        rewards: list[list[float]] = []
        while True:
            fresh = await groups(count)
            count += len(fresh)
            rewards += fresh
            try:
                step = await run.wait(number)
                break
            except Stalled as stalled:  # too few groups had any variance: take further ones
                print(
                    f"      {stalled.trainable} of {stalled.needed} groups can be trained; taking further ones",
                    flush=True,
                )
        outcome.add(step, rewards)
        show_step(outcome, steps)
        if outcome.curve()[-1] >= goal:
            break


def show_start(before: Evaluation) -> None:
    print(f"held-out reward before: {before}")
    print("step  reward  groups with variance  loss      elapsed", flush=True)


def show_step(outcome: Outcome, steps: int) -> None:
    step, groups = outcome.steps[-1], outcome.rewards[-1]
    varied = sum(max(group) > min(group) for group in groups)
    print(
        f"{step.step:4d}  {outcome.curve()[-1]:.3f}   {varied:2d}/{len(groups):<2d}                 {step.metrics['loss']:+.4f}"
        f"   {time.monotonic() - outcome.started:6.1f} s",
        flush=True,
    )
    done = len(outcome.steps)
    if done < steps:
        left = (time.monotonic() - outcome.learning) / done * (steps - done)
        print(f"      {done} of {steps}, about {max(1, round(left / 60))} min left", end="")
        if outcome.example:
            prompt, answer, reward = outcome.example
            print(f"; {prompt} → {answer.strip()[:44]!r} ({reward:.2f})", end="")
        print(flush=True)


# ---- the end --------------------------------------------------------------------------------------------------------


def report(outcome: Outcome, mismatch: str, data_dir: str) -> None:
    """Samples, reward curve, the mismatch as the example tells it, `artctl status`."""
    assert outcome.after is not None
    print("\nsamples on held-out prompts (before → after)")
    pairs = list(zip(outcome.before.samples, outcome.after.samples, strict=True))
    for (prompt, old, _), (_, new, reward) in pairs[::16]:
        print(f"  {prompt:12s} {old.strip()[:44]!r:48s} → {new.strip()[:44]!r} ({reward:.2f})")
    print("\nreward per step")
    for number, value in enumerate(outcome.curve(), outcome.first):
        print(f"  {number:3d} {'█' * round(value * 60):60s} {value:.3f}")
    print(f"\n{mismatch}")
    print(f"\nheld-out reward before {outcome.before}\nheld-out reward after  {outcome.after}\n", flush=True)
    subprocess.run([str(BIN / "artctl"), "status", "--data-dir", data_dir], check=False)


def save(outcome: Outcome, folder: Path, title: str, further: dict[str, Any]) -> None:
    """result.json, with `further` in it, and reward.png."""
    assert outcome.after is not None
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "before": outcome.before.mean, "after": outcome.after.mean, "before_95": outcome.before.half_width,
        "after_95": outcome.after.half_width, "curve": outcome.curve(), **further,
        "groups_with_variance": outcome.varied(4), "seconds": time.monotonic() - outcome.started,
        "steps": [{"step": s.step, "metrics": s.metrics, "seconds": s.seconds} for s in outcome.steps],
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    steps = range(outcome.first, outcome.first + len(outcome.curve()))
    axes.plot(steps, outcome.curve(), marker="o", label="training prompts")
    axes.errorbar([outcome.first - 1, steps[-1]], [outcome.before.mean, outcome.after.mean],
                  yerr=[outcome.before.half_width, outcome.after.half_width], fmt="s", label="held-out prompts")  # fmt: skip
    axes.set(xlabel="step", ylabel="mean reward", title=title, ylim=(0, 1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "reward.png", dpi=120)
    print(f"saved {folder / 'reward.png'} and {folder / 'result.json'}")


def verdict(gates: dict[str, bool]) -> int:
    """Print what held; the exit code."""
    for name, held in gates.items():
        print(f"{'ok    ' if held else 'FAILED'} {name}")
    return 0 if all(gates.values()) else 1
