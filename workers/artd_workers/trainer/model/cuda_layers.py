"""The layers of our GPTModels on a GPU: Transformer Engine's modules, FlexAttention for trees, grouped experts.

Purpose: the parts that `layers.block_spec` takes for a CUDA placement, and their TransformerConfig settings.
Owner of: no state but what the layers share of the row at hand. Invariants: imported only where Transformer Engine exists; no patch
of any library; a row's mask reaches the layers as Megatron's attention mask: None for a plain chain, `until` [1, 1, 1, s]
(see `tree`) for a packed row, a dense bool [1, 1, s, s] (True = hidden) as the yardstick.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TERowParallelLinear,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from artd_workers.trainer import tree_mask
from artd_workers.trainer.model.experts import grouped
from artd_workers.trainer.model.experts.grouped import DenseRouting
from artd_workers.trainer.model.kernels import sparse as kernels
from artd_workers.trainer.parallel import context

from . import qkv_split
from .layers import Kit, MaskedAttention, RmsNorm
from .lora import Adapted, LoraColumnLinear, LoraRowLinear
from .product import adapted_product

SETTINGS: dict[str, Any] = {
    "bias_activation_fusion": True,
    "apply_rope_fusion": True,
    "persist_layer_norm": True,
}
EXPERTS: dict[str, Any] = {
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "alltoall",
}
BLOCKS = {
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32, "bwd_num_warps": 4, "bwd_num_stages": 3,
}  # fmt: skip
"""FlexAttention's backward of bf16 on an H200, heads of 128: the fastest of seven tried, a tenth faster than its own choice."""


def settings(sparse: bool) -> dict[str, Any]:
    """What differs from the CPU's TransformerConfig. sparse: the model has experts."""
    return SETTINGS | (EXPERTS if sparse else {})


class Beside(Adapted):
    """An adapter that is no submodule: Transformer Engine refuses a linear that holds parameters of another dtype."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "adapter":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # An adapter means one rank and a frozen weight: torch's own products, whose launches cost a fraction.
        if self.adapter is None or self.use_bias:
            return super().forward(input_, *args, **kwargs)
        return adapted_product(input_, self.weight, self.adapter), None


class LoraColumn(Beside, TEColumnParallelLinear):
    """Transformer Engine's column-parallel linear, or with an adapter one product of both."""


class LoraRow(Beside, TERowParallelLinear):
    """Transformer Engine's row-parallel linear, or with an adapter one product of both."""


@lru_cache(1)
def _compiled() -> Any:
    # One kernel for each padded length (`tree.padding` keeps them few): those for any length are slower.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


class RowAttention(MegatronModule):
    """Core attention of a chain by Transformer Engine's fused kernels, or of any row by its dense mask.

    query [s, b, heads, d], key and value [s, b, groups, d]; gives [s, b, heads * d].
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **rest: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.chain = TEDotProductAttention(config=config, softmax_scale=softmax_scale, **rest)
        self.dense = MaskedAttention(config, softmax_scale)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, /, **rest: Any
    ) -> Tensor:
        if attention_mask is None:
            return self.chain(query, key, value, None, attn_mask_type=AttnMaskType.causal)
        return self.dense(query, key, value, attention_mask)


class TreeAttention(SelfAttention):
    """Megatron's self-attention, which takes a tree's row through FlexAttention."""

    rows = tree_mask.RowMask()

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if attention_mask is None or attention_mask.dtype == torch.bool:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        until = attention_mask.view(-1)
        mixed, _ = self.linear_qkv(hidden_states)
        groups, dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        turns = self.rows.turns(until, kwargs["rotary_pos_emb"])
        norms = (self.q_layernorm.weight, self.k_layernorm.weight) if self.q_layernorm is not None else None
        size, part = len(mixed), None
        padded = size + tree_mask.padding(size)
        if size < len(until):  # other ranks have the rest of the row, in parts that need no padding
            padded, part = size, (context.part_index() * size, size)
        q, k, v = qkv_split.split(
            mixed.view(size, groups, -1, dim), norms, turns, padded, self.config.layernorm_epsilon
        )
        inward = (x.transpose(0, 1)[None] for x in (q, context.all_gather(k), context.all_gather(v)))
        scale, blocks = self.core_attention.scale, BLOCKS if mixed.dtype == torch.bfloat16 else None
        out = _compiled()(*inward, block_mask=self.rows.of(until, *(part or ())), scale=scale, kernel_options=blocks)
        # In memory a token's heads lie side by side, as the queries': this copies nothing, and `out[0]` would backwards.
        return self.linear_proj(_Front.apply(out.squeeze(0).transpose(0, 1).flatten(1), size)[:, None])


class _Front(torch.autograd.Function):
    """The first `size` rows; slicing's own backward writes them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.whole = len(x)
        return x[:size]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        out = grad.new_empty(ctx.whole, grad.shape[1])
        out[: len(grad)] = grad
        out[len(grad) :] = 0
        return out, None


class FrozenNorm(RmsNorm):
    """RMS norm whose weight gets no gradient unless it asks for one, which other kernels compute all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.weight.requires_grad else _Norm.apply(x.contiguous(), self.weight, self.eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return kernels.norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return kernels.norm_backward(grads[0].contiguous(), x, weight, ctx.eps), None, None


class DenseRouter(DenseRouting, TopKRouter):
    """Megatron's router for grouped experts on one rank."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits [s, b, experts] in float32. A frozen gate needs no gradient, which the stock one would compute."""
        if self.weight.requires_grad or input.dtype == torch.float32:
            return super().gating(input)
        return _Gate.apply(input, self.weight)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        out = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grads[0].to(weight.dtype) @ weight, None


def kit(dtype: torch.dtype) -> Kit:
    """The parts of a layer. Transformer Engine multiplies fp32 numbers as TF32: with fp32, torch's own linears."""
    experts = grouped.sparse(TopKRouter, DenseRouter)
    column, row = (LoraColumnLinear, LoraRowLinear) if dtype == torch.float32 else (LoraColumn, LoraRow)
    return Kit(FrozenNorm, column, row, RowAttention, experts, TreeAttention)
