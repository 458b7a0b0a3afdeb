"""The GPU's checksums in Triton's interpreter: the sums of the reference, alone and with the copy that they check."""

from __future__ import annotations

import pytest
import torch

from artd_workers.engines.direct import kernels
from artd_workers.engines.direct.checksum import BLOCK, WORD, Blocks, Span, sum_of

pytestmark = pytest.mark.torch


def spans(data: torch.Tensor, others: torch.Tensor | None = None) -> list[Span]:
    """Three: two of part 0 that follow each other, one of part 1 longer than a block."""
    cuts = ((0, 30, 0, 0), (30, 41, 30, 0), (41, len(data), 0, 1))
    return [
        Span(data.data_ptr() + a * WORD, first, b - a, part, others.data_ptr() + a * WORD if others is not None else 0)
        for a, b, first, part in cuts
    ]


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-(2**62), 2**62, (41 + BLOCK + 17,), generator=generator)


def test_the_sums_of_the_reference(data):
    table, sums = kernels.Table(Blocks.cut(spans(data), "cpu")), torch.zeros(2, dtype=torch.int64)
    table.sum(sums, (0, 3))
    assert sums.tolist() == [sum_of(data[:41]), sum_of(data[41:])]


def test_some_spans_alone(data):
    table, sums = kernels.Table(Blocks.cut(spans(data), "cpu")), torch.zeros(2, dtype=torch.int64)
    table.sum(sums, (1, 2))
    table.sum(sums, (1, 1))
    first = sums.tolist()
    table.sum(sums, (0, 1))
    assert first[0] not in (0, sum_of(data[:41])) and sums.tolist() == [sum_of(data[:41]), 0]


def test_copied_and_summed(data):
    there = torch.zeros_like(data)
    table, sums = kernels.Table(Blocks.cut(spans(there, data), "cpu")), torch.zeros(2, dtype=torch.int64)
    assert not there.any()  # what is compiled ahead copies nothing
    table.sum(sums, (0, 3), copy=True)
    assert torch.equal(there, data) and sums.tolist() == [sum_of(data[:41]), sum_of(data[41:])]


def test_both_kernels_are_compiled_with_the_table(data, monkeypatch):
    asked = []
    monkeypatch.setattr(
        kernels.Table,
        "_launch",
        lambda self, skip, count, words, sums, copy: asked.append((count, int(words.sum()), copy)),
    )
    kernels.Table(Blocks.cut(spans(data), "cpu"))
    assert asked == [(1, 0, False), (1, 0, True)]
