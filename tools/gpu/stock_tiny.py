"""For `tools.gpu.stock --tiny`: an engine in this process that reads what the fake libnccl wrote, and checks every tensor."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from artd_schema.data.manifest import WeightEntry
from artd_workers.deadline import Deadline
from artd_workers.engines.vllm.adapter import rows
from artd_workers.engines.vllm.weights.hashing import entries
from artd_workers.transfer.nccl.communicator import Library
from artd_workers.transfer.nccl.stock import await_id, chunks, size_of
from tests.compiled import library

FAKE = Path(__file__).parents[2] / "tests/fakes" / "nccl.c"
BROADCAST, FINE, NEVER = 2, 0, 1


class TinyEngine:
    """The calls of `stock_rig.Engine`; it generates nothing: its scores are sums over its weights."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self._pipe = open(reading, "rb")  # noqa: SIM115
        self.nccl = Library(str(library(FAKE)))
        self._fake = ctypes.CDLL(str(library(FAKE)))
        self._fake.fake_script(BROADCAST, FINE, 0, writing)
        self._sums: list[float] = []

    def never(self, after: int) -> None:
        """From the broadcast behind `after` more on, none is ever done."""
        self._fake.fake_script(BROADCAST, NEVER, after, -1)

    def join(self, rendezvous: str, deadline: Deadline, _transfer: str) -> None:
        await_id(Path(rendezvous), deadline.left)

    def take(self, table: Sequence[WeightEntry], _plain: bool, _deadline: Deadline) -> None:
        self._sums = []
        known = iter(entries(rows(table)))
        for chunk in chunks(table):
            size = int.from_bytes(self._pipe.read(8), sys.byteorder)
            assert size == sum(map(size_of, chunk))
            for entry in chunk:
                data = torch.frombuffer(bytearray(self._pipe.read(size_of(entry))), dtype=getattr(torch, entry.dtype))
                assert next(known).is_of(data), f"{entry.name} came with other bytes than staged"
                self._sums.append(float(data.double().sum()))

    def score(self, _model: str, _prompts: Any, _deadline: Deadline) -> list[list[float]]:
        return [self._sums]

    def pause(self, _drain_s: float, _deadline: Deadline) -> None:
        """Nothing runs."""

    open = resume = probe = ready = stop = finish = lambda *_words, **_names: None
