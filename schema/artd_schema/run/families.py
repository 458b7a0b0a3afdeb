"""Model families that artd can train, by the `architectures` entry of a Hugging Face `config.json`.

Each names its module of `artd_workers.models`, whose `plan(config)` says how to build and store it; daemon and client refuse an unknown model by
this table, without importing them. A family is that file and a line here.
"""

from __future__ import annotations

from collections.abc import Collection

FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
SEEDED = "seeded.json"
"""A base model has this file in place of safetensors if its weights are random (`artd_workers.models.seeded`). The
file's bytes determine them all."""


def sparse_layers(layers: int, experts: int, step: int, dense: Collection[int]) -> list[bool]:
    """Return for each layer whether it has experts, by the rule of transformers' Qwen3MoeDecoderLayer. `experts` is the
    number in a sparse layer; `step` and `dense` are `decoder_sparse_step` and `mlp_only_layers` of the config."""
    return [i not in dense and experts > 0 and (i + 1) % step == 0 for i in range(layers)]
