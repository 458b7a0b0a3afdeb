"""Tensors that are checked many at once, as those of a GPU are: every one, by name, and no longer held than a batch is full."""

from __future__ import annotations

import gc
import hashlib
import weakref

import pytest
import torch
from torch import Tensor

from artd_workers.engines.vllm.weights import hashing
from artd_workers.engines.vllm.weights.hashing import Entry, Hasher, WeightError, wrong_of
from artd_workers.transfer.checksum import sum_of

pytestmark = pytest.mark.torch


def everything(tensor: Tensor) -> bool:
    return True


def row(name: str, tensor: Tensor, sha: bool = False) -> Entry:
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    known = hashlib.sha256(raw.data).hexdigest() if sha else sum_of(tensor)
    return Entry(name, "float32", tuple(tensor.shape), known)


def drawn(count: int, sha: bool = False) -> list[tuple[Entry, Tensor]]:
    """Of 256 bytes each. sha: every other one is known by its sha256."""
    torch.manual_seed(0)
    tensors = [torch.randn(8, 8) for _ in range(count)]
    return [(row(f"t{i}", one, sha and i % 2 == 1), one) for i, one in enumerate(tensors)]


@pytest.mark.parametrize("sha", [False, True])
@pytest.mark.parametrize("batch", [1, 256, 700, 1 << 20])
@pytest.mark.parametrize("wrong", [(), (0,), (2,), (9,), (3, 4, 8)])
def test_each_wrong_tensor_of_any_batch_is_found(
    monkeypatch: pytest.MonkeyPatch, batch: int, wrong: tuple[int, ...], sha: bool
) -> None:
    monkeypatch.setattr(hashing, "BATCH", batch)
    items, hasher = drawn(10, sha), Hasher(everything)
    for number, (entry, tensor) in enumerate(items):
        hasher.add(entry, tensor.neg() if number in wrong else tensor)
    if wrong:
        with pytest.raises(WeightError, match=f"^{len(wrong)} tensors .* the first is t{wrong[0]}$"):
            hasher.finish()
    else:
        hasher.finish()
    hasher.close()
    assert hasher.bytes == 10 * 256


def test_two_tensors_that_changed_places_are_both_wrong() -> None:
    (one, a), (two, b), (three, c) = drawn(3)
    assert wrong_of([one, two, three], [b, a, c]) == ["t0", "t1"]
    assert wrong_of([one, two, three], [a, b, c]) == []


def test_a_batch_is_summed_at_once_and_held_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = hashing.sums_of
    monkeypatch.setattr(hashing, "BATCH", 4 * 256)
    monkeypatch.setattr(hashing, "sums_of", lambda tensors: (calls.append(len(tensors)), real(tensors))[1])
    hasher, held = Hasher(everything), []
    items = drawn(10)
    while items:
        entry, tensor = items.pop(0)
        hasher.add(entry, tensor)
        held.append(weakref.ref(tensor))
        del tensor
        gc.collect()
        assert sum(one() is not None for one in held) < 4
    hasher.finish()
    hasher.close()
    assert calls == [4, 4, 2]
