"""One optimizer step over a packed batch.

Purpose: forward and backward row by row, clip, AdamW. Owner of: the optimizer's moments (fp32, in adapter order).
Invariants: nothing is changed before every loss and gradient was found finite; the same batch, state and threads give the
same bits (one row at a time, in order; no fused or foreach kernels); a cancel is looked at between rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from artd_schema.spec import LossSpec, OptimizerSpec

from .losses import Measures, row_loss, shares
from .model import Policy
from .packed import Batch


class NonFinite(ArithmeticError):
    """A loss or gradient is NaN or infinite; nothing was changed."""


class Cancelled(Exception):
    """The daemon cancelled the job; nothing was changed."""


@dataclass
class Optimizer:
    """AdamW over the adapter's parameters."""

    spec: OptimizerSpec
    names: list[str]
    torch: torch.optim.AdamW

    @classmethod
    def make(cls, policy: Policy, spec: OptimizerSpec) -> Optimizer:
        """Fresh: no step taken."""
        assert policy.lora is not None, "the base model alone has nothing to train"
        names, parameters = zip(*policy.lora.named(), strict=True)
        # torch wants a tuple of floats and no decay of a zero kind: exactly the spec's numbers.
        adamw = torch.optim.AdamW(
            parameters, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, weight_decay=spec.weight_decay,
            foreach=False, fused=False,
        )  # fmt: skip
        return cls(spec, list(names), adamw)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.torch.param_groups[0]["params"])

    def state(self) -> dict[str, Tensor]:
        """Tensors `NAME.exp_avg`, `NAME.exp_avg_sq` (fp32) and `step` (int64 []); moments are zero before the first step."""
        out: dict[str, Tensor] = {}
        step = 0
        for name, parameter in zip(self.names, self.parameters, strict=True):
            moments = self.torch.state.get(parameter, {})
            step = int(moments["step"]) if moments else 0
            for key in ("exp_avg", "exp_avg_sq"):
                out[f"{name}.{key}"] = moments[key] if moments else torch.zeros_like(parameter)
        return out | {"step": torch.tensor(step, dtype=torch.int64)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Set the moments and the step count. Raises KeyError for a missing tensor."""
        step = float(state["step"])
        self.torch.state.clear()
        if step == 0:
            return
        for name, parameter in zip(self.names, self.parameters, strict=True):
            self.torch.state[parameter] = {
                "step": torch.tensor(step),
                "exp_avg": state[f"{name}.exp_avg"].clone(),
                "exp_avg_sq": state[f"{name}.exp_avg_sq"].clone(),
            }


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    loss: LossSpec,
    epoch: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Train on a batch; returns metrics. epoch: policy epoch of the weights as they are now.

    progress(done, total) is called after each row. Raises NonFinite and Cancelled, both before any weight changed.
    """
    started = time.perf_counter()
    parameters = optimizer.parameters
    measures, share, total = Measures(), shares(batch, loss.normalise), 0.0
    optimizer.torch.zero_grad(set_to_none=True)
    try:
        for index, row in enumerate(batch.rows):
            if cancelled():
                raise Cancelled(f"cancelled after {index} of {len(batch.rows)} rows")
            scores = policy.score(row.tokens, row.positions, row.hidden_from, row.at, row.targets, row.temperatures)
            part = row_loss(loss, row, scores.logprobs, share)
            if not torch.isfinite(part):
                raise NonFinite(
                    f"the loss of row {index} is {part.item()}: look at the batch's advantages and at the learning rate"
                )
            part.backward()
            total += part.item()
            measures.add(row, scores.logprobs, scores.entropy)
            progress(index + 1, len(batch.rows))
        norm = gradient_norm(parameters)
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient norm is {norm}: look at the batch's advantages and at the learning rate")
        if cancelled():
            raise Cancelled("cancelled before the optimizer's step")
        clip(parameters, norm, optimizer.spec.clip_grad_norm)
        optimizer.torch.step()
    finally:
        optimizer.torch.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - started
    rates = {"tokens_per_s": sum(len(row.tokens) for row in batch.rows) / seconds}
    return {"loss": total, "grad_norm": norm} | measures.metrics(loss.clip_high, epoch) | rates


def gradient_norm(parameters: list[nn.Parameter]) -> float:
    """Global 2-norm, each tensor's sum of squares in fp64, added up in parameter order."""
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


def clip(parameters: list[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients to a norm of at most `limit` (0 = no limit)."""
    if limit > 0 and norm > limit:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(limit / norm)
