"""Makes toy checkpoints: a tiny Llama, Qwen3 or Qwen3-MoE with a byte-level BPE tokenizer and a chat template.

They have a real form and a small size, for trainer, engine and end-to-end tests. Command line: `PYTHON tests/toys.py OUT_DIR
[--family llama|qwen3|qwen3_moe] [--seed N] [--tied]`. It needs torch, tokenizers and safetensors only, and no network. The same
arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

VOCAB = 1024
HIDDEN = 128
LAYERS = 3
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
FFN = 256
EXPERTS = 8
TOPK = 2
EXPERT_FFN = 64
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "What is the capital of France? Answer with the city name only. Paris. London. Berlin. Rome. Madrid. Vienna.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all; it sleeps in the sun.",
    "A policy is trained from trajectories: a prompt, the tokens that were sampled, their logprobs and a reward.",
    "user assistant system: hello, how are you today? I am fine, thank you. One two three four five six seven.",
    'def add(a: int, b: int) -> int:\n    """Return the sum."""\n    return a + b\n\nprint(add(1, 2))\n',
    "In the beginning there was a small model, and it knew nothing; then it read, and it learned to count to ten.",
)

Config = dict[str, Any]


def config(family: str = "llama", tied: bool = False, **changes: Any) -> Config:
    """Hugging Face config dict of a toy; `changes` override single entries."""
    architecture = {
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }[family]
    common: Config = {
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "llama":
        common["mlp_bias"] = False
    if family == "qwen3_moe":
        common |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOPK,
            "moe_intermediate_size": EXPERT_FFN,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.0,
        }
    return common | changes


def is_sparse(cfg: Config, layer: int) -> bool:
    """Whether a layer has experts in place of an MLP."""
    if cfg["model_type"] != "qwen3_moe" or layer in cfg["mlp_only_layers"]:
        return False
    return (layer + 1) % int(cfg["decoder_sparse_step"]) == 0


def tensors(cfg: Config, seed: int = 0, std: float = 0.08) -> dict[str, Any]:
    """Random fp32 weights in Hugging Face names; norms are 1 + 0.05 N(0, 1) so that a wrong one is seen."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    h, f, d = cfg["hidden_size"], cfg["intermediate_size"], cfg["head_dim"]
    q, kv = cfg["num_attention_heads"] * d, cfg["num_key_value_heads"] * d
    out: dict[str, Any] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        out[name] = torch.randn(rows, columns, generator=generator) * std

    def norm(name: str, size: int) -> None:
        out[name] = 1 + torch.randn(size, generator=generator) * 0.05

    def gated_mlp(prefix: str, inner: int) -> None:
        for name, rows, columns in (("gate_proj", inner, h), ("up_proj", inner, h), ("down_proj", h, inner)):
            matrix(f"{prefix}{name}.weight", rows, columns)

    matrix("model.embed_tokens.weight", cfg["vocab_size"], h)
    for layer in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for name, rows, columns in (("q_proj", q, h), ("k_proj", kv, h), ("v_proj", kv, h), ("o_proj", h, q)):
            matrix(f"{p}self_attn.{name}.weight", rows, columns)
        if cfg["model_type"] != "llama":
            norm(p + "self_attn.q_norm.weight", d)
            norm(p + "self_attn.k_norm.weight", d)
        if is_sparse(cfg, layer):
            matrix(p + "mlp.gate.weight", cfg["num_experts"], h)
            for expert in range(cfg["num_experts"]):
                gated_mlp(f"{p}mlp.experts.{expert}.", cfg["moe_intermediate_size"])
        else:
            gated_mlp(p + "mlp.", f)
        norm(p + "input_layernorm.weight", h)
        norm(p + "post_attention_layernorm.weight", h)
    norm("model.norm.weight", h)
    if not cfg["tie_word_embeddings"]:
        matrix("lm_head.weight", cfg["vocab_size"], h)
    return out


def tokenizer_json() -> str:
    """A byte-level BPE of VOCAB entries, trained on CORPUS and made-up words; ids 0, 1, 2 are PAD, START, END."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[PAD, START, END],
        show_progress=False,
    )
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = " ".join(x + y for x in syllables for y in syllables[::7])
    tokenizer.train_from_iterator([*CORPUS, words], trainer)
    return tokenizer.to_str(pretty=True)


def make(
    out: Path,
    family: str = "llama",
    seed: int = 0,
    tied: bool = False,
    dtype: str = "float32",
    std: float = 0.08,
    **changes: Any,
) -> Path:
    """Write a toy checkpoint folder and return it. dtype: float32 or bfloat16 of the stored weights; std: of matrices."""
    import torch
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    cfg = config(family, tied, **changes) | {"torch_dtype": dtype}
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors(cfg, seed, std).items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(cfg, indent=2) + "\n")
    generation = {"eos_token_id": cfg["eos_token_id"], "pad_token_id": cfg["pad_token_id"]}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (out / "tokenizer.json").write_text(tokenizer_json())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": cfg["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=("llama", "qwen3", "qwen3_moe"), default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tied", action="store_true", help="tie embeddings and head")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    print(make(args.out, args.family, args.seed, args.tied, args.dtype))


if __name__ == "__main__":
    main()
