"""Pushes over vLLM's own NCCL transfer calls: `python -m tools.gpu.stock [--items yardstick,watchdog] [--out DIR]`.

Purpose: the fallback and the yardstick of the direct push. This process is the trainer on GPU 0 (Megatron's layout, rank-16
adapter on attention and every expert, merged on the way), a stock vLLM server as the harness starts it is the engine on GPU 1.
One JSON line for each result, appended to DIR/stock.jsonl. `--tiny`: on a CPU, with a fake libnccl and no server.
Needs two GPUs, vLLM 0.25.1 and this repository's packages on PYTHONPATH.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_DEBUG", "WARN")

from tools.gpu import lines, shape  # noqa: I001

import torch

from artd_workers.deadline import Deadline
from artd_workers.trainer.push.stock import Sender
from tools.gpu.push_trainer import Trainer
from tools.gpu.stock_rig import Line, engines, meet, push
from tools.gpu.stock_watchdog import watchdog

ROUNDS = 3
PROMPTS = [[(7 * i + 13 * j) % 500 + 5 for j in range(64)] for i in range(4)]


def yardstick(tiny: bool, layers: int = 48) -> Iterator[Line]:
    """vLLM's own backend as it comes, and with artd's checks; scores after a push over NaN are those of before."""
    config = shape.config(2 if tiny else layers, tiny)
    began = time.perf_counter()
    with engines(config, tiny) as (folder, (engine,)):
        trainer = Trainer(config, "cpu" if tiny else "cuda:0")
        trainer.serve(_port(tiny))
        trainer.stage(folder / "weights.json")
        engine.ready()
        size = sum(math.prod(entry.shape) for entry in trainer.snapshot.entries) * 2
        yield {
            "what": "ready",
            "seconds": time.perf_counter() - began,
            "gb": size / 1e9,
            "layers": config["num_hidden_layers"],
        }
        sender = Sender(folder / "pair", torch.device(trainer.device), *([engine.nccl] if tiny else []))
        engine.probe("probe_plain", plain=True)
        yield meet(engine, sender, folder / "pair")
        scores: dict[bool, Any] = {}
        kept = trainer.flat.clone()
        for plain in (True, False):
            trainer.flat.copy_(kept)
            engine.probe("probe_plain", plain=plain)
            found = []
            for number in range(ROUNDS):
                trainer.step(number)
                staged = time.perf_counter()
                trainer.stage(folder / "weights.json")
                staged = time.perf_counter() - staged
                if number == ROUNDS - 1:
                    engine.probe("probe_spoil")
                deadline = Deadline(60.0)
                with trainer.snapshot.hold(deadline, sender.abort):
                    tensors = (tensor for _, tensor in trainer.snapshot.tensors)
                    found.append(push(engine, sender, trainer.snapshot.entries, tensors, plain) | {"staged": staged})
            scores[plain] = engine.score("r", PROMPTS, Deadline(60.0))
            yield {"what": "vLLM's own backend" if plain else "every tensor checked", "rounds": ROUNDS, **_over(found)}
        gaps = [
            abs(a - b)
            for one, two in zip(scores[True], scores[False], strict=True)
            for a, b in zip(one, two, strict=True)
        ]
        yield {"what": "scores, checked against plain", "largest": max(gaps), "finite": all(map(math.isfinite, gaps))}
        sender.abort()
    trainer.snapshot = trainer.served = None


def small(tiny: bool) -> Iterator[Line]:
    """The same with 4 layers."""
    yield from yardstick(tiny, 4)


def _port(tiny: bool) -> Any:
    if tiny:
        from tests.direct_rig import MemoryPort

        return MemoryPort()
    from artd_workers.transfer.device import Cuda

    return Cuda(0)


def _over(found: Sequence[Line]) -> Line:
    names = tuple(found[0])
    return {
        "median": {name: round(statistics.median(one[name] for one in found), 4) for name in names},
        "total": [round(one["total"], 4) for one in found],
    }


if __name__ == "__main__":
    sys.exit(lines.main("stock", {"yardstick": yardstick, "watchdog": watchdog, "small": small}))
