"""Model families that artd can train, by the `architectures` entry of a Hugging Face `config.json`.

The codecs live in `artd_workers.models`; this table lets daemon and client refuse an unknown model without importing
them.
"""

FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
