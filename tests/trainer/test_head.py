"""The language-model head, chunk by chunk: the same scores and gradients as from all logits at once, which never exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from artd_schema.run.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.model import logits
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.step.step import Optimizer, train_step
from artd_workers.trainer.tools.score import Piece, score

from . import rig
from .seen import Logits
from .test_losses import make_batch

pytestmark = pytest.mark.torch
WORDS, TOKENS, WIDTH = 300, 40, 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "CHUNK", 7)


def drawn() -> tuple[Tensor, ...]:
    """hidden, weight, targets, temperatures, and what each logprob counts."""
    g = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(TOKENS, WIDTH, generator=g), torch.randn(WORDS, WIDTH, generator=g)
    targets, heat = torch.randint(0, WORDS, (TOKENS,), generator=g), torch.rand(TOKENS, generator=g) + 0.5
    return hidden, weight, targets, heat, torch.randn(TOKENS, generator=g)


def wanted(hidden: Tensor, weight: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    everything = (hidden @ weight.t() / heat[:, None]).log_softmax(-1)
    return everything.gather(-1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


@pytest.mark.parametrize("trained", [False, True])
def test_values_and_gradients_are_those_of_all_logits_in_float64(trained: bool) -> None:
    hidden, weight, targets, heat, counts = drawn()
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs, entropy = wanted(*exact, targets, heat.double())
    (logprobs * counts).sum().backward()
    own = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
    with Logits(WORDS, weight.numel()) as seen:
        found = logits.score_targets(*own, targets, heat)
        (found[0] * counts).sum().backward()
    assert found.dtype == torch.float32 and (found[0] - logprobs).abs().max() <= 1e-5
    assert (found[1] - entropy).abs().max() <= 1e-5
    assert (own[0].grad - exact[0].grad).abs().max() <= 1e-5
    assert (own[1].grad is not None) == trained
    if trained:
        assert (own[1].grad - exact[1].grad).abs().max() <= 1e-5
    assert seen.tokens == 7


@pytest.mark.parametrize("trained", [False, True])
def test_an_entropys_gradient_where_it_is_asked_for(trained: bool) -> None:
    hidden, weight, targets, heat, counts = drawn()
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs, entropy = wanted(*exact, targets, heat.double())
    (logprobs * counts + entropy * counts.square()).sum().backward()
    own = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
    with Logits(WORDS, weight.numel()) as seen:
        found = logits.score_targets(*own, targets, heat, entropy_gradient=True)
        (found[0] * counts + found[1] * counts.square()).sum().backward()
    assert (own[0].grad - exact[0].grad).abs().max() <= 2e-5
    if trained:
        assert (own[1].grad - exact[1].grad).abs().max() <= 2e-5
    assert seen.tokens == 7


def test_an_entropy_gives_no_gradient() -> None:
    hidden, weight, targets, heat, _ = drawn()
    leaf = hidden.clone().requires_grad_()
    logits.score_targets(leaf, weight, targets, heat)[1].sum().backward()
    assert not leaf.grad.any()


def test_no_token_is_no_error() -> None:
    """Of a row whose trained tokens other ranks have."""
    hidden, weight, targets, heat, _ = drawn()
    leaf = hidden[:0].clone().requires_grad_()
    found = logits.score_targets(leaf, weight, targets[:0], heat[:0])
    found.sum().backward()
    assert found.shape == (2, 0) and leaf.grad.shape == (0, WIDTH)


def logits_of(policy: Policy) -> Logits:
    words = policy.plan.vocab_size
    return Logits(words, words * policy.model.config.hidden_size)


@pytest.mark.parametrize("parameters", ["lora", "full"])
def test_a_step_never_has_the_logits_of_a_row(
    toy_folders: dict[str, Path], parameters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients are those of one chunk for all, within fp32's rounding."""
    folder, norms = toy_folders["llama"], []
    for chunk in (10_000, 4):
        monkeypatch.setattr(logits, "CHUNK", chunk)
        if parameters == "lora":
            policy = rig.make_policy(folder)
            trained = policy.lora
        else:
            policy, trained = rig.full_policy(folder)
            trained.initialise(0)
        batch = make_batch()
        with logits_of(policy) as seen:
            found = train_step(policy, Optimizer.make(trained, OptimizerSpec()), batch, LossSpec(), 0)
        assert seen.tokens == min(chunk, *(len(row.at) for row in batch.rows[:1]))
        norms.append((found["loss"], found["grad_norm"], found["entropy"], found["kl_k3"]))
    one, two = norms
    assert one[0] == pytest.approx(two[0], abs=1e-6)
    assert one[1:] == pytest.approx(two[1:], rel=1e-5)


def test_scoring_for_a_mismatch_is_chunked_too(toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = rig.make_policy(toy_folders["llama"])
    g = torch.Generator().manual_seed(6)
    tokens, candidates = torch.randint(3, 1024, (40,), generator=g), torch.randint(3, 1024, (37, 3), generator=g)
    pieces, found = [Piece(tokens, 3, candidates, None)], []
    for chunk in (10_000, 7):
        monkeypatch.setattr(logits, "CHUNK", chunk)
        with logits_of(policy) as seen:
            found.append(score(policy, pieces, "live"))
        assert seen.tokens == min(chunk, 37)
    assert found[0].keys() == found[1].keys()
    for name, column in found[0].items():
        assert len(column) == 37 and (column.double() - found[1][name].double()).abs().max() <= 1e-5, name
