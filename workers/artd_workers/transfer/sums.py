"""Checksums of many tensors at once, on the device where they are. The sums equal those of `checksum.sum_of` on any
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checksum import WORD, Blocks, Span, sum_of


def sums_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksums of contiguous tensors of one device; on a GPU by one kernel on the current stream. Raises
    ValueError for a tensor that is not a whole number of words.
    """
    return by_kernel(tensors) if tensors and tensors[0].is_cuda else [sum_of(tensor) for tensor in tensors]


def by_kernel(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksums of tensors on a GPU; see `sums_of`."""
    from .checksum_kernels import Table  # Triton is installed only with GPUs

    spans = []
    for number, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if size % WORD or tensor.data_ptr() % WORD or not tensor.is_contiguous():
            raise ValueError(
                f"tensor {number} of {len(tensors)}, {tuple(tensor.shape)}, does not consist of whole, aligned {WORD}-byte words"
            )
        spans.append(Span(tensor.data_ptr(), 0, size // WORD, number))
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    Table(Blocks.cut(spans, sums.device)).sum(sums, (0, len(spans)))
    return [int(value) for value in sums.tolist()]
