"""Submit the rollouts of `tests.house.same`: a tree's own interpreter runs this script, which imports only `artd_client` of artd.

`python feed.py make|next CASE DATA MODEL`: `make` trains steps 1 and 2 and sends what waits for step 3; `next` sends the rest of
step 3 and waits for it. It prints one JSON line: what the daemon tells the client of each step, and
which groups wait at the end of `make`. A trajectory depends on its case, step, group and sample alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from artd_client import Client, Run, Turn, turn

VOCAB, LAYERS, EXPERTS, TOPK = 1000, 3, 8, 2
GROUPS, SAMPLES = 2, 4
PROMPT, ANSWER = 8, 6
COMMITTED, NEXT = 2, 3
LARGE = 70_000
"""Bytes: the daemon stores a body or metadata of this size in a file of its own."""
COMMON: dict[str, Any] = {
    "group_size": SAMPLES, "groups_per_step": GROUPS, "group_timeout_s": 86400.0, "row_length": 256, "keep_checkpoints": 9,
    "threads": 1, "seed": 7, "engine": {"max_model_len": 128},
}  # fmt: skip
SPECS: dict[str, dict[str, Any]] = {
    "dense": {"parameters": "lora", "lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 1e-2}},
    "moe": {"parameters": "full", "expert_replay": True, "optimizer": {"lr": 1e-3}},
}
WAITING = {"dense": 6, "moe": 0}
"""Number of trajectories of step 3 that `make` submits: a sealed group and an open one, or none."""


def routes(numbers: random.Random, tokens: int) -> list[list[list[int]]]:
    """Return ids [tokens][layers][topk]: random experts, distinct within a layer."""
    return [[numbers.sample(range(EXPERTS), TOPK) for _ in range(LAYERS)] for _ in range(tokens)]


def make_turn(case: str, step: int, group: int, sample: int) -> Turn:
    """Return one answer. Samples of a group share their prompt, and the experts of its tokens."""
    asked, answered = random.Random(f"{case}/{step}/{group}"), random.Random(f"{case}/{step}/{group}/{sample}")
    prompt = [asked.randrange(5, VOCAB) for _ in range(PROMPT)]
    ids = [answered.randrange(5, VOCAB) for _ in range(ANSWER)]
    logprobs = [-answered.uniform(1, 8) for _ in ids]
    chosen = routes(asked, PROMPT) + routes(answered, ANSWER - 1) if case == "moe" else b""
    return turn(
        prompt, ids, logprobs, routes=chosen, experts=EXPERTS if case == "moe" else 0,
        policy_epoch=[(0, step - 1)] if sample % 2 else [], finish_reason="length" if sample == 3 else "stop",
        raw=json.dumps("x" * LARGE).encode() if group == sample == 0 else b"",
    )  # fmt: skip


async def submit(run: Run, case: str, step: int, numbers: range) -> None:
    """Submit trajectories of a step by their numbers, one after the other: ids follow the order."""
    for number in numbers:
        group, sample = divmod(number, SAMPLES)
        await run.submit(
            f"{step}-{group}", sample / 2 + group, turns=[make_turn(case, step, group, sample)], key=f"{step}-{number}",
            metrics={"sample": float(sample)}, metadata={"note": "y" * LARGE if number == 1 else f"{case} {number}"},
        )  # fmt: skip


async def train(run: Run, case: str, step: int, waiting: int = 0) -> dict[str, Any]:
    """Submit the rest of a step and wait for it. Returns what the daemon says of it."""
    await run.submit(f"eval-{step}", 0.5, turns=[make_turn(case, step, 9, 9)], key=f"eval-{step}", split="eval")
    await submit(run, case, step, range(waiting, GROUPS * SAMPLES))
    info = await run.wait(step, timeout=300)
    return {"step": info.step, "checkpoint": info.checkpoint, "metrics": info.metrics}


async def main(act: str, case: str, data: str, model: str) -> None:
    async with Client(data_dir=data) as art:
        if act == "make":
            run = await art.run(case, model=model, **COMMON | SPECS[case])
            await run.wait(0, timeout=300)
            told = [await train(run, case, step) for step in range(1, COMMITTED + 1)]
            await submit(run, case, NEXT, range(WAITING[case]))
            told.append({"waiting": {row["name"]: row["state"] for row in await run.groups(["open", "sealed"])}})
        else:
            told = [await train(await art.run(case), case, NEXT, WAITING[case])]
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
