"""The layers of our GPTModels on a GPU: Transformer Engine's modules, FlexAttention for trees, grouped experts.

Purpose: the parts that `layers.block_spec` takes for a CUDA placement, and their TransformerConfig settings.
Owner of: no state but the block mask of the row at hand. Invariants: imported only where Transformer Engine exists; no patch
of any library; a row's mask reaches the layers as Megatron's attention mask: None for a plain chain, `until` [1, 1, 1, s]
(see `tree`) for a packed row, a dense bool [1, 1, s, s] (True = hidden) as the yardstick.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from . import tree
from .grouped import GroupedExperts
from .layers import Kit, MaskedAttention, RmsNorm
from .lora import Adapted, LoraColumnLinear, LoraRowLinear

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

    def adapted(self, out: Tensor, x: Tensor) -> Tensor:
        """All parts in two products, the second of which adds: the outputs are large, the adapters small."""
        if self.adapter is None:
            return out
        a, b = self.adapter.joined(x.dtype)
        product = x.flatten(0, -2) @ a.t()
        return torch.addmm(out.flatten(0, -2), product, b.t(), alpha=self.adapter.scale).view_as(out)


class LoraColumn(Beside, TEColumnParallelLinear):
    """Transformer Engine's column-parallel linear that adds an adapter's product, once one is attached."""


class LoraRow(Beside, TERowParallelLinear):
    """Transformer Engine's row-parallel linear that adds an adapter's product, once one is attached."""


@lru_cache(1)
def _compiled() -> Any:
    # One kernel for each padded length (`tree.padding` keeps them few): those for any length are slower.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


class RowAttention(MegatronModule):
    """Core attention by what the mask is: Transformer Engine's fused kernels for a chain, FlexAttention for a tree.

    query [s, b, heads, d], key and value [s, b, groups, d]; gives [s, b, heads * d].
    """

    mask = tree.RowMask()

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
        if attention_mask.dtype == torch.bool:
            return self.dense(query, key, value, attention_mask)
        size = len(query)
        q, k, v = (tree.pad_rows(x.permute(1, 2, 0, 3)) for x in (query, key, value))
        mask = self.mask.of(attention_mask.view(-1))
        out = _compiled()(q, k, v, block_mask=mask, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out[:, :, :size].permute(2, 0, 1, 3).flatten(2)


class OneRankDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher where all experts are on this rank: the permutation by expert alone.

    The stock one sorts what is sorted already, and waits for the device in each layer to know how many tokens each expert
    has; grouped products read that on the device.
    """

    tokens_per_expert: Tensor

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return global_input_tokens, self.tokens_per_expert, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        return tokens_per_expert


class GroupedMoE(MoELayer):
    """Megatron's mixture of experts, whose dispatcher does no more than it has to on a single rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups = kwargs["pg_collection"]
        if groups.ep.size() == groups.expt_tp.size() == 1:
            self.token_dispatcher: OneRankDispatcher = OneRankDispatcher(
                self.num_local_experts, self.local_expert_indices, self.config, groups
            )


def kit(dtype: torch.dtype) -> Kit:
    """The parts of a layer. Transformer Engine multiplies fp32 numbers as TF32: with fp32, torch's own linears and norms."""
    sparse = partial(GroupedMoE, submodules=MoESubmodules(experts=GroupedExperts, router=TopKRouter))
    if dtype == torch.float32:
        return Kit(RmsNorm, LoraColumnLinear, LoraRowLinear, RowAttention, sparse)
    return Kit(TENorm, LoraColumn, LoraRow, RowAttention, sparse)
