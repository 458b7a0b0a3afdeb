"""Experts with LoRA adapters on a CPU, in plain torch.

With adapters vLLM 0.32 chooses its Triton experts even on a CPU, where they end the engine at the first request. This class
replaces them: each token gets the base weights plus the adapter of its own request, expert by expert. Adapters are in vLLM's
own slots (see `MoELoRAContext`). Weights stay as they were loaded (nothing is packed), and there is one worker without expert
parallelism. It is made to be correct, and fast enough for small models.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as method
from torch import Tensor
from torch.nn.functional import silu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.platforms import current_platform

_NONE = -1
"""The slot of a token whose request uses no adapter."""


class LoraExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """vLLM's experts with adapters. Slots of adapters: `w13_lora_a` [slots, experts, r, hidden] and so on, first gate and then
    up."""

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        parallel = moe_config.moe_parallel_config
        if (
            moe_config.activation != MoEActivation.SILU
            or moe_config.has_bias
            or parallel.tp_size * parallel.ep_size > 1
        ):
            raise ValueError(
                "adapters on these experts are served on CPU only by one worker, with silu and without biases: "
                "use rollout_weights_mode='merged'"
            )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: Any, global_num_experts: int, expert_map: Tensor | None, a1q_scale: Any, a2_scale: Any,
        workspace13: Any, workspace2: Any, expert_tokens_meta: Any, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Fill output [tokens, hidden] with the sum over a token's experts of weight x expert(token).

        `w1`: [experts, gate and up, hidden]. `w2`: [experts, hidden, inner]. `topk_weights`, `topk_ids`: [tokens,
        topk].
        """
        slots = self._slots(len(hidden_states))
        total = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            token, place = (topk_ids == expert).nonzero(as_tuple=True)
            y = self._expert(hidden_states[token], w1[expert], w2[expert], expert, slots[token]).float()
            if not apply_router_weight_on_input:  # else the tokens are weighted already
                y *= topk_weights[token, place, None].float()
            total.index_add_(0, token, y)
        output.copy_(total)

    def _slots(self, tokens: int) -> Tensor:
        """Return the slot of each token's adapter."""
        if self._lora_context is None:
            return torch.full((tokens,), _NONE)
        return self._lora_context.punica_wrapper.token_lora_indices[:tokens]

    def _expert(self, x: Tensor, w1: Tensor, w2: Tensor, expert: int, slots: Tensor) -> Tensor:
        """Return one expert's output for its tokens x [n, hidden], each with its own adapter."""
        gate, up = (x @ w1.t()).chunk(2, -1)
        groups = [(slot, slots == slot) for slot in slots.unique().tolist() if slot != _NONE]
        context = self._lora_context
        for slot, mine in groups:
            for part, a, b in zip((gate, up), context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True):
                part[mine] += (x[mine] @ a[slot, expert].t()) @ b[slot, expert].t()
        inner = silu(gate) * up
        y = inner @ w2.t()
        for slot, mine in groups:
            a, b = context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0]
            y[mine] += (inner[mine] @ a[slot, expert].t()) @ b[slot, expert].t()
        return y


def install() -> None:
    """Make vLLM choose `LoraExperts` where it is started with adapters on a CPU. Call it before the model is built."""
    stock = method.select_unquantized_moe_backend

    def select(moe_config: Any) -> Any:
        if moe_config.is_lora_enabled and current_platform.is_cpu():
            return UnquantizedMoeBackend.CPU, LoraExperts
        return stock(moe_config)

    method.select_unquantized_moe_backend = select
