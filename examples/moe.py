"""A mixture of experts learns, and is trained through the very experts that the engine chose.

    python examples/moe.py [--steps 24] [--seed 0] [--model DIR]

The model is a Qwen3-MoE of a million random parameters, all of them trained in fp32; the engine runs them in bf16, where
rounding alone sends many a token to another expert than the trainer would. The reward is the share of sampled ids in the
lower half of the vocabulary; training ends when it reaches 0.9. Before and after, `artctl mismatch` scores the same fresh
tokens with expert replay and without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

import bases
import demo

from artd_client import Client

VOCABULARY = 256
PROMPT_TOKENS, MAX_TOKENS = 8, 24
GROUPS, SAMPLES = 16, 16
HELD_OUT, HELD_OUT_SAMPLES = 16, 8
LEARNING_STEPS = 24
REWARD_GATE, TOKENS_GATE, KL_GATE = 0.9, 4000, 0.25
ROWS = {"mae": ("MAE, nats", ".5f"), "mean_abs_pct": ("mean_abs_pct, %", ".3f"), "top1": ("top-1 agreement", ".4f"),
        "top_overlap": ("top-20 overlap", ".4f"), "top_kl": ("top-20 KL, nats", ".2e")}  # fmt: skip


def prompt(seed: int, kind: str, index: int) -> list[int]:
    """Random ids: what matters is the answer, not the question."""
    chosen = random.Random(f"{seed}/{kind}/{index}")
    return [chosen.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]


def reward(token_ids: list[int]) -> float:
    """Share of the ids in the lower half of the vocabulary."""
    return sum(token < VOCABULARY // 2 for token in token_ids) / len(token_ids)


async def ask(openai, model: str, ids: list[int], n: int, seed: int, split: str):
    """n answers to one prompt. The gateway writes down tokens, logprobs, routed experts and the policy."""
    return await openai.completions.create(
        model=model,
        prompt=ids,
        n=n,
        seed=seed,
        temperature=1.0,
        max_tokens=MAX_TOKENS,
        extra_body={"return_token_ids": True},
        extra_headers={"x-artd-split": split},
    )


async def rollout(run, openai, index: int, seed: int) -> list[float]:
    """One group: SAMPLES answers to one prompt, each submitted with its reward."""
    ids = prompt(seed, "train", index)
    response = await ask(openai, run.model, ids, SAMPLES, seed * 1_000_003 + index * 101, "train")
    rewards = [reward(choice.generation_token_ids) for choice in response.choices]
    for choice, value in zip(response.choices, rewards, strict=True):
        await run.submit(f"{index:05d}", value, responses=[(response.id, choice.index)])
    return rewards


async def evaluate(run, openai, seed: int) -> demo.Evaluation:
    """128 samples on prompts that are never trained on."""
    prompts = enumerate(prompt(seed, "held out", i) for i in range(HELD_OUT))
    asked = [ask(openai, run.model, ids, HELD_OUT_SAMPLES, 10_000 + seed + i, "eval") for i, ids in prompts]
    result = demo.Evaluation()
    for number, response in enumerate(await asyncio.gather(*asked)):
        for choice in response.choices:
            result.add(f"prompt {number}", choice.text, reward(choice.generation_token_ids))
    return result


async def mismatch(run, step: int, seed: int, data_dir: str) -> dict[str, Any]:
    """`artctl mismatch` on the held-out prompts: scoring pass -> its numbers."""
    prompts = Path(data_dir) / "probe-prompts.jsonl"
    prompts.write_text("".join(f"{prompt(seed, 'held out', i)}\n" for i in range(HELD_OUT)))
    words = ["--prompts", str(prompts), "--max-tokens", str(MAX_TOKENS), "--seed", str(seed), "--data-dir", data_dir]
    probe = await asyncio.create_subprocess_exec(
        str(demo.BIN / "artctl"), "mismatch", f"{run.name}@{step}", "--json", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # of a Ctrl-C it hears from here alone
    )  # fmt: skip
    try:
        out, errors = await probe.communicate()
    except asyncio.CancelledError:
        probe.send_signal(signal.SIGINT)
        await probe.wait()
        raise
    if probe.returncode:
        raise SystemExit(f"artctl mismatch ended with {probe.returncode}:\n{errors.decode()}")
    return dict(json.loads(out)["passes"])


async def train(art: Client, args: argparse.Namespace, data_dir: str) -> tuple[demo.Outcome, dict[str, dict[str, Any]]]:
    """(what was learnt, mismatch before and after)."""
    run = await art.run(
        "moe", model=args.model, parameters="full", rollout_weights_mode="merged", expert_replay=True, seed=args.seed,
        group_size=SAMPLES, groups_per_step=GROUPS, row_length=512, optimizer={"lr": 2e-3, "clip_grad_norm": 1.0},
        engine={"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 256},
    )  # fmt: skip
    first = max(run.step, 0) + 1
    await run.wait(first - 1)
    openai = run.openai()
    sampled = len(await run.groups(limit=10_000))
    outcome = demo.Outcome(before=await evaluate(run, openai, args.seed), first=first, sampled=sampled)
    probes = {"before": await mismatch(run, first - 1, args.seed, data_dir)}
    demo.show_start(outcome.before)

    async def groups(count: int) -> list[list[float]]:
        return await asyncio.gather(*(rollout(run, openai, count + i, args.seed) for i in range(GROUPS)))

    await demo.learn(run, args.steps, groups, outcome, REWARD_GATE)
    outcome.after = await evaluate(run, openai, args.seed)
    probes["after"] = await mismatch(run, first - 1 + len(outcome.steps), args.seed, data_dir)
    return outcome, probes


def table(probes: dict[str, dict[str, Any]]) -> str:
    """The same fresh tokens, scored by the fp32 trainer with the engine's experts and with its own."""
    tokens = ", ".join(f"{probe['live']['tokens']} tokens {when}" for when, probe in probes.items())
    lines = [f"mismatch (fp32 trainer against bf16 engine, same sampled tokens: {tokens} training)"]
    heads = [f"{when}, replay {word}" for when in probes for word in ("on", "off")]
    lines.append("  " + " " * 18 + "".join(f"{head:>20s}" for head in heads))
    for key, (label, form) in ROWS.items():
        values = [probe[name][key] for probe in probes.values() for name in ("replay", "live")]
        lines.append(f"  {label:18s}" + "".join(f"{value:>20{form}}" for value in values))
    return "\n".join(lines)


