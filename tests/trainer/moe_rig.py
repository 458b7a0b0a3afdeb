"""A Qwen3-MoE of a few thousand parameters, made in memory, cheap enough to build several in one test file; and rows for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from artd_schema.data.trajectory import RouteShape
from artd_workers.models.base import Plan
from artd_workers.models.registry import plan_for
from artd_workers.trainer.batch.rows import PackedRow
from artd_workers.trainer.model.model import ALONE, Policy, build
from artd_workers.trainer.parallel.layout import Parallel

from . import rig, routes_rig
from .rig import Piece

SHAPE = RouteShape(layers=4, topk=2, experts=8)
VOCAB = 1024
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": SHAPE.layers,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": SHAPE.experts,
    "num_experts_per_tok": SHAPE.topk,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def plan(**transformer: Any) -> Plan:
    """The plan; `transformer`: more settings of TransformerConfig."""
    made = plan_for(CONFIG)
    return replace(made, transformer=made.transformer | transformer)


def weights(std: float = 0.15) -> dict[str, Tensor]:
    """Random weights in Hugging Face names; norms are 1 + 0.05 N(0, 1), so that a wrong one is seen."""
    generator = torch.Generator().manual_seed(11)
    out = {}
    for row in plan().codec.rows:
        for name in row.parts:
            size = _size(name)
            noise = torch.randn(size, generator=generator)
            out[name] = noise * std if len(size) > 1 else 1 + 0.05 * noise
    return out


def _size(name: str) -> tuple[int, ...]:
    hidden, inner, head = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["head_dim"]
    heads, groups = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    sizes = {
        "embed_tokens": (VOCAB, hidden),
        "lm_head": (VOCAB, hidden),
        "q_proj": (heads, hidden),
        "k_proj": (groups, hidden),
        "v_proj": (groups, hidden),
        "o_proj": (hidden, heads),
        "gate": (SHAPE.experts, hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "q_norm": (head,),
        "k_norm": (head,),
    }
    return sizes.get(name.removesuffix(".weight").rpartition(".")[2], (hidden,))


def policy(parallel: Parallel = ALONE, **transformer: Any) -> Policy:
    """Without LoRA, every weight with a gradient."""
    made = plan(**transformer)
    found = Policy(made, build(made, weights(), parallel), None)
    found.model.requires_grad_(True)
    return found


# ---- rows -----------------------------------------------------------------------------------------------------------

_G = torch.Generator().manual_seed(5)


def ids(n: int) -> Tensor:
    return torch.randint(3, VOCAB, (n,), generator=_G)


def tree(*sizes: int) -> PackedRow:
    """A prompt and answers to it."""
    prompt, *answers = (ids(size) for size in sizes)
    return rig.only_row([Piece(prompt), *(Piece(answer, parent=0, trained_from=1) for answer in answers)], sum(sizes))


ROWS = [tree(9, 6, 5), tree(8, 4, 4, 4), tree(7, 4)]
"""The first two are of one length; the third is of an odd one."""
FOREIGN = [routes_rig.random_routes(SHAPE, len(row.tokens), seed=i).to(torch.uint8) for i, row in enumerate(ROWS)]
"""Routes for each row that the live routers would not take."""


def loss(policy: Policy, row: int, routes: Tensor | None) -> Tensor:
    """Minus the sum of the row's trained logprobs."""
    r = ROWS[row]
    return -policy.score(r.tokens, r.positions, r.hidden_from, r.at, r.targets, r.temperatures, routes).logprobs.sum()


Gradients = dict[str, Tensor]


def gradients(policy: Policy) -> Gradients:
    """What lies in `.grad`, which is then empty."""
    found = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return found


def trained(policy: Policy, row: int, routes: Tensor | None) -> tuple[Tensor, Gradients]:
    """Loss and all gradients of one row in a step of its own."""
    with policy.open_replay(True) as step:
        value = loss(policy, row, routes)
        value.backward()
        step.finish()
    return value.detach(), gradients(policy)


def folder(path: Path) -> Path:
    """The model as a checkpoint folder."""
    path.mkdir(parents=True)
    save_file(weights(), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path
