"""What bf16 merging serves, on 4 layers of the real shape: `python -m tools.gpu.merge_loss [--items lr1e-5,lr1e-4] [--out DIR]`.

Purpose: at steps 1, 3 and 10 of an adapter trained in bf16 from its start (B = 0), the three `merge_*` figures of
`trainer.merge_loss` on the canary's prompts and on a row of the batch; beside them the KL with all arithmetic in fp32, which
has no floor of rounded activations, and the whole update's own KL(adapter || base), to compare. One JSON line each, appended
to DIR/merge_loss.jsonl. `--tiny`: on a CPU, in small.
Needs Megatron-Core, and on a GPU Transformer Engine. Weights are random: N(0, 0.02), as most models begin.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tools.gpu import lines  # first: it sets the environment

import torch  # isort: skip

from artd_schema.run.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.checkpoint import canary, merge_loss
from artd_workers.trainer.checkpoint.canary import Row
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.step.step import Optimizer, train_step
from tools.gpu import rows
from tools.gpu.policies import made, on, settle

STEPS = (1, 3, 10)
ASKED = 512
"""Trained tokens of a batch's row that the KL is taken over."""


@lru_cache(1)
def policies(tiny: bool) -> tuple[Policy, Policy]:
    """The one that is trained, and its weights in fp32."""
    layers = 2 if tiny else 4
    return made(layers, tiny, on(tiny))[0], made(layers, tiny, on(tiny, dtype=torch.float32))[0]


def loss_at(lr: float) -> lines.Item:
    def item(tiny: bool) -> Iterator[dict[str, Any]]:
        policy, exact = policies(tiny)
        assert policy.lora is not None and exact.lora is not None
        policy.lora.initialise(1)
        optimizer = Optimizer.make(policy.lora, OptimizerSpec(lr=lr))
        for step in range(1, STEPS[-1] + 1):
            batch = drawn(policy, tiny, step)
            metrics = train_step(policy, optimizer, batch, LossSpec(), step - 1)
            if step in STEPS:
                exact.lora.load({name: tensor.cpu() for name, tensor in policy.lora.state().items()})
                yield {"what": "served in bf16", "lr": lr, "step": step} | figures(policy, exact, batch, tiny) | {
                    name: metrics[name] for name in ("loss", "grad_norm")
                }  # fmt: skip

    return item


def drawn(policy: Policy, tiny: bool, step: int) -> Batch:
    """A prompt with 8 answers, other ones at each step."""
    size = 48 if tiny else 512
    return rows.packed(1, 8, size, size, 9 * size + 8, policy.plan.vocab_size, seed=step)


def figures(policy: Policy, exact: Policy, batch: Batch, tiny: bool) -> dict[str, Any]:
    asked, first = canary.row(policy.plan), batch.rows[0]
    trained = Row(first.tokens, first.positions, first.until, first.at[:ASKED])
    settle(tiny)
    started = time.perf_counter()
    found: dict[str, Any] = merge_loss.measure(policy, torch.bfloat16, asked)
    settle(tiny)
    found["seconds"] = time.perf_counter() - started
    for name, one, row in (
        ("batch", policy, trained), ("fp32", exact, asked), ("fp32_batch", exact, trained)
    ):  # fmt: skip
        found[f"merge_kl_{name}"] = merge_loss.measure(one, torch.bfloat16, row)["merge_kl"]
    return found | update(exact, {"fp32": asked, "fp32_batch": trained})


@torch.no_grad()
def update(policy: Policy, asked: dict[str, Row]) -> dict[str, float]:
    """KL(adapter || base): what there was to be served. The adapter is zero afterwards."""
    assert policy.lora is not None
    with_it = {name: merge_loss.logprobs(policy, row) for name, row in asked.items()}
    policy.lora.load({name: torch.zeros(tensor.shape) for name, tensor in policy.lora.state().items()})
    return {
        f"update_kl_{name}": merge_loss.divergence(with_it[name], merge_loss.logprobs(policy, row))
        for name, row in asked.items()
    }


ITEMS = {"lr1e-5": loss_at(1e-5), "lr1e-4": loss_at(1e-4)}

if __name__ == "__main__":
    sys.exit(lines.main("merge_loss", ITEMS))
