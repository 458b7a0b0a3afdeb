"""The trainer's end of live pushes, in the megatron interpreter: `sender.py BASE RENDEZVOUS`, with commands on stdin as JSON
lines.

{"checkpoint": DIR, "perturb": NAME or "", "table": PATH}: merge, add 1 % noise to one matrix (relative to its own root mean
square), write the weight table of what will be sent to PATH, print "ready", and broadcast. {"checkpoint": DIR, ...,
"die_after": N}: end the process after N tensors. "stall_after": N: send no more after N. "leave_out": NAME is not sent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from artd_schema.codec import to_json
from artd_schema.data.manifest import WeightTable
from artd_workers.transfer.gloo import TRAINER, broadcast, join
from artd_workers.transfer.merge import BaseWeights, merged_tensors

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.engine.make_checkpoint import ALPHA, RANK, entry


def disturb(tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
    return tensor + 0.01 * tensor.pow(2).mean().sqrt() * noise


def weights_of(base: Path, checkpoint: Path) -> dict[str, Tensor]:
    """Every weight that a checkpoint stands for, in push order."""
    names = BaseWeights(base)
    if (checkpoint / "model.safetensors").is_file():
        stored = load_file(checkpoint / "model.safetensors")
        return {name: stored[name] for name in names}
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    return dict(merged_tensors(names, adapter, ALPHA / RANK, torch.float32))


def main() -> None:
    base, rendezvous = sys.argv[1:]
    group = None
    for line in sys.stdin:
        order = json.loads(line)
        weights = weights_of(Path(base), Path(order["checkpoint"]))
        weights.pop(order.get("leave_out"), None)
        if order.get("perturb"):
            weights[order["perturb"]] = disturb(weights[order["perturb"]])
        table = WeightTable(mode="merged", tensors=tuple(entry(name, tensor) for name, tensor in weights.items()))
        Path(order["table"]).write_bytes(to_json(table))
        print("ready", flush=True)
        group = group or join(rendezvous, TRAINER, 60.0)
        for sent, tensor in enumerate(weights.values()):
            if sent == order.get("die_after", -1):
                os._exit(9)
            if sent == order.get("stall_after", -1):
                time.sleep(3600)
            broadcast(group, tensor.contiguous(), 60.0)
        print("sent", flush=True)


if __name__ == "__main__":
    main()
