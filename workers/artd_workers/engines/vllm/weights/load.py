"""Loads weights into vLLM's model, in vLLM's worker, tensor by tensor: every tensor is checked, and every tensor of the model
filled.

Every byte that reaches the model is the one that the committed weight table names. `InPlace` lets the model's loader write the
very tensors that kernels and CUDA graphs read, where the survey found no obstacle; elsewhere `reload.Reload` loads. It owns the
open update, and imports no vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from artd_workers.engines.adapter import Fence
from artd_workers.engines.gate import Gate
from artd_workers.engines.process import marks

from .hashing import Entry, Hasher, WeightError, wrong_of

Source = Iterator[tuple[str, torch.Tensor]]


@dataclass
class Update:
    """The state that the worker's extension and its transfer backend share, one per worker process.

    `figures`: bytes and seconds of the open update so far. `wanted`: tensors that vLLM's own calls still have to bring, by
    name.
    """

    gate: Gate
    figures: dict[str, float] = field(default_factory=dict)
    wanted: dict[str, Entry] = field(default_factory=dict)

    def begin(self, fence: Fence) -> None:
        """Open an update. Raises FenceError."""
        self.gate.begin(fence)
        self.figures, self.wanted = {}, {}


class Load(Protocol):
    """One replacement of a model's weights: start, load, finish. Any error leaves the weights unknown."""

    seconds: dict[str, float]
    bytes: int

    def start(self) -> None:
        """Prepare the model, before the first tensor."""

    def load(self, table: list[Entry], source: Source) -> None:
        """Feed the model from `source`, which must yield the table's tensors in its order. Raises WeightError."""

    def finish(self) -> None:
        """Complete the model, after the last tensor."""


class InPlace:
    """Loads into the model's own tensors, whose addresses stay. NaN that is left in a tensor shows that not all of it was
    written."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.seconds: dict[str, float] = {}
        self.bytes = 0

    def start(self) -> None:
        for parameter in self._model.parameters():
            parameter.data.fill_(torch.nan)

    def load(self, table: list[Entry], source: Source) -> None:
        began = time.perf_counter()
        feed(self, self._model, table, source)
        # A NaN makes the sum NaN, and so do infinities of both signs, which are wrong weights as well.
        named = dict(self._model.named_parameters())
        odd = torch.stack([parameter.data.sum(dtype=torch.float32).isnan() for parameter in named.values()]).tolist()
        if wrong := [name for name, is_odd in zip(named, odd, strict=True) if is_odd]:
            raise WeightError(
                f"{len(wrong)} parameters of the model got only some of their weights, or some that are not finite, "
                f"the first is {wrong[0]}"
            )
        self.seconds["load"] = time.perf_counter() - began - self.seconds["transfer"]

    def finish(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # frees what merging used, because a trainer may share this GPU


class Checking:
    """Stands in for a model before vLLM's own transfer calls: only tensors that the open update wants reach it, once each."""

    def __init__(self, model: Any, update: Update) -> None:
        self._model, self._update = model, update

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Check the tensors and pass them to the model. Raises WeightError."""
        taken = list(weights)
        rows = [self._row(name, tensor) for name, tensor in taken]
        if wrong := wrong_of(rows, [tensor for _, tensor in taken]):
            raise WeightError(f"{wrong[0]} arrived with other bytes than committed")
        marks.leave()
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in taken)
        self._update.figures["bytes"] = self._update.figures.get("bytes", 0.0) + size
        return self._model.load_weights(taken)

    def _row(self, name: str, tensor: torch.Tensor) -> Entry:
        entry = self._update.wanted.pop(name, None)
        if entry is None:
            raise WeightError(f"unexpected tensor {name}: not in this update's weight table, or already received")
        entry.check_form(tensor)
        return entry


def feed(load: Load, model: Any, table: list[Entry], source: Source) -> set[str]:
    """Let the model load what `source` yields. Returns the names of the parameters that it reports as loaded. Raises
    WeightError."""
    hasher = Hasher()
    try:
        loaded = model.load_weights(_check_each(load, table, source, hasher))
        hasher.finish()
    finally:
        hasher.close()
    load.bytes = hasher.bytes
    return set(loaded or ())


def _check_each(load: Load, table: list[Entry], source: Source, hasher: Hasher) -> Source:
    transfer = 0.0
    for entry in table:
        began = time.perf_counter()
        name, tensor = next(source, ("", None))
        transfer += time.perf_counter() - began
        if tensor is None or name != entry.name:
            raise WeightError(f"the weight table has {entry.name}, the source has {name or 'no more'}")
        entry.check_form(tensor)
        hasher.add(entry, tensor)
        load.seconds["transfer"] = transfer
        marks.leave()
        yield name, tensor
    if extra := next(source, None):
        raise WeightError(f"the source has {extra[0]}, which the weight table does not")
