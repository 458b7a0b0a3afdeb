"""Llama-style dense decoders (`LlamaForCausalLM`): Llama 2 and 3, SmolLM2 and others of that shape."""

from __future__ import annotations

from .base import HfConfig, Plan, dense_plan


def plan(config: HfConfig) -> Plan:
    """Raises UnsupportedModel for biases, other activations and rope scalings that are not handled exactly."""
    return dense_plan("llama", config, qk_norm=False)
