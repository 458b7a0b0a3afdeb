"""The model that the GPU scripts train: Qwen3-30B-A3B's layers, as many as asked for, with seeded random weights; or a dense one's.

`python -m tools.gpu.shape OUT LAYERS FAMILY [tiny]` makes it as a base model that is drawn (`artd_workers.models.seeded`).

Owner of: no state. Invariants: a weight depends on its name alone, so any number of layers and any process draw the same.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artd_workers.models.base import Plan
from artd_workers.models.seeded import make, size_of

STD = 0.02


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12_288,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "qwen3_tied": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "rope_theta": 500_000.0,
    },
}  # fmt: skip
"""Layers of Qwen3-30B-A3B, Qwen3-8B, Qwen3-0.6B and Llama-3.1-8B."""
COMMON = {
    "vocab_size": 151_936, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def config(layers: int, tiny: bool = False, family: str = "qwen3_moe") -> dict[str, Any]:
    """A Hugging Face config. tiny: a model of the same kind for a CPU."""
    found = COMMON | FAMILIES[family] | {"num_hidden_layers": layers}
    return found | ({key: value for key, value in SMALL.items() if key in found} if tiny else {})


class RandomWeights(Mapping[str, Tensor]):
    """The plan's weights in Hugging Face names, drawn when asked for: N(0, STD), norms 1; bf16 numbers in `dtype`."""

    def __init__(self, plan: Plan, shape: Mapping[str, Any], device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self._names = tuple(part for row in plan.codec.rows for part in row.parts)
        self._known, self._shape, self._device, self._dtype = set(self._names), shape, device, dtype

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            raise KeyError(name)
        size = size_of(name, self._shape)
        if len(size) == 1:
            return torch.ones(size, dtype=self._dtype, device=self._device)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        drawn = torch.empty(size, dtype=torch.bfloat16, device=self._device).normal_(0, STD, generator=generator)
        return drawn.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def flop_per_token(shape: Mapping[str, Any], trained: float, pairs: float) -> float:
    """What the MFU counts for one packed token: 4 x active weights (forward, and backward through frozen ones) and the
    attention of the mask (4 x head size x heads for each pair forward, twice that backward).

    trained: share of tokens that go through the head; pairs: visible (query, key) pairs for each token. What is recomputed
    and the adapter's own products do not count.
    """
    hidden, head = shape["hidden_size"], shape["head_dim"]
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = hidden * head * (2 * heads + 2 * groups)
    experts = 3 * shape["num_experts_per_tok"] * hidden * shape["moe_intermediate_size"] + hidden * shape["num_experts"]
    layer = 4 * (attention + experts) + 12 * heads * head * pairs
    return shape["num_hidden_layers"] * layer + 4 * trained * hidden * shape["vocab_size"]


if __name__ == "__main__":
    out, layers, family, *rest = sys.argv[1:]
    make(Path(out), config(int(layers), "tiny" in rest, family) | {"max_position_embeddings": 4096}, seed=1)
