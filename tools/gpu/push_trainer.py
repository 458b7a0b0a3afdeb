"""A trainer's tensors of the GPU scripts' model, as Megatron holds them, and a `Feeder` over them; no Megatron-Core.

Owner of: base weights (a layer's experts are one buffer each for fc1 and fc2, as `grouped.GroupedLinear` has them), the live
adapter, one flat buffer of fp32 masters, and what serves both.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from artd_schema.codec import to_json
from artd_schema.data.manifest import WeightTable
from artd_schema.wire.direct import EngineTable
from artd_workers.deadline import Deadline
from artd_workers.models.codec import peft_names
from artd_workers.models.registry import plan_for
from artd_workers.trainer.push.direct.checksums import ServedWeights
from artd_workers.trainer.push.direct.feeder import Feeder, write_offer
from artd_workers.trainer.push.direct.plan import make_plan
from artd_workers.trainer.push.direct.weight_lock import WeightLock
from artd_workers.trainer.push.direct.weight_source import WeightSource
from artd_workers.trainer.push.snapshot import Snapshot
from artd_workers.transfer.contracts import Port
from artd_workers.transfer.merge import merge

from . import shape

RANK, SCALE = 16, 2.0
_EXPERT = re.compile(r"\.local_experts\.(\d+)(?=\.)")


class Trainer:
    """Holds the model; `open` makes the source for an engine's table."""

    def __init__(self, config: dict[str, Any], device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.codec = plan_for(config).codec
        self.weights = self._draw(shape.RandomWeights(plan_for(config), config, device, dtype))
        self._sizes = self._adapter_sizes()
        self.flat = torch.empty(sum(a * b for a, b in self._sizes.values()), device=device).normal_(0, 0.02)
        self.live = self._views({"flat": self.flat})
        self.served: ServedWeights | None = None
        self.snapshot: Snapshot | None = None
        self.feeder: Feeder | None = None

    def _draw(self, drawn: shape.RandomWeights) -> dict[str, Tensor]:
        buffers: dict[str, Tensor] = {}
        out = {}
        for row in self.codec.rows:
            tensor = self.codec.fuse(row, [drawn[part] for part in row.parts])
            if found := _EXPERT.search(row.megatron):
                size = (self.config["num_experts"], *tensor.shape)
                name = _EXPERT.sub("", row.megatron)
                if name not in buffers:
                    buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
                tensor = buffers[name][int(found[1])].copy_(tensor)
            out[row.megatron] = tensor
        return out

    def _adapter_sizes(self) -> dict[str, tuple[int, int]]:
        sizes = {}
        for row in self.codec.lora_rows():
            for part in row.parts:
                out, size = shape.size_of(part, self.config)
                sizes |= dict(zip(peft_names(part), ((RANK, size), (out, RANK)), strict=True))
        return sizes

    def _views(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The flat buffer's parts by PEFT name."""
        views, at = {}, 0
        for name, (a, b) in self._sizes.items():
            views[name] = own["flat"][at : at + a * b].view(a, b)
            at += a * b
        return views

    def step(self, number: int) -> None:
        """Change every adapter a little, as a train step would."""
        self.flat.mul_(1.02 if number % 2 else 1 / 1.02)

    def serve(self, port: Port, **buffers: int) -> WeightSource:
        """What the checksums and each served tensor are made of."""
        weight_lock = WeightLock({"flat": self.flat}, self._views, SCALE, self.device)
        weight_source = WeightSource(port, self.codec, self.weights, weight_lock, self.dtype, **buffers)
        self.served = ServedWeights(weight_source, [part for row in self.codec.rows for part in row.parts])
        return weight_source

    def open(self, table: EngineTable, port: Port, folder: Path, **buffers: int) -> dict[str, float]:
        """Returns seconds: what makes the checksums, the plan, the tables and buffers, the offer."""
        marks = [time.perf_counter()]
        weight_source = self.serve(port, **buffers)
        marks.append(time.perf_counter())
        plan = make_plan(table, self.codec, weight_source.shapes, self.dtype.itemsize)
        marks.append(time.perf_counter())
        self.feeder = Feeder(weight_source, plan, folder)
        marks.append(time.perf_counter())
        self.offer = self.feeder.offer()
        write_offer(self.offer, folder / "offer")
        marks.append(time.perf_counter())
        names = ("served", "plan", "source", "offer")
        return {name: b - a for name, a, b in zip(names, marks, marks[1:], strict=False)} | {
            "pieces": len(plan.pieces), "segments": len(self.offer.feeds[0].segments), "units": len(self.offer.feeds[0].units),
        }  # fmt: skip

    def stage(self, path: Path) -> None:
        """As a committed checkpoint does: its weights.json."""
        assert self.served is not None
        self.snapshot = self.served.stage()
        path.write_bytes(to_json(WeightTable(mode="merged", tensors=self.snapshot.entries)))

    def feed(self, fence: int, timeout_s: float) -> None:
        """Feed a push of what was staged. Raises TimeoutError."""
        assert self.feeder is not None and self.snapshot is not None
        deadline = Deadline(timeout_s)
        with self.snapshot.hold(deadline, self.feeder.abort):
            self.feeder.feed(fence, deadline)

    def merged(self) -> dict[str, Tensor]:
        """What is served, by Hugging Face name, made by torch on this device: another road than the kernel's."""
        out = {}
        for row in self.codec.rows:
            for part, weight in zip(row.parts, self.codec.split(row, self.weights[row.megatron]), strict=True):
                a, b = (self.live.get(name) for name in peft_names(part))
                merged = a is not None and b is not None
                out[part] = merge(weight, a, b, SCALE, self.dtype) if merged else weight
        return out

    def export(self, folder: Path) -> None:
        """`merged` as a Hugging Face checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config | {"torch_dtype": "bfloat16"}))
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.merged().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
