"""The direct push with CUDA IPC off, over NCCL: `python -m tools.gpu.wire [--layers 4,48] [--items ...] [--rounds 10] [--out DIR]`.

Purpose: the trainer and the engine of `tools.gpu.push`, on two GPUs, and the same plan sent over a communicator of two: meeting,
pushes in place and staged with their checksums, refusals, and the same pushes by CUDA IPC beside them. One JSON line for each
result, appended to DIR/wire.jsonl as soon as it is known, the most valuable first; refusals with the first number of layers only.
`--tiny`: the same in one process on a CPU, over a Unix socket.
Needs two GPUs (NCCL takes none twice), vLLM 0.25.1 and this repository's packages on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from artd_workers.transfer.nccl.stock import ENVIRONMENT

os.environ |= ENVIRONMENT  # of both processes, before either has NCCL

from tools.gpu import lines, push, push_items, wire_items
from tools.gpu.wire_rig import WireRig


def parsed() -> argparse.Namespace:
    parser = push.options(",".join(wire_items.ITEMS), 0.47)
    parser.description = (__doc__ or "").splitlines()[0]
    parser.add_argument("--layers", default="4,48")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    args.gpus = 2
    return args


def main() -> int:
    args = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is ended on the way out
    every, failed = [2] if args.tiny else [int(number) for number in args.layers.split(",")], 0
    with lines.limited(args.limit):
        for number in every:
            args.layers = number
            known = wire_items.ITEMS | {"open": push_items.opened}
            names = [name for name in args.items.split(",") if number == every[0] or name not in wire_items.REFUSALS]
            failed += layers(args, known, names)
            wire_items.emptied()
    return int(failed > 0)


def layers(args: argparse.Namespace, known: push.Items, names: list[str]) -> int:
    """The items with one trainer and one engine; returns how many failed."""
    folder = Path(tempfile.mkdtemp(prefix="artd-wire-"))
    try:
        one = WireRig(**vars(push.rig(args, folder)))
        try:
            return push.run(args, one, known, names, args.out / "wire.jsonl")
        finally:
            one.engine.stop()
            one.disconnect()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
