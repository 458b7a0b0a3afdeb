"""One optimizer step over a packed batch: forward and backward row by row, gradient clipping, AdamW.

Owns the optimizer's moments (fp32, two for each parameter). Nothing changes before every loss and every gradient of the
step was found to be finite. The same batch, state and threads give the same bits (one row at a time, in order; no fused or
foreach kernels on the CPU). A cancel takes effect between rows.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from artd_schema.run.losses import EXAMPLES
from artd_schema.run.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.batch.row_schedule import ScheduledRow, schedule_rows, sum_over_ranks
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.model.lora import without_adapter
from artd_workers.trainer.model.model import Policy, Scores
from artd_workers.trainer.parameters.contract import ParameterSet

from .measures import Measures
from .objective import Beside, LossError, Objective, Tally, shares
from .schedule import learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")


class NonFinite(ArithmeticError):
    """A loss or gradient is NaN or infinite; nothing was changed."""


class Cancelled(Exception):
    """The daemon cancelled the job; nothing was changed."""


@dataclass
class Optimizer:
    """AdamW over a set of parameters. updates: steps that it has taken."""

    spec: OptimizerSpec
    set: ParameterSet
    torch: torch.optim.AdamW
    updates: int = 0

    @classmethod
    def make(cls, parameters: ParameterSet, spec: OptimizerSpec) -> Optimizer:
        """Make an optimizer that has taken no step."""
        kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in parameters.list_parameters():
            kinds[decays(name)].append(parameter)
        groups = [{"params": own, "decays": kind} for kind, own in kinds.items() if own]
        cuda = any(own[0].is_cuda for own in kinds.values() if own)
        adamw = torch.optim.AdamW(groups, foreach=False, fused=cuda)
        return cls(spec, parameters, adamw)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.set.list_parameters()]

    @property
    def rate(self) -> float:
        """The learning rate of the last step; before the first one, of that."""
        return learning_rate(self.spec, max(self.updates, 1))

    def step(self) -> None:
        """Change the parameters by their gradients."""
        self.updates += 1
        for group in self.torch.param_groups:
            decay = self.spec.weight_decay if group["decays"] else 0.0
            betas = (self.spec.beta1, self.spec.beta2)
            group.update(lr=self.rate, betas=betas, eps=self.spec.eps, weight_decay=decay)
        self.torch.step()
        self.set.refresh_weights()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors `NAME.exp_avg`, `NAME.exp_avg_sq` (fp32) and `step` (int64 []). Moments are zero before
        the first step. The tensors are the live ones; where that would take copies, they are copies on the CPU."""
        out: dict[str, Tensor] = {}
        for key in MOMENTS:
            own = {}
            for name, parameter in self.set.list_parameters():
                moments = self.torch.state.get(parameter, {})
                held = moments[key] if moments else torch.zeros_like(parameter.detach())
                own[name] = held if self.set.views else held.cpu()
            out |= {f"{name}.{key}": tensor for name, tensor in self.set.outward(own).items()}
        return out | {"step": torch.tensor(self.updates, dtype=torch.int64)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Set the moments and the step count. Raises ValueError or KeyError if the names are not those of the
        parameters."""
        self.updates = int(state["step"])
        self.torch.state.clear()
        if self.updates == 0:
            return
        moments = {key: self.set.inward(_of_kind(state, key)) for key in MOMENTS}
        for name, parameter in self.set.list_parameters():
            own = {key: moments[key][name].to(parameter.device, copy=True) for key in MOMENTS}
            # torch's fused kernel reads the count on the parameter's device.
            counted = torch.tensor(float(self.updates), device=parameter.device)
            self.torch.state[parameter] = {"step": counted} | own


def decays(name: str) -> bool:
    """Return whether `weight_decay` applies to a parameter, by the parameter's own name.

    It applies to linears and adapters. It would harm norms (their weights are near one), biases, embeddings and
    routers. The name decides, not the shape, because a master may be flat.
    """
    module, _, last = name.rpartition(".")
    inner = module.rpartition(".")[2]
    return not (last.endswith("bias") or inner.endswith("norm") or inner in ("word_embeddings", "router"))


def _of_kind(state: Mapping[str, Tensor], key: str) -> dict[str, Tensor]:
    """Return the tensor of every `NAME.key`, by NAME."""
    suffix = f".{key}"
    return {name.removesuffix(suffix): tensor for name, tensor in state.items() if name.endswith(suffix)}


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    loss: LossSpec,
    epoch: int,
    progress: Callable[[], None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
    cancelled_now: Callable[[], bool] | None = None,
    proximals: Mapping[int, Tensor] | None = None,
) -> dict[str, float]:
    """Take one optimizer step on a batch and return its metrics. `epoch` is the policy epoch of the weights before the job. `proximals`
    maps the index of each row of this rank to the logprobs of the weights before the job, None where those are the present ones.

    `progress()` is called after each forward and each backward of a row. `cancelled()` is asked before each row, and
    may answer late. `cancelled_now` (None: the same) is asked once, before weights change. Raises NonFinite and
    Cancelled, both before any weight has changed.
    """
    started = time.perf_counter()
    parameters = optimizer.parameters
    # All rows go to the device at once, because they are small compared with the activations of one.
    mine = schedule_rows(batch.rows, policy.parallel, policy.device)
    into = _Found.of(policy, batch, loss)
    into.proximals = proximals or {}
    if into.objective.wants_reference:
        into.references = _score_base(policy, mine, progress)
    optimizer.torch.zero_grad(set_to_none=True)
    try:
        with policy.open_replay(batch.coverage is not None) as replay:
            _pass_all(policy, mine, lambda scheduled: _forward(policy, scheduled, into), progress, cancelled)
            into.measures.found = sum_over_ranks(into.measures.found, policy.parallel)
            # The first wait for the device. What is read after this is ready.
            parts = sum_over_ranks(into.losses, policy.parallel).tolist()
            own = into.tally.metrics(policy.parallel)
            _check_losses(parts)
            norm = optimizer.set.gradient_norm()
            calls = replay.finish() if replay else 0
        if not math.isfinite(norm):
            raise NonFinite(f"the gradient norm is {norm}: look at the batch's advantages and at the learning rate")
        if (cancelled_now or cancelled)():
            raise Cancelled("cancelled before the optimizer's step")
        clip(parameters, norm, optimizer.spec.clip_grad_norm)
        optimizer.step()
    finally:
        optimizer.torch.zero_grad(set_to_none=True)
    # Reading the measures waits for the device, which is still making the update.
    found = own | into.measures.metrics(epoch, sampled=loss.kind != EXAMPLES)
    seconds = time.perf_counter() - started
    rates = {"tokens_per_s": sum(len(row.tokens) for row in batch.rows) / seconds}
    if batch.coverage is not None:
        rates |= {"replay_coverage": batch.coverage, "replay_calls": float(calls)}
    return {"loss": sum(parts), "grad_norm": norm, "lr": optimizer.rate} | found | rates


@dataclass
class _Found:
    """A step's loss, and what its rows add to.

    `share` is from `shares`. `sequences` counts those of the batch. `losses` is fp64 [rows]. `references` maps the
    index of each row of this rank to the base model's logprobs, `proximals` to those of the weights before the job.
    """

    objective: Objective
    share: Tensor
    sequences: int
    measures: Measures
    tally: Tally
    losses: Tensor
    references: dict[int, Tensor] = field(default_factory=dict)
    proximals: Mapping[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, policy: Policy, batch: Batch, loss: LossSpec) -> _Found:
        objective = Objective(loss)
        return cls(
            objective, shares(batch, loss.normalise, loss.divisor or 1.0).to(policy.device), batch.sequences,
            Measures(batch.rows, policy.device), Tally(objective.names, policy.device),
            torch.zeros(len(batch.rows), dtype=torch.float64, device=policy.device),
        )  # fmt: skip


def _pass_all(
    policy: Policy,
    mine: Sequence[ScheduledRow],
    forward: Callable[[ScheduledRow], Tensor],
    progress: Callable[[], None],
    cancelled: Callable[[], bool],
) -> None:
    """Run forward and backward of each row. Raises Cancelled."""
    under_way: deque[Tensor] = deque()
    begun, stopped = 0, False
    policy.stage.begin()
    for onward, index in policy.stage.order(len(mine)):
        # A row that went forward also goes backward, whatever happens: the other stages expect it.
        stopped = stopped or (onward and cancelled())
        if onward and not stopped:
            under_way.append(forward(mine[index]))
            begun += 1
            progress()
        elif not onward and under_way:
            policy.stage.backward(under_way.popleft())
            progress()
    if stopped:
        raise Cancelled(f"cancelled after {begun} of {len(mine)} rows")


def _forward(policy: Policy, scheduled: ScheduledRow, into: _Found) -> Tensor:
    """Run a row's forward. Returns the tensor from which its backward starts. The measures go to `into`, and nothing
    waits for the device."""
    row, objective = scheduled.row, into.objective
    out = _score(policy, scheduled, objective.wants_entropy)
    if not policy.stage.last:
        return out
    if not len(row.at) and policy.parallel.cp == 1:
        return out.sum() * 0.0
    scores = Scores.of(out)
    entropy = out[1] if objective.wants_entropy else None
    beside = Beside(entropy, into.references.get(scheduled.index), into.proximals.get(scheduled.index))
    part, metrics = objective.row_loss(row, scores.logprobs, into.share, into.sequences, beside)
    if scheduled.counts:
        into.measures.add(scheduled.first, scores.logprobs, scores.entropy)
        into.tally.add(metrics)
        into.losses[scheduled.index] = part.detach()
    # A rank without a trained token of its own still runs the backward, because the other ranks need its part.
    return part if len(row.at) else part + out.sum() * 0.0


def _score(policy: Policy, scheduled: ScheduledRow, entropy_gradient: bool = False) -> Tensor:
    """Return `Policy.hidden_scores` of a row's trained tokens."""
    row = scheduled.row
    return policy.hidden_scores(
        row.tokens, row.positions, row.until, row.at, row.targets, row.temperatures, row.routes, entropy_gradient
    )


def _score_base(policy: Policy, mine: Sequence[ScheduledRow], progress: Callable[[], None]) -> dict[int, Tensor]:
    """Score each row by the base model: its index -> logprobs of its trained tokens, on the last stage. Raises LossError without an adapter. Collective: every
    rank calls it."""
    if policy.lora is None:
        raise LossError(
            "loss.kl is the distance to the base model, and every weight is trained: nothing holds the base any more"
        )
    with without_adapter(policy.model):
        return score_rows(policy, mine, progress)


def score_rows(policy: Policy, mine: Sequence[ScheduledRow], progress: Callable[[], None]) -> dict[int, Tensor]:
    """Score each row without gradient: its index -> logprobs of its trained tokens, on the last stage. Collective: every rank calls it."""
    found: dict[int, Tensor] = {}
    policy.stage.begin()
    with torch.no_grad():
        for scheduled in mine:
            out = _score(policy, scheduled)
            if policy.stage.last:
                found[scheduled.index] = out[0]
            progress()
    policy.stage.settle()
    return found


def _check_losses(parts: list[float]) -> None:
    """Raise NonFinite if a loss is not finite. Then no gradient of the step is used."""
    for index, part in enumerate(parts):
        if not math.isfinite(part):
            raise NonFinite(
                f"the loss of row {index} is {part}: look at the batch's advantages and at the learning rate"
            )


def clip(parameters: list[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients to a norm of at most `limit` (0 = no limit)."""
    if limit > 0 and norm > limit:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(limit / norm)
