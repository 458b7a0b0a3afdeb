"""The experts of a layer as one parameter, multiplied in one grouped product, with an adapter for each expert.

`GroupedExperts` replaces Megatron's SequentialMLP where a loop over experts would be too slow, and `OneRankMoE` its MoELayer
where no token has to be sent. `GroupedAdapter` is `lora.FusedAdapter` for all experts of a layer at once. `slots` returns a
model's weights by the codec's names, expert by expert. This file owns the experts' weights [experts, out, in] and the adapters'
fp32 masters. It is plain torch, works on any device and never waits for one. Outside this file, names and layouts are the
codec's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from artd_workers.models.codec import Row, peft_names
from artd_workers.trainer.model.cached import Cached

from . import chunks, routed
from .routed import Order

EXPERT = re.compile(r"\.local_experts\.\d+(?=\.)")
ALIGNED = 8
"""Grouped products of bf16 need rows of a multiple of 16 bytes, which is 8 numbers; a smaller rank is padded with zeros."""


class GroupedLinear(nn.Module):
    """The weights [experts, out, in] of one linear of every expert, and their adapters once they are attached."""

    def __init__(self, experts: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, dtype=dtype))
        self.adapter: GroupedAdapter | None = None


class GroupedExperts(MegatronModule):
    """All experts of one layer on this rank. Megatron's builder of experts makes it."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        inner = config.moe_ffn_hidden_size or config.ffn_hidden_size
        hidden, inner = config.hidden_size, inner // parallel_state.get_expert_tensor_parallel_world_size()
        self.linear_fc1 = GroupedLinear(num_local_experts, hidden, 2 * inner, config.params_dtype)
        self.linear_fc2 = GroupedLinear(num_local_experts, inner, hidden, config.params_dtype)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Compute what Megatron's dispatchers expect. Returns [T, hidden] and no bias.

        `tokens` [T, hidden], sorted by expert; `tokens_per_expert` [experts], on any device; `probs` [T].
        """
        counts = tokens_per_expert.to(tokens.device, non_blocking=True)
        return self.apply_routed(tokens, probs[:, None], Order.of_sorted(counts, len(tokens))), None

    def apply_routed(self, tokens: Tensor, probs: Tensor, order: Order) -> Tensor:
        """Return [T, hidden]: the experts of each token by `order`, weighted by `probs` [T, topk]. `tokens` [T, hidden]."""
        return routed.apply(tokens, probs, order, *self._tensors())

    def apply_chosen(self, tokens: Tensor, probs: Tensor, experts: Tensor) -> Tensor:
        """Compute `apply_routed` for expert ids [T, topk].

        Where every layer is recomputed to save memory, a long row is computed in chunks.
        """
        if self.config.recompute_granularity == "full" and len(tokens) > chunks.TOKENS:
            return chunks.apply(tokens, probs, experts, *self._tensors())
        return self.apply_routed(tokens, probs, Order.of(experts, len(self.linear_fc1.weight)))

    def _tensors(self) -> Any:
        """Return the weights, and their adapters once they are attached."""
        first, second = self.linear_fc1, self.linear_fc2
        pairs = (first.adapter, second.adapter) if first.adapter is not None and second.adapter is not None else None
        return (first.weight, second.weight), pairs


class OneRankMoE(MoELayer):
    """Megatron's mixture of experts where all experts are on this rank.

    Nothing is dispatched, and the router returns (probs [T, topk], expert ids [T, topk]) instead of maps over all experts.
    """

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: None = None
    ) -> tuple[Tensor, None]:
        if self.moe_layer_recompute and self.training:
            return checkpoint(self._once, False, hidden_states), None
        return self._once(hidden_states), None

    def _once(self, hidden_states: Tensor) -> Tensor:
        probs, chosen = self.router(hidden_states)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = self.experts.apply_chosen(tokens, probs, chosen)
        return out.view_as(hidden_states)


class DenseRouting:
    """A mixin that makes a router return each token's probabilities and experts [T, topk], by Megatron's own function.

    The other abilities of the router's forward (losses, jitter, limits) are off in every model here.
    """

    def forward(self: Any, input: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        config, logits = self.config, self.gating(input)
        return topk_routing_with_score_function(
            logits.view(-1, logits.shape[-1]), self.topk, use_pre_softmax=config.moe_router_pre_softmax,
            scaling_factor=config.moe_router_topk_scaling_factor, score_function=self.score_function,
            router_replay=self.router_replay, dense_output=True,
        )  # fmt: skip


def sparse(router: Any, alone: Any) -> Any:
    """Return a builder of a sparse layer's MLP with grouped experts.

    `router`: the router's class for experts on several ranks; `alone`: its class for one rank.
    """

    def build(*args: Any, pg_collection: Any, **kwargs: Any) -> MoELayer:
        one = pg_collection.ep.size() == pg_collection.expt_tp.size() == 1
        kind, gate = (OneRankMoE, alone) if one else (MoELayer, router)
        return kind(
            *args, submodules=MoESubmodules(experts=GroupedExperts, router=gate), pg_collection=pg_collection, **kwargs
        )

    return build


class GroupedAdapter(nn.Module):
    """The adapters of one linear of every expert. `a`: fp32 [experts, parts, r, in]; `b`: fp32 [experts, parts, out of a part,
    r].

    A fused gate and up has two parts, the first above the second in its output.
    """

    def __init__(
        self, path: str, rows: Sequence[Row], sizes: tuple[int, ...], in_features: int, rank: int, scale: float
    ) -> None:
        """Make the adapters. `path`: of the linear in the model; `rows`: of its experts, in order; `sizes`: out of each part,
        all equal."""
        super().__init__()
        experts, parts = len(rows), len(sizes)
        if len(set(sizes)) > 1 or any(row.layout not in ("plain", "concat") for row in rows):
            raise ValueError(f"{path}: experts whose parts have the sizes {sizes} cannot share one adapter parameter")
        self._path, self._rows = path, tuple(rows)
        self.a = nn.Parameter(torch.empty(experts, parts, rank, in_features))
        self.b = nn.Parameter(torch.zeros(experts, parts, sizes[0], rank))
        self.scale = scale
        self._joined = Cached(self.compute_join)

    def join(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A [experts, R, in], scaled, and B [experts, out, R], kept until the parameters change.

        The ranks of the parts are side by side, and B is zero where a part's output meets another part's rank. R is a multiple
        of ALIGNED.
        """
        return self._joined.of((self.a, self.b), dtype)

    def compute_join(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute what `join` returns, without keeping it."""
        a, parts = self.a.flatten(1, 2), self.a.shape[1]
        apart = torch.eye(parts, device=a.device)[:, None, :, None]
        b = (self.b[:, :, :, None, :] * apart).flatten(3, 4).flatten(1, 2)
        extra = -a.shape[1] % ALIGNED
        return F.pad(self.scale * a, (0, 0, 0, extra)).to(dtype), F.pad(b, (0, extra)).to(dtype)

    def gradients(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `a` and `b`, fp32, from those of what `join` returned."""
        parts, rank = self.a.shape[1:3]
        own = b[..., : parts * rank].unflatten(1, (parts, -1)).unflatten(3, (parts, rank))
        d_b = torch.empty_like(self.b).copy_(own.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2))
        return a[:, : parts * rank].unflatten(1, (parts, rank)).float().mul_(self.scale), d_b

    def list_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (own name, parameter)."""
        yield f"{self._path}.lora_A", self.a
        yield f"{self._path}.lora_B", self.b

    def slots(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (PEFT name, its part of the own tensor), expert by expert. `own`: tensors of the parameters' shapes, by own
        name."""
        a, b = (own[name] for name, _ in self.list_parameters())
        for expert, row in enumerate(self._rows):
            for index, part in enumerate(row.parts):
                name_a, name_b = peft_names(part)
                yield name_a, a[expert, index]
                yield name_b, b[expert, index]


def slots(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters by the codec's names; an expert's weight is its part of the layer's parameter."""
    return apart(model, dict(model.named_parameters()))


def apart(model: nn.Module, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of the shapes of a model's parameters from the parameters' names to the codec's, as `slots` does."""
    out = dict(own)
    for path, module in model.named_modules():
        if isinstance(module, GroupedLinear):
            weight, (experts, linear) = out.pop(f"{path}.weight"), path.rsplit(".", 1)
            out |= {f"{experts}.local_experts.{i}.{linear}.weight": one for i, one in enumerate(weight)}
    return out