def gates(outcome: demo.Outcome, probes: dict[str, dict[str, Any]], steps: int) -> dict[str, bool]:
    """What has to hold; that it has learnt, only if it was given the 24 steps that this may take."""
    assert outcome.after is not None
    out: dict[str, bool] = {}
    for when, probe in probes.items():
        on, off, tokens = probe["replay"]["top_kl"], probe["live"]["top_kl"], probe["live"]["tokens"]
        out[f"{when} training: {tokens} probe tokens >= {TOKENS_GATE}"] = tokens >= TOKENS_GATE
        share = f"{on / off:.3f}" if off else "-"
        out[f"{when} training: top-20 KL with replay is {share} of without, at most {KL_GATE}"] = on <= off * KL_GATE
    if outcome.first == 1:
        out[f"reward before {outcome.before.mean:.2f} in 0.4 .. 0.6"] = 0.4 <= outcome.before.mean <= 0.6
    if steps >= LEARNING_STEPS:
        after = outcome.after.mean
        out[f"held-out reward after {after:.3f} >= {REWARD_GATE}"] = after >= REWARD_GATE
    return out


async def main(args: argparse.Namespace) -> int:
    args.model = args.model or bases.random_moe(args.seed)
    async with demo.daemon(args) as data_dir, Client(data_dir=data_dir) as art:
        outcome, probes = await train(art, args, data_dir)
        demo.report(outcome, table(probes), data_dir)
        demo.save(outcome, Path(args.out), "A random Qwen3-MoE: ids of the lower half", {"mismatch": probes})
    demo.hints("moe", data_dir)
    return demo.verdict(gates(outcome, probes, args.steps))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="Hugging Face folder of 256 ids; default: a random Qwen3-MoE, made on first use"
    )
    parser.add_argument("--steps", type=int, default=LEARNING_STEPS, help="at most (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the sampling (default: 0)")
    parser.add_argument(
        "--data-dir", help="a folder of artd's or an empty one; default: ~/.local/share/artd/demo/moe-SEED"
    )
    parser.add_argument("--fresh", action="store_true", help="start anew instead of going on where the last demo ended")
    parser.add_argument("--out", default="demo-out/moe", help="where reward.png and result.json go")
    sys.exit(demo.guard(main, parser.parse_args()))
