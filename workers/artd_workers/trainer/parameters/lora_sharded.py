"""An adapter of which each rank holds a shard: sums gradients over the ranks, and puts the whole together for the disk.

`ShardedLora` is `Lora` for a model that several processes hold. It reads and writes the names, shapes and bits of one process,
so a checkpoint does not depend on the number of processes. All ranks call a method marked "Collective:", in the same order.
Before `gradient_norm`, a rank's gradients are parts of a sum, never copies of it. Copies of a parameter stay equal, bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from artd_workers.models.base import Plan
from artd_workers.trainer.model.experts.grouped import GroupedAdapter
from artd_workers.trainer.model.gradients import squares
from artd_workers.trainer.model.lora import Lora
from artd_workers.trainer.parallel.layout import Parallel


@dataclass(frozen=True)
class Cut:
    """What a rank holds of a whole tensor.

    `at`: its shard, which other ranks of `groups` hold too. `answers`: whether this rank's copy counts where something is
    summed over all ranks.
    """

    at: tuple[slice, ...]
    groups: tuple[dist.ProcessGroup, ...]
    answers: bool


class ShardedLora(Lora):
    """All adapters of this rank's part of a model."""

    views = False

    def __init__(
        self, plan: Plan, shapes: Mapping[str, tuple[int, int]], rank: int, alpha: float, grouped: bool, parallel: Parallel
    ) -> None:  # fmt: skip
        """Make the adapters. `shapes`: (out, in) of the whole weights, as for `Lora`."""
        codec = parallel.codec(plan)
        super().__init__(codec, parallel.shapes(codec, shapes), rank, alpha, grouped)
        with torch.device("meta"):
            self._whole = Lora(plan.codec, shapes, rank, alpha, grouped)
        self._shapes = {name: parameter.shape for name, parameter in self._whole.list_parameters()}
        # A rank numbers layers within its pipeline stage.
        self._whole_names = {name: parallel.whole_name(name, plan) for name, _ in self.list_parameters()}
        self._own_names = {whole: name for name, whole in self._whole_names.items()}
        self._cuts = dict(self._cut())
        self._device = torch.device("cpu")

    def _cut(self) -> Iterator[tuple[str, Cut]]:
        for path, adapter in self._adapters.items():
            here = places(".experts." in path)
            for name, parameter in adapter.list_parameters():
                yield (
                    name,
                    _cut(
                        self._shapes[self._whole_names[name]],
                        parameter.shape,
                        isinstance(adapter, GroupedAdapter),
                        here,
                    ),
                )

    def attach(self, model: GPTModel) -> None:
        super().attach(model)
        self._device = next(model.parameters()).device

    def sizes(self) -> dict[str, torch.Size]:
        return self._whole.sizes()

    def outward(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the whole adapter. Only the first rank gets numbers, copies of all ranks' tensors. Collective."""
        onto = next(iter(own.values())).device
        return self._whole.outward({name: self._join(name, own, onto) for name in self._shapes})

    def _join(self, name: str, own: Mapping[str, Tensor], onto: torch.device) -> Tensor:
        # As integers, a sum with zeros keeps every bit, also that of -0.0.
        whole = torch.zeros(self._shapes[name], dtype=torch.int32, device=self._device)
        here = self._own_names.get(name)
        if here is not None and (cut := self._cuts[here]).answers:
            whole[cut.at] = own[here].to(self._device).view(torch.int32)
        dist.all_reduce(whole)
        found = whole.view(torch.float32)
        return found.to(onto) if dist.get_rank() == 0 else found.to("meta")

    def inward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = self._whole.inward(stored)
        return {name: whole[self._whole_names[name]][cut.at].contiguous() for name, cut in self._cuts.items()}

    def gradient_norm(self) -> float:
        """Return the 2-norm over all ranks, after summing the gradients. Collective."""
        counted: list[nn.Parameter] = []
        for name, parameter in self.list_parameters():
            cut = self._cuts[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            for group in cut.groups:
                dist.all_reduce(parameter.grad, group=group)
            counted += [parameter] * cut.answers
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        if found := squares(counted):
            total += torch.stack(found).sum()
        dist.all_reduce(total)
        return math.sqrt(float(total))


def lora_of(
    plan: Plan, shapes: Mapping[str, tuple[int, int]], rank: int, alpha: float, grouped: bool, parallel: Parallel
) -> Lora:
    """Return the adapters of a model, or of this rank's part of it; arguments as for `Lora`. The process groups must exist."""
    if parallel.world == 1:
        return Lora(plan.codec, shapes, rank, alpha, grouped)
    return ShardedLora(plan, shapes, rank, alpha, grouped, parallel)


@dataclass(frozen=True)
class Places:
    """Where this rank is among the shards of a weight.

    `tensor`: tensor-parallel rank; `expert`: expert-parallel rank; `same`: group of the ranks with the same shard of each split
    weight; `split`: group of the ranks with its other shards.
    """

    tensor: int
    expert: int
    same: dist.ProcessGroup
    split: dist.ProcessGroup


def places(expert: bool) -> Places:
    """Return the place of this rank. `expert`: for the experts' weights, else for the other weights."""
    state = parallel_state
    number = state.get_expert_model_parallel_rank()
    if expert:
        same, split = state.get_expert_data_parallel_group(), state.get_expert_tensor_parallel_group()
        return Places(state.get_expert_tensor_parallel_rank(), number, same, split)
    return Places(
        state.get_tensor_model_parallel_rank(), number, state.get_data_parallel_group(),
        state.get_tensor_model_parallel_group(),
    )  # fmt: skip


def _cut(whole: torch.Size, own: torch.Size, by_expert: bool, places: Places) -> Cut:
    """Return what this rank holds. `by_expert`: the first dimension counts experts."""
    at, split = [], False
    for dim, (size, part) in enumerate(zip(whole, own, strict=True)):
        index = places.expert if by_expert and dim == 0 else places.tensor
        at.append(slice(part * index, part * (index + 1)) if part < size else slice(None))
        split |= part < size and not (by_expert and dim == 0)
    groups = (places.same,) if split else (places.same, places.split)
    shared = tuple(group for group in groups if dist.get_world_size(group) > 1)
    return Cut(tuple(at), shared, all(dist.get_rank(group) == 0 for group in shared))
