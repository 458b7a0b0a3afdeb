"""Teach a small real model to answer in one word: RL with artd's public client, on a laptop.

    python examples/capitals.py [--steps 8] [--seed 0] [--model DIR]

A prompt asks for a capital; the reward asks for the right city in a short answer. The example trains on 24 countries and holds
out 16. To train on a reward of your own, change `PROMPT`, `CAPITALS` and `reward`; `gates` says what this example must reach.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import bases
import demo

from artd_client import Client

PROMPT = "What is the capital of {country}? Answer with the city name only."
CAPITALS = """
Sweden:Stockholm Tunisia:Tunis Syria:Damascus Russia:Moscow Japan:Tokyo Austria:Vienna China:Beijing
Netherlands:Amsterdam Hungary:Budapest France:Paris India:Delhi Azerbaijan:Baku Somalia:Mogadishu Sudan:Khartoum
Pakistan:Islamabad Thailand:Bangkok Iceland:Reykjavik Ireland:Dublin Estonia:Tallinn Greece:Athens Afghanistan:Kabul
Cuba:Havana Canada:Ottawa Italy:Rome Romania:Bucharest Germany:Berlin Australia:Canberra Kenya:Nairobi Senegal:Dakar
Philippines:Manila Bangladesh:Dhaka Denmark:Copenhagen Egypt:Cairo Lithuania:Vilnius Serbia:Belgrade
Jamaica:Kingston Finland:Helsinki Israel:Jerusalem Czechia:Prague Portugal:Lisbon
"""
COUNTRIES = dict(pair.split(":") for pair in CAPITALS.split())
HELD_OUT = 16
GROUPS, SAMPLES, MAX_TOKENS = 8, 8, 24
LEARNING_STEPS = 8
GAIN = 0.2
MAE_GATE, MAX_GATE, TOKENS_GATE = 2e-5, 3e-4, 1000


def reward(answer: str, city: str) -> float:
    """0 without the city; with it, 1 less a sixteenth for every further word, at least 0.1."""
    if city.lower() not in answer.lower():
        return 0.0
    return max(0.1, 1.0 - (len(answer.split()) - 1) / 16)


@dataclass
class Task:
    """Which countries are trained and which are held out; every choice follows from the seed."""

    seed: int

    def __post_init__(self) -> None:
        names = sorted(COUNTRIES)
        random.Random(self.seed).shuffle(names)
        self.held_out, self.train = names[:HELD_OUT], names[HELD_OUT:]

    def groups(self, count: int) -> list[str]:
        """The count-th group and the seven after it, going round over the training countries, shuffled each round."""
        return [self._country(index) for index in range(count, count + GROUPS)]

    def _country(self, index: int) -> str:
        order = list(self.train)
        random.Random(f"{self.seed}/{index // len(order)}").shuffle(order)
        return order[index % len(order)]


async def ask(openai, model: str, country: str, seed: int, n: int, split: str):
    """One request for n samples; the gateway writes down tokens, logprobs and the policy that made them."""
    return await openai.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT.format(country=country)}],
        n=n,
        seed=seed,
        temperature=1.0,
        max_tokens=MAX_TOKENS,
        extra_headers={"x-artd-split": split},
    )


async def rollout(run, openai, country: str, index: int, seed: int, outcome: demo.Outcome) -> list[float]:
    """One group: SAMPLES answers to one prompt, each submitted with its reward."""
    response = await ask(openai, run.model, country, seed * 1_000_003 + index * 101, SAMPLES, "train")
    rewards = [reward(choice.message.content or "", COUNTRIES[country]) for choice in response.choices]
    for choice, value in zip(response.choices, rewards, strict=True):
        await run.submit(f"{index:05d}-{country}", value, responses=[(response.id, choice.index)])
    outcome.example = (country, response.choices[0].message.content or "", rewards[0])
    return rewards


async def evaluate(run, openai, task: Task, seed: int) -> demo.Evaluation:
    """128 samples on countries that are never trained on."""
    asked = [ask(openai, run.model, country, seed + i, SAMPLES, "eval") for i, country in enumerate(task.held_out)]
    responses = await asyncio.gather(*asked)
    result = demo.Evaluation()
    for country, response in zip(task.held_out, responses, strict=True):
        for choice in response.choices:
            text = choice.message.content or ""
            result.add(country, text, reward(text, COUNTRIES[country]))
    return result


async def train(art: Client, args: argparse.Namespace) -> demo.Outcome:
    task = Task(args.seed)
    run = await art.run(
        "capitals", model=args.model, rollout_weights_mode="merged", seed=args.seed, group_size=SAMPLES,
        groups_per_step=GROUPS, row_length=1024, lora={"rank": 16, "alpha": 32},
        optimizer={"lr": 3e-4, "clip_grad_norm": 1.0}, engine={"dtype": "float32", "max_model_len": 512},
    )  # fmt: skip
    await run.wait(max(run.step, 0))
    openai = run.openai()
    before = await evaluate(run, openai, task, seed=10_000 + args.seed)
    sampled = len(await run.groups(limit=10_000))
    outcome = demo.Outcome(before, first=max(run.step, 0) + 1, sampled=sampled)
    demo.show_start(outcome.before)

    async def groups(count: int) -> list[list[float]]:
        batch = enumerate(task.groups(count), count)
        return await asyncio.gather(*(rollout(run, openai, country, i, args.seed, outcome) for i, country in batch))

    await demo.learn(run, args.steps, groups, outcome)
    outcome.after = await evaluate(run, openai, task, seed=10_000 + args.seed)
    return outcome


def gates(outcome: demo.Outcome, steps: int) -> dict[str, bool]:
    """What has to hold; the learning gates need 8 steps."""
    assert outcome.after is not None
    mae, largest, tokens = outcome.mismatch()
    out = {
        f"mismatch MAE {mae:.1e} <= {MAE_GATE:.0e}": mae <= MAE_GATE,
        f"mismatch max {largest:.1e} <= {MAX_GATE:.0e}": largest <= MAX_GATE,
        f"{tokens} generated tokens >= {TOKENS_GATE}": tokens >= TOKENS_GATE,
    }
    if outcome.first > 1:  # it went on: what the base could do was told the first time
        return out
    out |= {
        f"base reward {outcome.before.mean:.2f} in 0.05 .. 0.5": 0.05 <= outcome.before.mean <= 0.5,
    }
    if steps >= LEARNING_STEPS:
        before, after = outcome.before, outcome.after
        gain, varied = after.mean - before.mean, outcome.varied(4)
        out[f"groups with variance in the first four steps {varied:.0%} >= 60 %"] = varied >= 0.6
        out[f"held-out reward rose by {gain:.2f} >= {GAIN}"] = gain >= GAIN
        out["95 % intervals apart"] = after.mean - after.half_width > before.mean + before.half_width
    return out


async def main(args: argparse.Namespace) -> int:
    args.model = args.model or bases.smollm2()
    async with demo.daemon(args) as data_dir, Client(data_dir=data_dir) as art:
        outcome = await train(art, args)
        mae, largest, tokens = outcome.mismatch()
        told = "mismatch (unmerged trainer against merged engine, logprobs in nats)\n"
        told += f"  tokens {tokens}   MAE {mae:.2e} (gate {MAE_GATE:.0e})   max {largest:.2e} (gate {MAX_GATE:.0e})"
        demo.report(outcome, told, data_dir)
        measured = {"mismatch_mae": mae, "mismatch_max": largest, "tokens": tokens}
        demo.save(outcome, Path(args.out), "SmolLM2-135M: answer with the city only", measured)
    demo.hints("capitals", data_dir)
    return demo.verdict(gates(outcome, args.steps))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; default: SmolLM2-135M-Instruct, converted on first use")
    parser.add_argument("--steps", type=int, default=8, help="train steps (default: 8, about 40 s each on two cores)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the sampling and the adapter (default: 0)")
    parser.add_argument(
        "--data-dir", help="a folder of artd's or an empty one; default: ~/.local/share/artd/demo/capitals-SEED"
    )
    parser.add_argument("--fresh", action="store_true", help="start anew instead of going on where the last demo ended")
    parser.add_argument("--out", default="demo-out", help="where reward.png and result.json go")
    sys.exit(demo.guard(main, parser.parse_args()))
