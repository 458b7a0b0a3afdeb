"""What a train job does with its batch: one optimizer step for each minibatch, as often as the run's epochs say.

The minibatches are the batch's, so a job that is done again, wherever and whenever, takes the same steps in the same order. Whoever
calls it keeps nothing of a job that does not come to its end: after an error the weights may be those between two steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from artd_schema.run.spec import Learning
from artd_workers.trainer.batch.row_schedule import schedule_rows
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.model.model import Policy

from .step import Optimizer, score_rows, train_step

LARGEST = frozenset({"staleness_max", "mismatch_max"})
"""Metrics of which a job has the largest of its steps'."""
SUMS = frozenset({"replay_calls"})


def train_job(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    learning: Learning,
    epoch: int,
    progress: Callable[[], None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
    cancelled_now: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Train on a batch; returns metrics. epoch: policy epoch of the weights as they are now. progress, cancelled, cancelled_now: as for
    `train_step`. Raises NonFinite and Cancelled; then the weights are worth nothing. Collective: every rank calls it."""
    optimizer.spec, loss = learning.optimizer, learning.loss
    parts, epochs = batch.minibatches(), learning.optimizer.epochs or 1
    order = [part for number in range(epochs) for part in draw_order(len(parts), number, batch)]
    proximals: list[dict[int, Tensor]] = [{} for _ in parts]
    if len(order) > 1 and loss.proximal == "trainer":
        proximals = [
            score_rows(policy, schedule_rows(part.rows, policy.parallel, policy.device), progress) for part in parts
        ]
    found = [
        train_step(policy, optimizer, parts[part], loss, epoch, progress, cancelled, cancelled_now, proximals[part])
        for part in order
    ]
    return found[0] if len(found) == 1 else _join(found, len(parts))


def draw_order(count: int, epoch: int, batch: Batch) -> list[int]:
    """Return the order of the minibatches in one of the job's epochs, from 0: as packed in the first, then drawn from the batch's seed."""
    if not epoch:
        return list(range(count))
    words = (f"{batch.manifest.seed}:{batch.manifest.step}:{epoch}:{part}".encode() for part in range(count))
    drawn = [hashlib.sha256(word).digest() for word in words]
    return sorted(range(count), key=drawn.__getitem__)


def _join(found: Sequence[Mapping[str, float]], parts: int) -> dict[str, float]:
    """Make a job's metrics of its steps' (docs/metrics.md, "Several optimizer steps"). parts: minibatches; the first epoch's steps come first."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in found for name in metrics):
        # After a step the weights are no longer those that sampled a token, so what differs is not numerical alone.
        of = found[:1] if name.startswith("mismatch_") else found
        out |= dict(_value(name, [metrics[name] for metrics in of if name in metrics], parts))
    return out | {"optimizer_steps": float(len(found))}


def _value(name: str, values: Sequence[float], parts: int) -> Iterator[tuple[str, float]]:
    if not values:
        return
    if name == "lr":
        yield name, values[-1]
    elif name == "trained_tokens":
        yield name, sum(values[:parts])
    elif name in SUMS:
        yield name, sum(values)
    else:
        yield name, max(values) if name in LARGEST else sum(values) / len(values)
