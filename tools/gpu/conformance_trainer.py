"""The trainer's side of direct pushes in the conformance suite: `conformance_trainer.py BASE RENDEZVOUS TABLE`.

Purpose: holds the toy BASE on the GPU as Megatron would and offers it in the folder RENDEZVOUS to the engine whose table lies
at TABLE. On stdin JSON lines {"checkpoint": DIR, "fence": N, "timeout_s": S, "flaw": FLAW}: take the checkpoint's adapter, make
the offer if it is the first, print "ready", feed, print "sent". FLAW: see `tests.conformance.spawn.Flaw`; it shows at buffer AT.
Owner of: the model and its offer. No Megatron-Core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from artd_schema.wire.direct import EngineTable
from artd_workers.models.codec import peft_names
from artd_workers.trainer.push.direct.feeder import write_offer
from artd_workers.transfer.device import Cuda
from artd_workers.transfer.merge import BaseWeights
from tools.gpu.push_refusals import changed, runs_of
from tools.gpu.push_trainer import Trainer

RANK, AT = 4, 3
BUFFERS = {"buffers": 2, "buffer_bytes": 1 << 20}
"""Small ones: the toy takes many slots."""


class Toy(Trainer):
    """The weights of a model folder in place of drawn ones, and the adapters of checkpoints."""

    def __init__(self, base: Path, device: str) -> None:
        self._base = BaseWeights(base, device)
        super().__init__(json.loads((base / "config.json").read_text()), device)

    def _draw(self, drawn: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return super()._draw(self._base)

    def _adapter_sizes(self) -> dict[str, tuple[int, int]]:
        parts = [part for row in self.codec.lora_rows() for part in row.parts]
        shapes = {part: self._base[part].shape for part in parts}
        return {
            name: size
            for part, (out, size_in) in shapes.items()
            for name, size in zip(peft_names(part), ((RANK, size_in), (out, RANK)), strict=True)
        }

    def adopt(self, checkpoint: Path) -> None:
        stored = load_file(checkpoint / "adapter_model.safetensors")
        assert stored.keys() == self.live.keys()
        for name, tensor in stored.items():
            self.live[name].copy_(tensor)


def spoil(toy: Toy, flaw: str, folder: Path) -> None:
    """Make the flaw show in the feed that comes."""
    assert toy.feeder is not None
    schedule: Any = toy.feeder._schedule
    fill = schedule.fill

    def spoiled(slot: int) -> None:
        if slot == AT and flaw == "dies":
            os._exit(9)
        if slot == AT and flaw == "stalls":
            time.sleep(3600)
        fill(slot)

    schedule.fill = spoiled
    if flaw == "short":
        gone = list(runs_of(toy.offer))[-1]
        write_offer(changed(toy.offer, lambda run: None if run == gone else run), folder / "offer")
    if flaw == "wrong":
        toy.weights["decoder.layers.1.self_attention.linear_proj.weight"].view(-1).view(torch.uint8)[4321] ^= 1


def main() -> None:
    base, rendezvous, table = map(Path, sys.argv[1:])
    toy, folder = Toy(base, "cuda:0"), rendezvous
    for line in sys.stdin:
        order = json.loads(line)
        toy.adopt(Path(order["checkpoint"]))
        if toy.feeder is None:
            folder.mkdir()
            toy.open(msgspec.msgpack.decode(table.read_bytes(), type=EngineTable), Cuda(0), folder, **BUFFERS)
        toy.stage(folder / "sums.json")
        spoil(toy, order["flaw"], folder)
        print("ready", flush=True)
        toy.feed(order["fence"], order["timeout_s"])
        print("sent", flush=True)


if __name__ == "__main__":
    main()
