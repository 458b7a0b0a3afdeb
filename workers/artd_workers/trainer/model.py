"""Megatron-Core's GPTModel on CPU: built from a plan, with any mask, any positions and LoRA, and no patch of any library.

Purpose: `build` makes the module; `Policy` computes logprobs of chosen tokens. Owner of: the process-wide gloo group of one
rank that Megatron asks for (rendezvous in memory: no port of ours listens beyond loopback).
Invariants: weights and arithmetic are float32 whatever the checkpoint stores (a bf16 checkpoint is widened, exactly);
base weights never require a gradient unless a test asks; no dropout, so a forward draws no random numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..models.base import Plan
from .lora import Lora, LoraColumnLinear, LoraRowLinear

CPU = {
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
"""TransformerConfig of every model here: every fusion needs CUDA or a compiler, so all are off."""


class MaskedAttention(MegatronModule):
    """Core attention by torch's scaled dot product with an explicit mask.

    query [s, b, heads, d], key and value [s, b, groups, d], mask bool [b, 1, s, s] with True = hidden; gives
    [s, b, heads * d].
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, /, **_: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=~attention_mask, scale=self.scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)


class ExplicitRotary(RotaryEmbedding):
    """Rotary angles of the positions that were set before the forward, instead of 0, 1, 2, ..."""

    positions: Tensor | None = None

    def forward(self, max_seq_len: int, *_: Any, **__: Any) -> Tensor:
        """Angles [s, b, 1, d] of `positions` [b, s]."""
        if self.positions is None or self.positions.shape[1] != max_seq_len:
            raise ValueError(f"set the positions of all {max_seq_len} tokens before a forward")
        angles = self.positions.to(self.inv_freq.dtype)[..., None] * self.inv_freq
        return torch.cat((angles, angles), -1).transpose(0, 1)[:, :, None, :]


def start_distributed() -> None:
    """Make the one-rank gloo group that Megatron needs. Idempotent."""
    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def _layer_spec(qk_norm: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = MaskedAttention
    attention.linear_qkv, attention.linear_proj = LoraColumnLinear, LoraRowLinear
    mlp = spec.submodules.mlp.keywords["submodules"]
    mlp.linear_fc1, mlp.linear_fc2 = LoraColumnLinear, LoraRowLinear
    return spec


def build(plan: Plan, weights: Mapping[str, Tensor]) -> GPTModel:
    """A GPTModel with these base weights (Hugging Face names), frozen, in eval mode. Raises ValueError if they misfit."""
    start_distributed()
    config = TransformerConfig(**CPU, **plan.transformer)
    model = GPTModel(config, _layer_spec(plan.qk_norm), position_embedding_type="rope", **plan.model)
    rope = {name: value for name, value in plan.model.items() if name.startswith(("rotary_", "rope_"))}
    model.rotary_pos_emb = ExplicitRotary(config.kv_channels, 1.0, use_cpu_initialization=True, **rope)
    load_base(model, plan, weights)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def load_base(model: GPTModel, plan: Plan, weights: Mapping[str, Tensor]) -> None:
    """Copy base weights in. Raises ValueError when names or shapes are not the plan's."""
    parameters = dict(model.named_parameters())
    for name, tensor in plan.codec.to_megatron(weights):
        parameter = parameters.pop(name)
        if parameter.shape != tensor.shape:
            raise ValueError(
                f"{name}: the checkpoint has {tuple(tensor.shape)}, config.json says {tuple(parameter.shape)}"
            )
        parameter.copy_(tensor)
    if left := sorted(name for name in parameters if ".adapter." not in name):
        raise ValueError(f"the weight table leaves {left[0]} unset")


@dataclass(frozen=True)
class Scores:
    """Per scored token [n]: logprob (natural log, at its temperature) and, without gradient, the entropy in nats."""

    logprobs: Tensor
    entropy: Tensor


class Policy:
    """Model and adapter together. `lora` None = the base model."""

    def __init__(self, plan: Plan, model: GPTModel, lora: Lora | None) -> None:
        self.plan, self.model, self.lora = plan, model, lora
        if lora is not None:
            lora.attach(model)

    def hidden_logits(self, tokens: Tensor, positions: Tensor, hidden_from: Tensor, rows: Tensor) -> Tensor:
        """Logits [n, vocab] at `rows` [n] of one packed row.

        tokens, positions: int64 [s]; hidden_from: bool [s, s], True where query q (first) must not see key k. Only `rows`
        go through the language-model head.
        """

        def project(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
            logits, _bias = output_layer(hidden_states[rows], weight=output_weight)
            return logits[:, 0]

        self.model.rotary_pos_emb.positions = positions[None]
        return self.model(tokens[None], positions[None], hidden_from[None, None], output_processor=project)

    def score(
        self,
        tokens: Tensor,
        positions: Tensor,
        hidden_from: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperatures: Tensor,
    ) -> Scores:
        """Logprobs of `targets` [n] as predicted at `rows` [n], each at its temperature [n] (> 0)."""
        logits = self.hidden_logits(tokens, positions, hidden_from, rows).float() / temperatures[:, None]
        logprobs = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return Scores(logprobs.gather(-1, targets[:, None])[:, 0], entropy)

    def score_sequence(self, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """Logprobs [s - 1] of tokens 1.. of a plain sequence [s], without gradient."""
        size = len(tokens)
        hidden_from = torch.ones(size, size, dtype=torch.bool).triu(1)
        rows = torch.arange(size - 1)
        with torch.no_grad():
            temperatures = torch.full((size - 1,), temperature)
            return self.score(tokens, torch.arange(size), hidden_from, rows, tokens[1:], temperatures).logprobs
