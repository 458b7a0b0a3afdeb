"""Says which of a checkpoint's tensors vLLM keeps as one. The names are those of vLLM 0.25.1."""

from __future__ import annotations

import re

_FUSED: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), parts)
    for pattern, parts in (
        (r"(.*\.self_attn)\.qkv_proj\.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
        (r"(.*\.mlp)\.gate_up_proj\.weight", ("gate_proj.weight", "up_proj.weight")),
        (r"(.*\.mlp\.experts)(?:\.routed_experts)?\.w13_weight", ("{e}.gate_proj.weight", "{e}.up_proj.weight")),
        (r"(.*\.mlp\.experts)(?:\.routed_experts)?\.w2_weight", ("{e}.down_proj.weight",)),
    )
)
"""vLLM's name -> the tensors that it joins along the output, for each expert {e} where there are experts."""


def parts_of(name: str) -> tuple[str, ...]:
    """Return `EngineTensor.parts` of a parameter."""
    for pattern, parts in _FUSED:
        if found := pattern.fullmatch(name):
            return tuple(f"{found[1]}.{part}" for part in parts)
    return ()
