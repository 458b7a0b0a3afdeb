"""Llama-style dense decoders (`LlamaForCausalLM`): Llama 2 and 3, SmolLM2 and others of that shape."""

from __future__ import annotations

from .base import HfConfig, Plan, attention, decoder_plan, dense_layers


def plan(config: HfConfig) -> Plan:
    """Plan a model. Raises UnsupportedModel for biases, other activations and rope scalings that are not handled exactly."""
    return decoder_plan("llama", config, dense_layers(config, attention(qk_norm=False)))
