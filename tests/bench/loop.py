"""Seconds per phase of a training step of the demo model, read from the event log: `python tests/bench/loop.py --json`.

Phases: generate and ingest by the client's clock; pack, dispatch, train, commit and push from the daemon's events. The daemon's
own share is the time in which nothing but the daemon or its packer works: ingest + pack + dispatch + commit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from artd_client import Client, Run, Stalled

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import bases  # noqa: E402
import capitals  # noqa: E402
import demo  # noqa: E402

from tests.bench.report import Report, parser  # noqa: E402

OWN = ("ingest", "pack", "dispatch", "commit")
GOALS = {"own_share": 0.03, "push": 2.5}


async def generate(run: Run, openai: Any, task: capitals.Task, count: int, seed: int) -> list[Any]:
    asked = [
        capitals.ask(openai, run.model, country, seed + index, capitals.SAMPLES, "train")
        for index, country in enumerate(task.groups(count), count)
    ]
    return list(zip(task.groups(count), await asyncio.gather(*asked), strict=True))


async def ingest(run: Run, count: int, answers: list[Any]) -> None:
    """Submit all at once; a reward that always varies, so that every step trains on the same amount."""
    submits = [
        run.submit(f"{count + index:05d}-{country}", float(choice.index), responses=[(response.id, choice.index)])
        for index, (country, response) in enumerate(answers)
        for choice in response.choices
    ]
    await asyncio.gather(*submits)


async def measure(art: Client, args: argparse.Namespace) -> list[dict[str, float]]:
    run = await art.run(
        "bench", model=args.model or bases.smollm2(), group_size=capitals.SAMPLES, groups_per_step=capitals.GROUPS,
        row_length=1024, optimizer={"lr": 1e-5}, engine={"max_model_len": 512},
    )  # fmt: skip
    await run.wait(0)
    openai, task, steps = run.openai(), capitals.Task(args.seed), []
    for number in range(1, args.steps + 1):
        started = time.perf_counter()
        answers = await generate(run, openai, task, number * capitals.GROUPS, number * 1000)
        generated = time.perf_counter()
        await ingest(run, number * capitals.GROUPS, answers)
        ingested = time.perf_counter()
        try:
            await run.wait(number)
        except Stalled as stalled:
            raise SystemExit(f"the step did not come: {stalled}") from None
        total = time.perf_counter() - started
        phases = await daemon_phases(art, number)
        steps.append({"generate": generated - started, "ingest": ingested - generated, **phases, "step": total})
    return steps


async def daemon_phases(art: Client, step: int) -> dict[str, float]:
    """Seconds between the events of one step, and what job and push report of themselves."""
    at: dict[str, int] = {}
    for row in reversed(await art.rows("events", run="bench", limit=400)):
        at[row["kind"]] = row["at"]
    job = next(row for row in await art.rows("jobs") if row["step"] == step and row["kind"] == "train")
    push = next(row for row in await art.rows("pushes") if row["step"] == step)
    commit = job["seconds"]["commit"]
    return {
        "pack": (at["batch.packed"] - at["group.sealed"]) / 1000,
        "dispatch": (at["job.claimed"] - at["batch.packed"]) / 1000,
        "train": (at["step.committed"] - at["job.claimed"]) / 1000 - commit,
        "commit": commit + (at["push.sending"] - at["step.committed"]) / 1000,
        "push": (at["push.live"] - at["push.sending"]) / 1000,
        **{f"push.{name}": seconds for name, seconds in push["seconds"].items()},
        **{f"train.{name}": s for name, s in job["seconds"].items() if name not in ("pack", "commit")},
    }


async def main(args: argparse.Namespace) -> int:
    answer = os.dup(1)
    os.dup2(2, 1)  # what daemon and demo say is talk; stdout is for the report alone
    async with demo.daemon(args) as data_dir, Client(data_dir=data_dir) as art:
        steps = (await measure(art, args))[1:]  # the first one has cold caches
    sys.stdout.flush()
    os.dup2(answer, 1)
    report = Report("one training step of the demo model")
    for name in steps[0]:
        report.add(name, statistics.median(step[name] for step in steps), "s", GOALS.get(name), "<=")
    shares = [sum(step[name] for name in OWN) / step["step"] for step in steps]
    report.add("own_share", statistics.median(shares), "of a step", GOALS["own_share"], "<=")
    return report.finish(args.json)


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--model")
    made.add_argument("--data-dir")
    sys.exit(asyncio.run(main(made.parse_args())))
