"""The GPU's checksums in Triton's interpreter: the sums of the reference, alone and with the copy that they check."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import pytest
import torch

from artd_workers.transfer import checksum_kernels
from artd_workers.transfer.checksum import BLOCK, WORD, Blocks, Span, sum_of
from tests.direct_rig import MemoryQueue

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
    table, sums = checksum_kernels.Table(Blocks.cut(spans(data), "cpu")), torch.zeros(2, dtype=torch.int64)
    table.sum(sums, (0, 3))
    assert sums.tolist() == [sum_of(data[:41]), sum_of(data[41:])]


def test_some_spans_alone(data):
    table, sums = checksum_kernels.Table(Blocks.cut(spans(data), "cpu")), torch.zeros(2, dtype=torch.int64)
    table.sum(sums, (1, 2))
    table.sum(sums, (1, 1))
    first = sums.tolist()
    table.sum(sums, (0, 1))
    assert first[0] not in (0, sum_of(data[:41])) and sums.tolist() == [sum_of(data[:41]), 0]


def test_copied_and_summed(data):
    there = torch.zeros_like(data)
    table, sums = checksum_kernels.Table(Blocks.cut(spans(there, data), "cpu")), torch.zeros(2, dtype=torch.int64)
    assert not there.any()  # what is compiled ahead copies nothing
    table.sum(sums, (0, 3), copy=True)
    assert torch.equal(there, data) and sums.tolist() == [sum_of(data[:41]), sum_of(data[41:])]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_table_has_the_alignment_that_its_kernels_were_compiled_for(data, count):
    """Triton compiles anew for a pointer that 16 does not divide: a table of an odd number of blocks would wait for that."""
    table = checksum_kernels.Table(Blocks.cut([Span(data.data_ptr(), 0, 4, 0)] * count, "cpu"))
    columns = (table._here, table._there, table._first, table._words, table._part)
    begin = table._here.data_ptr()
    assert [(one.data_ptr() - begin) % 16 for one in columns] == [0] * len(columns)


def test_all_kernels_are_compiled_with_the_table(data, monkeypatch):
    asked = []

    def launch(self, skip, count, words, part, sums, copy, rows):
        assert int(part.max()) < len(sums), "it would add to memory of others"
        asked.append((count, int(words.sum()), copy, rows))

    monkeypatch.setattr(checksum_kernels.Table, "_launch", launch)
    late = [replace(span, part=7) for span in spans(data)]
    checksum_kernels.Table(Blocks.cut(late, "cpu"))
    plain = [(1, 0, False, False), (1, 0, True, False)]
    assert asked == plain
    checksum_kernels.Table(Blocks.cut([*late, Span(data.data_ptr(), 0, 4, 0, 0, 2, 3)], "cpu"))
    assert asked == [*plain, *plain, (1, 0, False, True), (1, 0, True, True)]


@pytest.mark.parametrize(
    ("widths", "together"), [((5, 3, 9), False), ((1, 16), True), ((2048, 4099), True), ((BLOCK + 3, 2), False)]
)
def test_columns_make_up_the_whole(widths, together):
    """Each column in memory of its own, its rows together, or in the whole tensor; one span, longer than a block."""
    pitch, rows = sum(widths), 3 + 2 * BLOCK // sum(widths)
    whole = torch.randint(-(2**62), 2**62, (rows, pitch), generator=torch.Generator().manual_seed(pitch))
    columns, spans, left = [], [], 0
    for width in widths:
        columns.append(whole[:, left : left + width].contiguous())
        at = columns[-1].data_ptr() if together else whole.data_ptr() + left * WORD
        spans.append(Span(at, 7 + left, rows * width, 0, 0, width, pitch, 0 if together else pitch))
        left += width
    spans.append(Span(whole.data_ptr(), 0, whole.numel(), 1))
    table, sums = checksum_kernels.Table(Blocks.cut(spans, "cpu")), torch.zeros(2, dtype=torch.int64)
    table.sum(sums, (0, len(spans)))
    assert sums.tolist() == [sum_of(whole, 7), sum_of(whole)]
    table.sum(sums.zero_(), (len(spans) - 1, len(spans)))
    assert sums.tolist() == [0, sum_of(whole)]


def test_columns_copied_and_summed():
    whole = torch.randint(-(2**62), 2**62, (37, 11), generator=torch.Generator().manual_seed(5))
    there = torch.zeros_like(whole)
    cuts = ((0, 4), (4, 11))
    spans = [
        Span(there.data_ptr() + a * WORD, a, 37 * (b - a), 0, whole.data_ptr() + a * WORD, b - a, 11, 11)
        for a, b in cuts
    ]
    table, sums = checksum_kernels.Table(Blocks.cut(spans, "cpu")), torch.zeros(1, dtype=torch.int64)
    table.sum(sums, (0, 1), copy=True)
    assert torch.equal(there[:, :4], whole[:, :4]) and not there[:, 4:].any()
    table.sum(sums, (1, 2), copy=True)
    assert torch.equal(there, whole) and sums.tolist() == [sum_of(whole)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("even", [False, True])
def test_spans_of_all_sorts_in_one_table(seed, even):
    """Rows of any width and pitch, in memory apart or together, beside words that lie together; even: all begin and end at 16 bytes,
    where a GPU loads two words at once. In two tables, as of two feeds, beside plain memory's sums."""
    choose = torch.Generator().manual_seed(seed)

    def some(least: int, most: int) -> int:
        number = int(torch.randint(least, most, (), generator=choose))
        return number + (number % 2 if even else 0)

    data = torch.randint(-(2**62), 2**62, (2, 1 << 17), generator=choose)
    found, wanted, (here, there) = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), data
    for first in (0, 1 << 33):
        spans, at = [], some(0, 9)
        for part in (0, 1, 2, 1, 0):
            width, rows, plain = some(1, 900), some(1, 40), some(0, 2) == 0
            step, words = (0, width * rows) if plain else (width + some(0, 300), width * rows)
            shape = (0, 0, 0) if plain else (width, width + some(0, 70), step)
            place, other = (one.data_ptr() + at * WORD for one in (here, there))
            spans.append(Span(place, first + part, words, part, other, *shape))
            at += some(0, 5) + max(words, rows * step)
        assert at <= len(here)
        before = here.clone()
        table = checksum_kernels.Table(Blocks.cut(spans, "cpu"))
        assert table._aligned == 1 + even or here.data_ptr() % 16
        table.sum(found, (0, 3))
        table.sum(found, (3, 5), copy=True)
        copied = here.clone()
        here.copy_(before)
        MemoryQueue().sum(spans, wanted, (0, 3))
        MemoryQueue().sum(spans, wanted, (3, 5), copy=True)
        assert torch.equal(here, copied) and not torch.equal(here, before)
    assert found.tolist() == wanted.tolist()


def test_offsets_beyond_32_bits(tmp_path):
    """Rows that lie 8 GiB apart in a file full of holes, at positions behind the 32nd bit."""
    step, width, rows, pitch = (1 << 30) + 3, 5, 3, 1 << 34
    size = ((rows - 1) * step + width) * WORD
    with (tmp_path / "holes").open("w+b") as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
        begin = ctypes.c_char.from_buffer(memory)
        at = ctypes.addressof(begin)
        data = torch.randint(-(2**62), 2**62, (rows, width), generator=torch.Generator().manual_seed(1))
        span = Span(at, 7, data.numel(), 0, 0, width, pitch, step)
        for row, words in enumerate(data):
            ctypes.memmove(at + row * step * WORD, words.data_ptr(), width * WORD)
        table, sums = checksum_kernels.Table(Blocks.cut([span], "cpu")), torch.zeros(1, dtype=torch.int64)
        table.sum(sums, (0, 1))
        wanted = [sum_of(words, 7 + row * pitch) for row, words in enumerate(data)]
        assert sums.item() == int(torch.tensor(wanted).sum())
        del begin
