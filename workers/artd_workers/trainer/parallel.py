"""How one model is spread over processes: sizes, and the part of each weight that a rank holds.

Purpose: `Parallel` cuts whole weights (in Megatron's names and layout) for this process; `padded` and `chunk` share a row's
tokens, and their routes, out. Owner of: no state; the process groups are Megatron's (`parallel_state`), made before a model
is built.
Invariants: whatever the layout, a model is built from the same whole weights; ranks hold disjoint parts of a split weight
and equal copies of every other. On the CPU artd trains in one process; more are for machines with several GPUs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class Parallel:
    """tp: tensor-parallel size; ep: expert-parallel size; sp: tensor-parallel ranks share a row's tokens out among them
    (a mixture of experts with tp > 1 needs it)."""

    tp: int = 1
    ep: int = 1
    sp: bool = False

    def settings(self) -> dict[str, Any]:
        """Arguments of TransformerConfig. Raises ValueError when Megatron's process groups have other sizes."""
        groups = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if groups != (self.tp, self.ep):
            raise ValueError(f"{self} was asked for, and the process groups are of tp={groups[0]}, ep={groups[1]}")
        return {
            "tensor_model_parallel_size": self.tp,
            "expert_model_parallel_size": self.ep,
            "sequence_parallel": self.sp,
        }

    def own_name(self, name: str, experts: int) -> str | None:
        """This rank's name of a whole model's parameter; None for an expert that lies on another rank.

        experts: of each MoE layer, counted through over all ranks.
        """
        found = _EXPERT.search(name)
        if found is None or self.ep == 1:
            return name
        each = experts // self.ep
        index = int(found[0]) - each * parallel_state.get_expert_model_parallel_rank()
        return _EXPERT.sub(str(index), name) if 0 <= index < each else None


def part(name: str, whole: Tensor, parameter: Tensor) -> Tensor:
    """What this rank holds of a whole weight. parameter: the one to fill, which Megatron marked with how it is split."""
    if _EXPERT.search(name):
        size, rank = (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    else:
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim = parameter.partition_dim
    # A fused gate and up is two weights on top of each other (stride 2): each is split by itself.
    blocks = whole.chunk(parameter.partition_stride, dim)
    return torch.cat([block.chunk(size, dim)[rank] for block in blocks], dim)


def padded(tokens: Tensor, positions: Tensor, hidden_from: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """A row [s] whose length is a multiple, for sequence parallelism: padding sees itself only, and nothing sees it."""
    size, extra = len(tokens), -len(tokens) % multiple
    if extra == 0:
        return tokens, positions, hidden_from
    mask = ~torch.eye(size + extra, dtype=torch.bool)
    mask[:size, :size] = hidden_from
    return F.pad(tokens, (0, extra)), F.pad(positions, (0, extra)), mask


def chunk(routes: Tensor, rank: int, size: int) -> Tensor:
    """Routes [layers, ceil(T / size), topk] of one sequence-parallel rank: its contiguous part of [layers, T, topk].

    What lies beyond T is padding and has the ids 0 .. topk-1.
    """
    layers, tokens, topk = routes.shape
    each = -(-tokens // size)
    own = routes[:, rank * each : (rank + 1) * each]
    padding = torch.arange(topk, dtype=routes.dtype).expand(layers, each - own.shape[1], topk)
    return torch.cat((own, padding.to(routes.device)), 1)
