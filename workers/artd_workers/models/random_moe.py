"""Makes a small mixture of experts with random weights: a Qwen3-MoE of a million parameters, as a Hugging Face folder.

Run `python -m artd_workers.models.random_moe OUT_DIR [--seed N] [--std S]` in the megatron runtime. The model learns in minutes
on two cores, and its routing is as sensitive as a real model's. The same arguments give the same bytes. Its vocabulary has
words without meaning and no special token, so only length ends a sequence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .folder import create_folder, write_json
from .words import write_tokenizer

STD = 0.08
"""Standard deviation of every matrix. At 0.02, where training usually starts, experts add so little that a different choice of
expert hardly changes a logprob, and router replay would have no effect to show."""
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.0, "output_router_logits": False,
    "hidden_act": "silu", "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "use_cache": True,
    "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (Hugging Face name, shape) of every weight, in order; matrices are [out, in]."""
    c = CONFIG
    hidden, head, inner = c["hidden_size"], c["head_dim"], c["moe_intermediate_size"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            yield f"{stem}.self_attn.{name}_proj.weight", (size, hidden)
        yield f"{stem}.self_attn.o_proj.weight", (hidden, q)
        for name in ("q_norm", "k_norm"):
            yield f"{stem}.self_attn.{name}.weight", (head,)
        yield f"{stem}.mlp.gate.weight", (c["num_experts"], hidden)
        for expert in range(c["num_experts"]):
            for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                yield f"{stem}.mlp.experts.{expert}.{name}_proj.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{stem}.{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)


def make(out: Path, seed: int = 0, std: float = STD) -> Path:
    """Write `out` (fp32 safetensors, config, tokenizer) unless it exists. Returns `out`."""
    if out.exists():
        return out
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) * std if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes()
    }
    with create_folder(out) as partial:
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        write_json(partial / "config.json", CONFIG | {"initializer_range": std})
        write_tokenizer(partial, CONFIG["vocab_size"], CONFIG["max_position_embeddings"])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m artd_workers.models.random_moe", description=__doc__.splitlines()[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--std", type=float, default=STD)
    args = parser.parse_args()
    print(make(args.out.absolute(), args.seed, args.std))
    return 0


if __name__ == "__main__":
    sys.exit(main())
