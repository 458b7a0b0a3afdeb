"""The kernels of experts with adapters in Triton's interpreter against the plain torch beside their caller.

Half precision stands for bf16, whose products the interpreter cannot make.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from artd_workers.trainer.model.experts.routed import Order, PlainAdapted
from artd_workers.trainer.model.kernels import adapted

pytestmark = pytest.mark.torch
TOKENS, TOPK, EXPERTS, HIDDEN, INNER, RANK = 61, 3, 5, 136, 72, 3
JOINED, ALONE = 2 * RANK + 2, RANK + 5
"""Ranks of a gate and up together, and of a linear by itself, each with the zeros beside them."""
DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3}


def draw(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + sum(size))).to(dtype)


def way() -> Order:
    """One expert with more rows than a tile, one with none."""
    scores = draw(TOKENS, EXPERTS)
    scores[:, 1] += 9
    scores[:, 3] -= 9
    return Order.of(scores.topk(TOPK).indices, EXPERTS)


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert (found.float() - wanted.float()).abs().max() <= DTYPES[dtype] * (1 + wanted.float().abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_gathered_and_narrowed(dtype: torch.dtype) -> None:
    x, one = draw(TOKENS, HIDDEN, dtype=dtype), way()
    for weight in (
        draw(EXPERTS, HIDDEN, ALONE, dtype=dtype),
        draw(EXPERTS, ALONE, HIDDEN, dtype=dtype).transpose(1, 2),
    ):
        found, wanted = adapted.gather(x, one, weight), PlainAdapted.gather(x, one, weight)
        assert torch.equal(found[0], wanted[0])
        near(found[1], wanted[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thin_product_is_added_in_place(dtype: torch.dtype) -> None:
    one, low = way(), draw(TOKENS * TOPK, ALONE, dtype=dtype)
    for weight in (
        draw(EXPERTS, ALONE, HIDDEN, dtype=dtype),
        draw(EXPERTS, HIDDEN, ALONE, dtype=dtype).transpose(1, 2),
    ):
        found = draw(TOKENS * TOPK, HIDDEN, dtype=dtype)
        wanted = found.clone()
        adapted.widen(found, low, weight, one)
        PlainAdapted.widen(wanted, low, weight, one)
        near(found, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_with_adapters_and_its_gradient(dtype: torch.dtype) -> None:
    one, probs = way(), draw(TOKENS * TOPK).sigmoid()
    low, b = draw(TOKENS * TOPK, JOINED, dtype=dtype), draw(EXPERTS, 2 * INNER, JOINED, dtype=dtype)
    a = draw(EXPERTS, ALONE, INNER, dtype=dtype)
    found = draw(TOKENS * TOPK, 2 * INNER, dtype=dtype)
    wanted = found.clone()
    for got, right in zip(
        (*adapted.activate(found, low, b, a, probs, one), found),
        (*PlainAdapted.activate(wanted, low, b, a, probs, one), wanted),
        strict=True,
    ):
        near(got, right, dtype)
    slope, small = draw(TOKENS * TOPK, INNER, dtype=dtype), draw(TOKENS * TOPK, ALONE, dtype=dtype)
    for got, right in zip(
        adapted.activate_backward(slope, small, a, wanted, b, probs, one),
        PlainAdapted.activate_backward(slope, small, a, wanted, b, probs, one),
        strict=True,
    ):
        near(got, right, dtype)


class OnePair:
    """Adapters whose joined matrices are those of `GroupedAdapter`."""

    def __init__(self, parts: int, width: int, out: int) -> None:
        self.a, self.b = nn.Parameter(draw(EXPERTS, parts, RANK, width)), nn.Parameter(draw(EXPERTS, parts, out, RANK))
        self.scale = 0.5

    def join(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def gradients(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.a.shape[1]
        d_b = b.unflatten(1, (parts, -1))
        blocks = [d_b[:, i, :, i * RANK : (i + 1) * RANK] for i in range(parts)]
        return self.scale * a[:, : parts * RANK].unflatten(1, (parts, RANK)).float(), torch.stack(blocks, 1).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "by_token"), [(1, False), (2, True)])
def test_gradients_reach_the_masters(dtype: torch.dtype, parts: int, by_token: bool) -> None:
    one, pair = way(), OnePair(parts, HIDDEN, INNER)
    rows, across = TOKENS if by_token else TOKENS * TOPK, 8
    x, slope = draw(rows, HIDDEN, dtype=dtype), draw(rows, parts * INNER, dtype=dtype)
    low, d_low = (draw(TOKENS * TOPK, across, dtype=dtype, seed=i) for i in (1, 2))
    found, wanted = (
        steps.gradients(pair, one, (x, by_token), low, (slope, by_token), d_low) for steps in (adapted, PlainAdapted)
    )
    for got, right in zip(found, wanted, strict=True):
        near(got, right, dtype)


def test_no_row_at_all() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    none = replace(way(), order=empty, place=empty, ends=torch.zeros(EXPERTS, dtype=torch.int32))
    rows, low = adapted.gather(draw(0, HIDDEN), none, draw(EXPERTS, HIDDEN, ALONE))
    assert rows.shape == (0, HIDDEN) and low.shape == (0, ALONE)
