"""Trains every weight with several processes that share each row: each has the whole model and a shard of every master.

`ShardedState` is `FullState` with the masters, and so the optimizer's moments, sharded evenly (ZeRO stage 1: Rajbhandari et
al., arXiv:1910.02054, section 5.1). Megatron's distributed optimizer does the same and gives the same numbers; docs/adr/0003
says why it is not used. It owns this rank's shards, each a stretch of a flattened weight, and the gradient sums of a step.
Files on disk do not depend on the number of processes. Weights are equal on all ranks, bit for bit. All ranks call a method
marked "Collective:", in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from artd_workers.trainer.model.gradients import squares
from artd_workers.transfer.merge import merged_tensors

from .full import FullState


class ShardedState(FullState):
    """Every weight of a policy whose ranks all hold all of it."""

    _collected: dict[str, Tensor] | None = None

    def _make_masters(self, rounded: bool) -> dict[str, nn.Parameter]:
        self._sums: dict[str, Tensor] = {}
        made = {}
        for name, weight in self._weights.items():
            each = -(-weight.numel() // dist.get_world_size())
            made[name] = nn.Parameter(torch.empty(each, device=weight.device))
            weight.register_post_accumulate_grad_hook(partial(self._add, name))
        return made

    def _add(self, name: str, weight: Tensor) -> None:
        """Add a weight's gradient to this rank's sum."""
        grad, weight.grad = weight.grad, None
        if grad is not None:
            self._sum(name)[: grad.numel()].add_(grad.flatten())

    def _sum(self, name: str) -> Tensor:
        """Return a weight's gradient sum, flat, padded with zeros to a multiple of the ranks."""
        if name not in self._sums:
            master = self._masters[name]
            self._sums[name] = torch.zeros(len(master) * dist.get_world_size(), device=master.device)
        return self._sums[name]

    def gradient_norm(self) -> float:
        """Return the 2-norm over all ranks, and give each rank its shards of the gradients. Collective."""
        for name, master in self._masters.items():
            master.grad = torch.empty_like(master)
            dist.reduce_scatter_tensor(master.grad, self._sum(name))
            del self._sums[name]
        total = torch.stack(squares(list(self._masters.values()))).sum()
        dist.all_reduce(total)
        return math.sqrt(float(total))

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Make every rank's weights from the ranks' masters. Collective."""
        for name, weight in self._weights.items():
            weight.copy_(self._whole(name, self._masters[name].to(weight.dtype)))

    def _whole(self, name: str, part: Tensor) -> Tensor:
        """Gather all ranks' shards into a tensor with the weight's shape, on the weight's device. Collective."""
        weight = self._weights[name]
        flat = torch.empty(len(part) * dist.get_world_size(), dtype=part.dtype, device=weight.device)
        dist.all_gather_into_tensor(flat, part.to(weight.device))
        return flat[: weight.numel()].view(weight.shape)

    def _part(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor, flat."""
        size = dist.get_world_size()
        return F.pad(whole.flatten(), (0, -whole.numel() % size)).chunk(size)[dist.get_rank()]

    # ---- in checkpoints and engines -----------------------------------------------------------------------------------

    def outward(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather the ranks' shards and convert them. Only the first rank gets numbers, on the CPU. Collective."""
        onto = "cpu" if dist.get_rank() == 0 else "meta"
        return super().outward({name: self._whole(name, own[name].detach()).to(onto) for name in self._weights})

    def inward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._part(whole).clone() for name, whole in super().inward(stored).items()}

    @torch.no_grad()
    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        # Each rank reads everything, so none waits for another rank that may have failed.
        self._sums.clear()
        self.release()
        for name, whole in super().inward(tensors).items():
            self._weights[name].copy_(whole)
            self._masters[name].copy_(self._part(whole))

    def collect(self) -> None:
        self._collected = self.outward(self._masters)

    def release(self) -> None:
        self._collected = None

    def state(self) -> dict[str, Tensor]:
        """Return the masters that `collect` gathered, on the first rank."""
        if self._collected is None:
            raise RuntimeError("the masters are in several processes: call collect() first")
        return self._collected

    def served_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return merged_tensors(self.state(), {}, 1.0, getattr(torch, self._spec.engine.dtype))
