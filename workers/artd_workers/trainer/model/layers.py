"""The layers of artd's GPTModels: Megatron-Core's own modules, with the few that need CUDA replaced through its specs.

It gives `model.build` TransformerConfig settings and one spec per layer, dense or sparse. It patches no library. On the CPU
every fusion is off (each needs CUDA or a compiler) and experts are computed one after the other, so a batch gives the same bits
again. Nothing here balances load, drops or jitters tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from artd_workers.models.base import Layer, Mixer, Plan
from artd_workers.trainer.model.experts import grouped
from artd_workers.trainer.model.experts.grouped import DenseRouting
from artd_workers.trainer.parallel import context
from artd_workers.trainer.parallel.layout import ALONE, Parallel
from artd_workers.trainer.placement import Placement

from .lora import LoraColumnLinear, LoraRowLinear
from .tensor_linears import SplitColumn, SplitRow

CPU: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
"""Settings of TransformerConfig for every model here; the placement may override them."""
CPU_EXPERTS: dict[str, Any] = {
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_enable_routing_replay": True,
}
"""Further settings for a mixture of experts. Without targets RouterReplay keeps the router's choice, bit for bit."""


class MaskedAttention(MegatronModule):
    """Computes attention by torch's scaled dot product with an explicit mask.

    query [s, b, heads, d], key and value [s, b, groups, d], mask bool [b, 1, s, s] with True = hidden; returns [s, b, heads *
    d]. All but the mask's keys are this rank's part of the row.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, /, **_: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, context.all_gather(key), context.all_gather(value)))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=~attention_mask, scale=self.scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)


class ExplicitRotary(RotaryEmbedding):
    """Rotary angles for the positions that were set before the forward, instead of 0, 1, 2, ..."""

    positions: Tensor | None = None

    def forward(self, max_seq_len: int, *_: Any, **__: Any) -> Tensor:
        """Return the angles [s, b, 1, d] of `positions` [b, s]."""
        if self.positions is None or self.positions.shape[1] != max_seq_len:
            raise ValueError(f"set the positions of all {max_seq_len} tokens before a forward")
        angles = self.positions.to(self.inv_freq.dtype)[..., None] * self.inv_freq
        return torch.cat((angles, angles), -1).transpose(0, 1)[:, :, None, :]


class CpuRouter(TopKRouter):
    """Megatron's router, whose gate computes on its weight's device; the original moves a CPU weight to CUDA."""

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [s, b, experts] in float32 of hidden states [s, b, hidden]."""
        return router_gating_linear(input, self.weight, self.bias, torch.float32)


class DenseCpuRouter(DenseRouting, CpuRouter):
    """`CpuRouter` for grouped experts on one rank."""


@contextmanager
def narrowest_choices(model: nn.Module) -> Iterator[list[float]]:
    """Collect, for each router call inside the block, how narrowly experts were chosen.

    That is the smallest difference in logits between the last expert that a token was given and the first that it was not. It
    is empty for a dense model.
    """
    gaps: list[float] = []

    def measure(router: TopKRouter, args: tuple[Tensor, ...], _output: object) -> None:
        logits = router.gating(args[0])
        if router.topk < logits.shape[-1]:
            best = logits.detach().topk(router.topk + 1).values
            gaps.append(float((best[..., -2] - best[..., -1]).min()))

    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    hooks = [router.register_forward_hook(measure) for router in routers]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with sequence parallelism, which Megatron's wrapper of it refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Each rank sees a part of the tokens. This flag makes Megatron sum the ranks' gradients.
        self.weight.sequence_parallel = config.sequence_parallel


@dataclass(frozen=True)
class Kit:
    """The modules that make up a layer.

    `experts`: builder of a sparse layer's MLP; the others are classes. `whole`: the class around `attention`, None = Megatron's
    own.
    """

    norm: Any
    column: Any
    row: Any
    attention: Any
    experts: Any
    whole: Any = None

    def linears(self) -> MLPSubmodules:
        return MLPSubmodules(linear_fc1=self.column, linear_fc2=self.row)


def kit_of(placement: Placement, parallel: Parallel = ALONE) -> Kit:
    """Return the modules for a placement and a layout."""
    kit = _kit_of(placement)
    return kit if parallel.tp == 1 else replace(kit, column=SplitColumn, row=SplitRow)


def _kit_of(placement: Placement) -> Kit:
    if placement.cuda:
        from . import cuda_layers

        return cuda_layers.kit(placement.dtype)
    linears = MLPSubmodules(linear_fc1=LoraColumnLinear, linear_fc2=LoraRowLinear)
    experts = partial(SequentialMLP, submodules=linears)
    one_by_one = partial(MoELayer, submodules=MoESubmodules(experts=experts, router=CpuRouter))
    sparse = grouped.sparse(CpuRouter, DenseCpuRouter) if placement.grouped else one_by_one
    return Kit(RmsNorm, LoraColumnLinear, LoraRowLinear, MaskedAttention, sparse)


def config_of(plan: Plan, parallel: Parallel, placement: Placement) -> TransformerConfig:
    """Return Megatron's configuration of a plan. Raises ValueError when the process groups have other sizes than `parallel`."""
    settings = CPU | (CPU_EXPERTS if plan.routes is not None else {})
    if placement.cuda:
        from . import cuda_layers

        settings |= cuda_layers.settings(plan.routes is not None)
    return TransformerConfig(**(settings | placement.settings() | plan.transformer | parallel.settings()))


def block_spec(plan: Plan, kit: Kit, layers: range) -> TransformerBlockSubmodules:
    """Return the specs of some of the layers, each with the mixer and the MLP that the plan names, and of the final norm."""
    specs = {layer: _layer_spec(layer, kit) for layer in set(plan.decoder)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[plan.decoder[number]] for number in layers], layer_norm=kit.norm
    )


def _layer_spec(layer: Layer, kit: Kit) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=layer.mixer.qk_norm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = kit.norm
    _MIXERS[layer.mixer.kind](layer.mixer, spec, kit)
    if layer.sparse:
        spec.submodules.mlp = kit.experts
    else:
        spec.submodules.mlp.keywords["submodules"] = kit.linears()
    return spec


def _attention(mixer: Mixer, spec: ModuleSpec, kit: Kit) -> None:
    if kit.whole is not None:
        spec.submodules.self_attention.module = kit.whole
    attention = spec.submodules.self_attention.submodules
    if mixer.qk_norm:
        attention.q_layernorm = attention.k_layernorm = kit.norm
    attention.core_attention = kit.attention
    attention.linear_qkv, attention.linear_proj = kit.column, kit.row


_MIXERS: dict[str, Callable[[Mixer, ModuleSpec, Kit], None]] = {"attention": _attention}
"""Kind of a mixer -> function that puts its modules into a layer's spec."""
