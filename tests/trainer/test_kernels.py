"""The GPU's kernels in Triton's interpreter against the plain torch beside their callers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from artd_workers.trainer.model import qkv_split
from artd_workers.trainer.model.experts.routed import Order, Plain
from artd_workers.trainer.model.kernels import qkv, sparse

pytestmark = pytest.mark.torch
TOKENS, TOPK, EXPERTS, HIDDEN, INNER = 7, 3, 5, 24, 12
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


def draw(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + sum(size))).to(dtype)


def order() -> Order:
    scores = draw(TOKENS, EXPERTS)
    return Order.of(scores.topk(TOPK).indices, EXPERTS)


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert (found.float() - wanted.float()).abs().max() <= DTYPES[dtype] * (1 + wanted.float().abs().max())


def test_an_order_sorts_slots_by_expert() -> None:
    chosen = draw(TOKENS, EXPERTS).topk(TOPK).indices
    found = Order.of(chosen, EXPERTS)
    sorted_ids = chosen.flatten()[found.order]
    assert torch.equal(sorted_ids, chosen.flatten().sort().values)
    assert torch.equal(found.order[found.place], torch.arange(TOKENS * TOPK))
    assert found.ends.tolist() == [(chosen <= expert).sum().item() for expert in range(EXPERTS)]
    assert found.ends.dtype == torch.int32


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_go_to_experts_and_back(dtype: torch.dtype) -> None:
    x, way = draw(TOKENS, HIDDEN, dtype=dtype), order()
    y = draw(TOKENS * TOPK, HIDDEN, dtype=dtype)
    assert torch.equal(sparse.take(x, way.order, TOPK), Plain.take(x, way.order, TOPK))
    near(sparse.collect(y, way.place, TOPK), Plain.collect(y, way.place, TOPK), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_and_its_gradient(dtype: torch.dtype) -> None:
    way, probs = order(), draw(TOKENS * TOPK).sigmoid()
    both, slope = draw(TOKENS * TOPK, 2 * INNER, dtype=dtype, seed=1), draw(TOKENS * TOPK, INNER, dtype=dtype, seed=3)
    near(sparse.activate(both, probs, way.order), Plain.activate(both, probs, way.order), dtype)
    for a, b in zip(
        sparse.activate_backward(slope, both, probs, way.order),
        Plain.activate_backward(slope, both, probs, way.order),
        strict=True,
    ):
        near(a, b, dtype)


def test_the_plain_gradient_is_autograds() -> None:
    way, probs = order(), draw(TOKENS * TOPK).sigmoid().requires_grad_()
    both = draw(TOKENS * TOPK, 2 * INNER).requires_grad_()
    slope = draw(TOKENS * TOPK, INNER, seed=3)
    out = Plain.activate(both, probs, way.order)
    wanted = torch.autograd.grad(out, (both, probs), slope)
    found = Plain.activate_backward(slope, both.detach(), probs.detach(), way.order)
    for a, b in zip(found, (*wanted, out.detach()), strict=True):
        near(a, b, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_cut_turned_and_padded(dtype: torch.dtype, normed: bool) -> None:
    size, padded, groups, each, dim = 5, 8, 2, 3, 12
    mixed = draw(size, groups, each + 2, dim, dtype=dtype).requires_grad_()
    norms = (1 + 0.1 * draw(dim, dtype=dtype), 1 + 0.1 * draw(dim, dtype=dtype, seed=1)) if normed else None
    angles = draw(size, dim // 2)
    turns = angles.cos(), angles.sin()
    wanted = qkv_split.split_plainly(mixed, norms, turns, padded, 1e-6)
    found = qkv.heads(mixed.detach(), norms, *turns, padded, 1e-6)
    for a, b in zip(found, wanted, strict=True):
        near(a, b.detach(), dtype)
        assert not a[size:].any()
    slopes = [draw(padded, groups * each, dim, dtype=dtype, seed=i) for i in range(3)]
    (slope,) = torch.autograd.grad(wanted, mixed, slopes)
    # As FlexAttention gives them: a head's tokens side by side.
    inward = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in slopes]
    near(qkv.heads_backward(inward, mixed.detach(), norms, *turns, 1e-6), slope, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_their_gradient(dtype: torch.dtype) -> None:
    x, weight = draw(TOKENS, 2, HIDDEN, dtype=dtype).requires_grad_(), 1 + 0.1 * draw(HIDDEN, dtype=dtype)
    wanted = torch.nn.functional.rms_norm(x.float(), (HIDDEN,), weight.float(), 1e-6).to(dtype)
    near(sparse.norm(x.detach(), weight, 1e-6), wanted.detach(), dtype)
    slope = draw(TOKENS, 2, HIDDEN, dtype=dtype, seed=1)
    (grad,) = torch.autograd.grad(wanted, x, slope)
    near(sparse.norm_backward(slope, x.detach(), weight, 1e-6), grad, dtype)
