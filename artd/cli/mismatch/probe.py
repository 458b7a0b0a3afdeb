"""Samples a served step through the gateway, with the engine's top ids and the experts of each token.

Requests carry `x-artd-split: eval`, so nothing of them is trained. Temperature is 1, with a seed. An answer that lacks a
requested part is an error.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from artd.cli.outcome import CONFLICT, FAILED, CliError
from artd_schema.codec import UNREADABLE
from artd_schema.data.trajectory import RouteShape

from .metrics import Array

Prompt = str | list[int]
ROUNDS = 64
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Plan:
    """What to sample. `model`: RUN@STEP; `samples`: answers to one prompt in one round; `tokens`: rounds go on until there are
    as many.

    `top`: likeliest ids per token; `routes`: their shape, None = do not request them; `floor`: the value that the engine gives
    for -inf.
    """

    model: str
    prompts: Sequence[Prompt]
    samples: int
    tokens: int
    max_tokens: int
    seed: int
    top: int
    routes: RouteShape | None
    floor: float


@dataclass(frozen=True)
class Sample:
    """One answer: C sampled tokens after a prompt of P tokens.

    `logprobs` [C]; `top_ids`, `top_logprobs` [C, K], best first; `routes` [P + C - 1, layers, topk] or None.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: Array
    top_ids: Array
    top_logprobs: Array
    routes: Array | None


def generate(data: Path, plan: Plan) -> list[Sample]:
    """Return samples with at least `plan.tokens` tokens in total. Raises CliError."""
    gateway = _gateway(data)
    return asyncio.run(_generate(gateway["url"], gateway["token"], plan))


def _gateway(data: Path) -> dict[str, str]:
    path = data / "gateway.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, *UNREADABLE) as error:
        raise CliError(FAILED, f"{path} cannot be read: {error}", "artctl status") from None


async def _generate(url: str, token: str, plan: Plan) -> list[Sample]:
    headers = {"authorization": f"Bearer {token}", "x-artd-split": "eval"}
    samples: list[Sample] = []
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as http:
        for number in range(ROUNDS):
            asked = [_ask(http, plan, prompt, number) for prompt in plan.prompts]
            for answer in await asyncio.gather(*asked):
                samples += answer
            if sum(len(sample.tokens) for sample in samples) >= plan.tokens:
                return samples
    found = sum(len(sample.tokens) for sample in samples)
    raise CliError(FAILED, f"{len(samples)} answers gave {found} tokens only", "other --prompts, or fewer --tokens")


async def _ask(http: httpx.AsyncClient, plan: Plan, prompt: Prompt, number: int) -> list[Sample]:
    body = {
        "model": plan.model, "prompt": prompt, "n": plan.samples, "seed": plan.seed + 1_000_003 * number,
        "max_tokens": plan.max_tokens, "temperature": 1.0,
        # An engine may count the sampled token among them, however unlikely it was.
        "logprobs": plan.top + 1, "return_token_ids": True,
    }  # fmt: skip
    try:
        response = await http.post("/v1/completions", json=body)
        answer = msgspec.json.decode(response.content)
    except (httpx.TransportError, *UNREADABLE) as error:
        raise CliError(
            FAILED, f"the gateway gave no answer: {error or type(error).__name__}", "artctl status"
        ) from None
    if response.status_code != 200:
        raise _refusal(plan.model, response.status_code, answer)
    try:
        return [_sample(plan, choice) for choice in answer["choices"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CliError(FAILED, f"the gateway's answer cannot be used: {error!r}", "artctl logs gateway") from None


def _refusal(model: str, status: int, answer: Any) -> CliError:
    error = answer.get("error", {}) if isinstance(answer, dict) else {}
    told = f"the gateway refused the probe of {model} ({status}): {error.get('message', answer)}"
    if error.get("code") == "model_not_found":
        return CliError(CONFLICT, told, "probe the step that is served: artctl mismatch RUN")
    return CliError(FAILED, told, "artctl logs gateway")


def _sample(plan: Plan, choice: dict[str, Any]) -> Sample:
    """Read a choice. Raises KeyError, TypeError or ValueError that names what is missing."""
    prompt, tokens = choice["prompt_token_ids"], choice["generation_token_ids"]
    logprobs, tops = choice["generation_log_probs"], choice["generation_top_log_probs"]
    if not len(tokens) == len(logprobs) == len(tops):
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} logprobs and {len(tops)} lists of top ids")
    best = [_best(top, plan) for top in tops]
    routes = None
    if plan.routes is not None:
        if choice.get("routed_experts_start"):
            raise ValueError(f"routes begin at token {choice['routed_experts_start']}")
        routes = _routes(choice["routed_experts"], len(prompt) + len(tokens) - 1, plan.routes)
    return Sample(
        prompt, tokens, np.asarray(logprobs, np.float64), np.asarray([[i for i, _ in top] for top in best], np.int64),
        np.asarray([[value for _, value in top] for top in best], np.float64), routes,
    )  # fmt: skip


def _best(told: list[tuple[int, float]], plan: Plan) -> list[tuple[int, float]]:
    """Return the `plan.top` likeliest (id, logprob) pairs; of equal ones, those that the engine named first."""
    pairs = {number: value for number, value in told if value > plan.floor}
    best = sorted(pairs.items(), key=lambda pair: -pair[1])[: plan.top]
    if len(best) < plan.top:
        raise ValueError(f"{len(best)} top ids instead of {plan.top}")
    return best


def _routes(encoded: str, rows: int, shape: RouteShape) -> Array:
    found = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    if found.shape[1:] != (shape.layers, shape.topk) or found.shape[0] not in (rows, rows + 1):
        raise ValueError(f"routes {found.shape} instead of {(rows, shape.layers, shape.topk)}")
    return np.asarray(found[:rows])
