"""One optimizer step over a packed batch.

Purpose: forward and backward row by row, clip, AdamW. Owner of: the optimizer's moments (fp32, one pair a parameter).
Invariants: nothing is changed before every loss and gradient was found finite; the same batch, state and threads give the
same bits (one row at a time, in order; no fused or foreach kernels); a cancel is looked at between rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from artd_schema.spec import LossSpec, OptimizerSpec

from .losses import Measures, row_loss, shares
from .model import Policy
from .packed import Batch, PackedRow

MOMENTS = ("exp_avg", "exp_avg_sq")


class NonFinite(ArithmeticError):
    """A loss or gradient is NaN or infinite; nothing was changed."""


class Cancelled(Exception):
    """The daemon cancelled the job; nothing was changed."""


class ParameterSet(Protocol):
    """Parameters that an optimizer works on, and their names and layout on disk."""

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(own name, parameter), in the order in which gradients are added up."""
        ...

    def outward(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the parameters' shapes by own name -> by name and layout on disk."""
        ...

    def inward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo `outward`. Raises ValueError when the names are not exactly those on disk."""
        ...


@dataclass
class Optimizer:
    """AdamW over a set of parameters."""

    spec: OptimizerSpec
    set: ParameterSet
    torch: torch.optim.AdamW

    @classmethod
    def make(cls, parameters: ParameterSet, spec: OptimizerSpec) -> Optimizer:
        """Fresh: no step taken."""
        own = [parameter for _, parameter in parameters.named()]
        # torch wants a tuple of floats and no decay of a zero kind: exactly the spec's numbers.
        adamw = torch.optim.AdamW(
            own, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, weight_decay=spec.weight_decay, foreach=False,
            fused=own[0].is_cuda,
        )  # fmt: skip
        return cls(spec, parameters, adamw)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.torch.param_groups[0]["params"])

    def step(self) -> None:
        """Change the parameters by their gradients."""
        self.torch.step()
        # torch's fused kernels write without counting it, and what was made of the old values would be taken for theirs.
        torch.autograd.graph.increment_version(self.parameters)

    def state(self) -> dict[str, Tensor]:
        """Tensors `NAME.exp_avg`, `NAME.exp_avg_sq` (fp32) and `step` (int64 []); moments are zero before the first step."""
        out: dict[str, Tensor] = {}
        step = 0
        for key in MOMENTS:
            own = {}
            for name, parameter in self.set.named():
                moments = self.torch.state.get(parameter, {})
                own[name] = moments[key].cpu() if moments else torch.zeros(parameter.shape)
                step = max(step, int(moments["step"]) if moments else 0)
            out |= {f"{name}.{key}": tensor for name, tensor in self.set.outward(own).items()}
        return out | {"step": torch.tensor(step, dtype=torch.int64)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Set the moments and the step count. Raises ValueError or KeyError when the names are not the parameters'."""
        step = float(state["step"])
        self.torch.state.clear()
        if step == 0:
            return
        moments = {key: self.set.inward(_of_kind(state, key)) for key in MOMENTS}
        for name, parameter in self.set.named():
            own = {key: moments[key][name].to(parameter.device, copy=True) for key in MOMENTS}
            # torch's fused kernel reads the count where the parameter lies.
            counted = torch.tensor(step, device=parameter.device)
            self.torch.state[parameter] = {"step": counted} | own


def _of_kind(state: Mapping[str, Tensor], key: str) -> dict[str, Tensor]:
    """NAME -> tensor of every `NAME.key`."""
    suffix = f".{key}"
    return {name.removesuffix(suffix): tensor for name, tensor in state.items() if name.endswith(suffix)}


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
    measures, share = Measures(), shares(batch, loss.normalise).to(policy.device)
    parts: list[Tensor] = []
    # Ahead of their use, all of them: they are small beside the activations of one.
    rows = [row.to(policy.device) for row in batch.rows]
    optimizer.torch.zero_grad(set_to_none=True)
    try:
        with policy.replaying(batch.coverage is not None) as replay:
            for index, row in enumerate(rows):
                if cancelled():
                    raise Cancelled(f"cancelled after {index} of {len(rows)} rows")
                parts.append(_train_row(policy, row, loss, share, measures))
                progress(index + 1, len(rows))
            # The first wait for the device: what is read after it is there then.
            losses = torch.stack(parts).tolist()
            _check_losses(losses)
            norm = gradient_norm(parameters)
            calls = replay.finish() if replay else 0
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient norm is {norm}: look at the batch's advantages and at the learning rate")
        if cancelled():
            raise Cancelled("cancelled before the optimizer's step")
        clip(parameters, norm, optimizer.spec.clip_grad_norm)
        optimizer.step()
    finally:
        optimizer.torch.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - started
    rates = {"tokens_per_s": sum(len(row.tokens) for row in batch.rows) / seconds}
    if batch.coverage is not None:
        rates |= {"replay_coverage": batch.coverage, "replay_calls": float(calls)}
    return {"loss": sum(losses), "grad_norm": norm} | measures.metrics(loss.clip_high, epoch) | rates


def _train_row(policy: Policy, row: PackedRow, loss: LossSpec, share: Tensor, measures: Measures) -> Tensor:
    """Add a row's gradients; returns its part of the loss, which nothing has waited for."""
    scores = policy.score(row.tokens, row.positions, row.until, row.at, row.targets, row.temperatures, row.routes)
    part = row_loss(loss, row, scores.logprobs, share)
    part.backward()
    measures.add(row, scores.logprobs, scores.entropy)
    return part.detach()


def _check_losses(parts: list[float]) -> None:
    """Raises NonFinite: then all gradients are worth nothing, and none is used."""
    for index, part in enumerate(parts):
        if not math.isfinite(part):
            raise NonFinite(
                f"the loss of row {index} is {part}: look at the batch's advantages and at the learning rate"
            )


def gradient_norm(parameters: list[nn.Parameter]) -> float:
    """Global 2-norm, each tensor's sum of squares in fp64, added up in parameter order."""
    squares = [_square(p.grad) for p in parameters if p.grad is not None]
    # Read at once: on a GPU each would wait for the device.
    return math.sqrt(sum(torch.stack(squares).tolist())) if squares else 0.0


def _square(grad: Tensor) -> Tensor:
    if grad.is_cuda:  # in one pass, which adds up in another order
        return torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    return grad.double().square().sum()


def clip(parameters: list[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients to a norm of at most `limit` (0 = no limit)."""
    if limit > 0 and norm > limit:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(limit / norm)
