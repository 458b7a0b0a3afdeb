"""The layers of artd's GPTModels on a GPU: Transformer Engine's modules, FlexAttention for trees, grouped experts.

It provides the parts that `layers.block_spec` uses for a CUDA placement, and their TransformerConfig settings. It is imported
only where Transformer Engine exists, and patches no library. A row's mask reaches the layers as Megatron's attention mask: None
for a plain chain, `until` [1, 1, 1, s] (see `tree_mask`) for a packed row, or a dense bool [1, 1, s, s] (True = hidden) for
comparison. The layers share the present row's masks.
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
"""Block sizes of FlexAttention's bf16 backward: the fastest of seven tried on an H200 with heads of 128, a tenth faster than its default."""


def settings(sparse: bool) -> dict[str, Any]:
    """Return the TransformerConfig settings that differ from the CPU's. `sparse`: the model has experts."""
    return SETTINGS | (EXPERTS if sparse else {})


class Beside(Adapted):
    """Holds an adapter that is not a submodule, because Transformer Engine refuses a linear with parameters of another dtype."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "adapter":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # With an adapter there is one rank and a frozen weight. torch's products do, and launch much faster.
        if self.adapter is None or self.use_bias:
            return super().forward(input_, *args, **kwargs)
        return adapted_product(input_, self.weight, self.adapter), None


class LoraColumn(Beside, TEColumnParallelLinear):
    """Transformer Engine's column-parallel linear; with an adapter, one product of both."""


class LoraRow(Beside, TERowParallelLinear):
    """Transformer Engine's row-parallel linear; with an adapter, one product of both."""


@lru_cache(1)
def _compile_attention() -> Any:
    # One kernel for each padded length, since kernels for any length are slower; `tree_mask.padding` keeps the lengths few.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


class RowAttention(MegatronModule):
    """Computes the attention of a chain by Transformer Engine's fused kernels, or of any row by its dense mask.

    query [s, b, heads, d], key and value [s, b, groups, d]; returns [s, b, heads * d].
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
    """Megatron's self-attention, which uses FlexAttention for a packed row."""

    rows = tree_mask.RowMask()

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if attention_mask is None or attention_mask.dtype == torch.bool:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        until = attention_mask.view(-1)
        mixed, _ = self.linear_qkv(hidden_states)
        groups, dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        rotations = self.rows.rotations(until, kwargs["rotary_pos_emb"])
        norms = (self.q_layernorm.weight, self.k_layernorm.weight) if self.q_layernorm is not None else None
        size, part = len(mixed), None
        padded = size + tree_mask.padding(size)
        if size < len(until):  # context-parallel ranks have the rest of the row, in parts that need no padding
            padded, part = size, (context.part_index() * size, size)
        q, k, v = qkv_split.split(
            mixed.view(size, groups, -1, dim), norms, rotations, padded, self.config.layernorm_epsilon
        )
        inward = (x.transpose(0, 1)[None] for x in (q, context.all_gather(k), context.all_gather(v)))
        scale, blocks = self.core_attention.scale, BLOCKS if mixed.dtype == torch.bfloat16 else None
        out = _compile_attention()(
            *inward, block_mask=self.rows.of(until, *(part or ())), scale=scale, kernel_options=blocks
        )
        # A token's heads are adjacent in memory, so this copies nothing. `out[0]` would copy in the backward.
        return self.linear_proj(_Front.apply(out.squeeze(0).transpose(0, 1).flatten(1), size)[:, None])


class _Front(torch.autograd.Function):
    """Takes the first `size` rows. The backward of slicing would write all rows twice."""

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
    """An RMS norm that computes no gradient of its weight unless the weight requires one; other kernels always do."""

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
        """Return logits [s, b, experts] in float32. It computes no gradient of a frozen gate; Megatron's own router would."""
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
    """Return the parts of a layer. Transformer Engine multiplies fp32 numbers as TF32, so fp32 uses torch's linears."""
    experts = grouped.sparse(TopKRouter, DenseRouter)
    column, row = (LoraColumnLinear, LoraRowLinear) if dtype == torch.float32 else (LoraColumn, LoraRow)
    return Kit(FrozenNorm, column, row, RowAttention, experts, TreeAttention)
