"""What a job's exception means to the daemon."""

from __future__ import annotations

import errno

import pytest
import torch

from artd_workers.models.base import UnsupportedModel
from artd_workers.trainer.batch.rows import BatchError
from artd_workers.trainer.checkpoint.folder import CheckpointError
from artd_workers.trainer.step.step import Cancelled, NonFinite
from artd_workers.trainer.worker import classify

pytestmark = pytest.mark.torch


def real_out_of_memory() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58, dtype=torch.uint8)
    return caught.value


CASES = [
    (OSError(errno.ENOSPC, "No space left on device", "f"), "full", "disk full"),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "full", "disk full"),
    (OSError(errno.EIO, "I/O error"), "transient", "I/O error"),
    (MemoryError(), "transient", "out of memory"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "transient", "RuntimeError"),
    (Cancelled("cancelled after 1 of 2 rows"), "interrupted", "cancelled"),
    (NonFinite("the loss is nan"), "permanent", "loss"),
    (BatchError("tokens"), "permanent", "tokens"),
    (CheckpointError("sha256"), "permanent", "sha256"),
    (UnsupportedModel("attention_bias"), "permanent", "attention_bias"),
]


@pytest.mark.parametrize(("error", "failure", "word"), CASES, ids=lambda value: type(value).__name__)
def test_classes(error: Exception, failure: str, word: str) -> None:
    found, text = classify(error)
    assert found == failure and word in text


def test_torchs_allocator_says_out_of_memory() -> None:
    found, text = classify(real_out_of_memory())
    assert found == "transient" and text.startswith("out of memory")
