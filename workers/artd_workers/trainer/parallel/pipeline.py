"""Pipeline parallelism: what moves between the stages of a model, and in which order a stage works.

`Stage` sends hidden states forward and gradients back between neighbouring stages. `order` is one stage's schedule of
a step's rows ("1F1B": Narayanan et al., arXiv:2104.04473, section 2.2). A stage owns the inputs whose gradients it
has yet to send back, and the messages on their way. Rows go backward in the order in which they went forward. Each
direction has its own connection, so that neither waits for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from .layout import Parallel


class Stage:
    """The pipeline stage of this rank. A single stage is both first and last, and moves nothing. `shape`: [1, hidden] of one
    token."""

    def __init__(self, parallel: Parallel, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.number = parallel.pp, 0
        if self.count > 1:
            self.number = parallel_state.get_pipeline_model_parallel_rank()
            here = dist.get_rank()
            self._before, self._after = here - parallel.ranks_per_stage, here + parallel.ranks_per_stage
            self._forth = parallel_state.get_pipeline_model_parallel_group()
        self._kind = {"dtype": dtype, "device": device}
        self._shape = shape
        self._inputs: deque[Tensor | None] = deque()
        self._sent: list[tuple[dist.Work, Tensor]] = []

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.count - 1

    def begin(self) -> None:
        """Begin a step: forget what a failed step left behind."""
        self._inputs.clear()
        self.settle()

    def settle(self) -> None:
        """Wait until every message has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def receive(self, tokens: int) -> Tensor | None:
        """Return hidden states [tokens, 1, hidden] of the previous stage, or None on the first. They collect a
        gradient if gradients are on.
        """
        found = None
        if not self.first:
            found = torch.empty(tokens, *self._shape, **self._kind)
            dist.recv(found, self._before, group=self._forth)
            found.requires_grad_(torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self._inputs.append(found)
        return found

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage."""
        self._send(hidden, self._after, self._forth)

    def backward(self, root: Tensor) -> None:
        """Run the backward of the oldest row that has only gone forward. `root` is the row's loss on the last stage,
        and the tensor that was sent on elsewhere.
        """
        if self.last:
            root.backward()
        else:
            slope = torch.empty_like(root)
            dist.recv(slope, self._after)
            root.backward(slope)
        given = self._inputs.popleft()
        if given is not None and given.grad is not None:
            self._send(given.grad, self._before, None)

    def broadcast_from_last(self, found: Tensor) -> Tensor:
        """Return the last stage's `found` on every stage; elsewhere `found` is a tensor of the same shape to fill.
        Collective: every stage calls it.
        """
        if self.count > 1:
            dist.broadcast(found, parallel_state.get_pipeline_model_parallel_last_rank(), group=self._forth)
        return found

    def order(self, rows: int) -> Iterator[tuple[bool, int]]:
        """Yield (is_forward, row), with no more rows in flight than keep all stages busy."""
        ahead = min(self.count - 1 - self.number, rows)
        for row in range(rows + ahead):
            if row < rows:
                yield True, row
            if row >= ahead:
                yield False, row - ahead

    def _send(self, what: Tensor, to: int, group: dist.ProcessGroup | None) -> None:
        what = what.detach().contiguous()
        self._sent = [pair for pair in self._sent if not pair[0].is_completed()]
        work = dist.isend(what, to, group=group)
        if work is not None:
            self._sent.append((work, what))


def open_connections(parallel: Parallel) -> None:
    """Use each connection once, from the first stage to the last and back, because the first use of a connection
    blocks both its ends. Collective: every rank calls it.
    """
    if parallel.pp == 1:
        return
    number, here = parallel_state.get_pipeline_model_parallel_rank(), dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() != "gloo" else torch.device("cpu")
    word, forth = torch.zeros(1, device=device), parallel_state.get_pipeline_model_parallel_group()
    if number > 0:
        dist.recv(word, here - parallel.ranks_per_stage, group=forth)
    if number < parallel.pp - 1:
        dist.send(word, here + parallel.ranks_per_stage, group=forth)
        dist.recv(word, here + parallel.ranks_per_stage)
    if number > 0:
        dist.send(word, here - parallel.ranks_per_stage)
