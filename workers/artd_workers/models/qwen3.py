"""Qwen3 dense decoders (`Qwen3ForCausalLM`): as Llama, with RMSNorm on each head's queries and keys."""

from __future__ import annotations

from .base import HfConfig, Plan, dense_plan


def plan(config: HfConfig) -> Plan:
    """Raises UnsupportedModel for sliding windows, biases and rope scalings that are not handled exactly."""
    return dense_plan("qwen3", config, qk_norm=True)
