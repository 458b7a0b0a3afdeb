"""The GPU's merge in Triton's interpreter: the bits of the one merge, before they are rounded (the interpreter cuts off)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from artd_schema.wire.direct import Piece
from artd_workers.models.codec import peft_names
from artd_workers.trainer.push.direct.merge_cpu import PlainFiller
from artd_workers.trainer.push.direct.merge_cuda import CudaFiller, Tile
from artd_workers.trainer.push.direct.schedule import Fill

pytestmark = pytest.mark.torch
PARTS = ("one.weight", "two.weight", "bare.weight")
QUEUE = SimpleNamespace(stream=None)


def drawn(rank: int, width: int, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Two sources (the first holds two parts), the adapters of two parts, and the flat tensor that these are views of."""
    generator = torch.Generator().manual_seed(rank * width)
    sources = [torch.randn(rows, width, generator=generator).to(dtype) for rows in (21, 5)]
    flat = torch.randn(2 * rank * width + 21 * rank, generator=generator)
    adapter, at = {}, 0
    for part, rows in zip(PARTS, (13, 8), strict=False):
        for name, shape in zip(peft_names(part), ((rank, width), (rows, rank)), strict=True):
            size = shape[0] * shape[1]
            adapter[name], at = flat[at : at + size].view(shape), at + size
    return sources, adapter, flat


def turns(width: int) -> list[list[Fill]]:
    """A whole part, the last rows of another, and a part without an adapter; then the rest."""

    def fill(source: int, part: int, first: int, begin: int, rows: int, at: int) -> Fill:
        return Fill(Piece(0, 0, part, 0, first * width, source, begin * width, rows * width), at * width)

    return [[fill(0, 0, 0, 0, 13, 0), fill(0, 1, 3, 16, 5, 13), fill(1, 2, 0, 0, 5, 18)], [fill(0, 1, 0, 13, 3, 2)]]


@pytest.mark.parametrize(
    ("rank", "width", "tile"),
    [(16, 48, None), (3, 40, Tile(4, 2, 32, 1)), (1, 33, Tile(5, 3, 32, 2)), (20, 32, Tile(64, 4, 64, 1))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_the_one_merge(rank: int, width: int, tile: Tile | None, dtype: torch.dtype) -> None:
    weights, adapter, flat = drawn(rank, width, dtype)
    plan = turns(width)
    wanted, found = (torch.full((24 * width,), 7.0) for _ in range(2))
    exact = PlainFiller(plan, weights, PARTS, adapter, 0.3)
    fast = CudaFiller(plan, weights, PARTS, adapter, flat, 0.3, tile)
    for turn in range(len(plan)):
        exact.fill(turn, wanted, QUEUE)
        fast.fill(turn, found, QUEUE)
        assert torch.equal(found, wanted)


def test_weights_that_are_only_cast() -> None:
    weights, _, _ = drawn(1, 48, torch.bfloat16)
    out = torch.zeros(24 * 48)
    CudaFiller(turns(48), weights, PARTS, {}, torch.empty(8), 1.0).fill(0, out, QUEUE)
    assert torch.equal(out[: 13 * 48], weights[0][:13].float().flatten())


def test_a_thread_holds_what_its_registers_have_room_for() -> None:
    assert [Tile.of(rank).columns for rank in (1, 8, 16, 24, 64, 512)] == [256, 256, 256, 128, 64, 32]
