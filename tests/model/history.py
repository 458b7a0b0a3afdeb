"""What workers and clients of a simulation saw, and the rules that it must keep. Nothing here is read from artd's tables.

Owner of: the record. Invariants: a rule that breaks is told at once, with the virtual time, in `problems`.

The rules: what was acknowledged is there; a trajectory is in at most one batch of the chain of checkpoints; steps of that
chain have no gap; an epoch belongs to one job; a job is ordered again only when its last worker has reported or is dead;
`Committed` names one result of a job for ever; what generates is what its label says, and was committed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w


@dataclass(frozen=True)
class Acked:
    """A submit that was answered."""

    op: api.Submit
    bulk: list[bytes]
    trajectory: int


@dataclass(frozen=True)
class Result:
    """What a trainer staged. trained: ids of the trajectories of its batch."""

    order: w.Run
    trained: tuple[int, ...]


@dataclass
class History:
    """say: told of every broken rule."""

    say: Callable[[str], None]
    problems: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    acked: dict[str, Acked] = field(default_factory=dict)
    responses: set[str] = field(default_factory=set)
    replies: dict[str, str] = field(default_factory=dict)  # rollout: the reply that its client had
    samples: set[tuple[str, str]] = field(default_factory=set)
    told: list[str] = field(default_factory=list)
    rolled_back: bool = False
    _results: dict[str, Result] = field(default_factory=dict)
    _committed: dict[int, tuple[int, str]] = field(default_factory=dict)
    _orders: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _epochs: dict[int, int] = field(default_factory=dict)

    def broken(self, text: str) -> None:
        self.problems.append(text)
        self.over.set()
        self.say(f"BROKEN   {text}")

    # ---- clients --------------------------------------------------------------------------------------------------------

    def submitted(self, key: str, op: api.Submit, bulk: list[bytes], answer: api.Submitted) -> None:
        known = self.acked.setdefault(key, Acked(op, bulk, answer.trajectory))
        if known.trajectory != answer.trajectory:
            self.broken(f"key {key} was trajectory {known.trajectory}, and is {answer.trajectory} now")

    def stepped(self, info: api.StepInfo) -> None:
        """A step was told as served."""
        self.told.append(info.checkpoint)

    # ---- workers --------------------------------------------------------------------------------------------------------

    def ordered(self, order: w.Run, process: Any) -> None:
        """A trainer took up a job. process: has `ended` and `reported`."""
        fence, last = self._orders.get(order.job, (0, None))
        if order.fence < fence:
            self.broken(f"job {order.job} was ordered with fence {order.fence} after {fence}")
        elif order.fence > fence and last is not None and not last.ended and (order.job, fence) not in last.reported:
            self.broken(f"job {order.job} fence {order.fence} was ordered while its worker with fence {fence} lived")
        self._orders[order.job] = (order.fence, process)
        if self._epochs.setdefault(order.epoch, order.job) != order.job:
            self.broken(f"epoch {order.epoch} is of job {self._epochs[order.epoch]}, and of job {order.job}")

    def staged(self, sha: str, result: Result) -> None:
        self._results[sha] = result

    def committed(self, message: w.Committed) -> None:
        fence, sha = self._committed.setdefault(message.job, (message.fence, message.checkpoint.sha))
        if (fence, sha) != (message.fence, message.checkpoint.sha):
            self.broken(f"job {message.job} is committed as fence {fence} and as {message.fence}")
        order = self._results[sha].order
        if (order.job, order.fence, order.step) != (message.job, message.fence, message.checkpoint.step):
            self.broken(
                f"Committed of job {message.job} fence {message.fence} names the result of {order.job} {order.fence}"
            )
        self.told.append(sha)

    def generated(self, label: str, weights: str) -> None:
        """The gateway had a response of the engine under `label`; weights: digest of what the engine held."""
        self.samples.add((label, weights))

    # ---- at the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Check everything that was told as a step, with all that it was made from, and what was served."""
        steps: dict[int, set[str]] = {}
        made = {sha: result for told in dict.fromkeys(self.told) for sha, result in self._chain(told)}
        for sha, result in made.items():
            steps.setdefault(result.order.step, set()).add(sha)
        if sorted(steps) != list(range(len(steps))):
            self.broken(f"steps have gaps: {sorted(steps)}")
        if not self.rolled_back and (double := [step for step, shas in steps.items() if len(shas) > 1]):
            self.broken(f"steps that are told as two checkpoints: {double}")
        trained = Counter(number for result in made.values() for number in result.trained)
        if twice := [number for number, times in trained.items() if times > 1]:
            self.broken(f"trained twice: {twice}")
        if strangers := sorted(trained.keys() - {acked.trajectory for acked in self.acked.values()}):
            self.broken(f"trained, but nobody's: {strangers}")
        for label, weights in sorted(self.samples):
            if weights not in steps.get(int(label.rpartition("@")[2]), ()):
                self.broken(f"{label} was served with weights {weights[:8]}")

    def _chain(self, newest: str) -> Iterator[tuple[str, Result]]:
        sha: str | None = newest
        while sha is not None:
            if sha not in self._results:
                self.broken(f"no trainer staged {sha[:8]}")
                return
            result = self._results[sha]
            yield sha, result
            parent = result.order.parent
            if (parent.step if parent else -1) != result.order.step - 1:
                self.broken(f"step {result.order.step} goes on from {parent}")
            sha = parent.sha if parent else None
