"""Qwen3 dense decoders (`Qwen3ForCausalLM`): as Llama, with RMSNorm on each head's queries and keys."""

from __future__ import annotations

from .base import HfConfig, Plan, attention, decoder_plan, dense_layers


def plan(config: HfConfig) -> Plan:
    """Plan a model. Raises UnsupportedModel for sliding windows, biases and rope scalings that are not handled exactly."""
    return decoder_plan("qwen3", config, dense_layers(config, attention(qk_norm=True)))
