"""The direct push, seen and timed: `python -m tools.gpu.push [--layers 4] [--gpus 1] [--family llama] [--items ...] [--rounds 50] [--out DIR]`.

Purpose: this process is the trainer (Megatron's layout, rank-16 adapter on attention and every expert), a stock vLLM server
with our worker extension the engine, on the same GPU or on the next one. One JSON line for each item, appended to
DIR/push.jsonl as soon as it is known, the most valuable first; an item that fails does not keep the next from running. `--tiny`: the same items in one process on a CPU, with
plain memory for the GPU's and modules with vLLM's names for the engine, to try the script. With `sleep` among the items the
engine's weights lie in the pool of vLLM's sleep mode from the start.
Needs vLLM 0.25.1 and this repository's packages on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.gpu import lines, push_items, shape
from tools.gpu.push_rig import Line, Rig
from tools.gpu.push_trainer import Trainer

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
"""CUDA's own, as an engine and a trainer of one process have it; `lines` says otherwise."""
DEFAULT = "table,in_place,staged,truth,stock_road,refusals,repeat,streams,gap"


def machine() -> Line:
    import importlib.metadata as metadata

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "gpu": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        "torch": torch.__version__, "python": platform.python_version(), "vllm": metadata.version("vllm"),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def rig(args: argparse.Namespace, folder: Path) -> Rig:
    """The trainer, the engine and what measures them."""
    args.out.mkdir(parents=True, exist_ok=True)
    config = shape.config(args.layers, args.tiny, args.family)
    if args.tiny:
        from tests.direct_rig import MemoryPort
        from tools.gpu.push_tiny import TinyEngine

        trainer, port = Trainer(config, "cpu"), MemoryPort()
        return Rig(trainer, TinyEngine(config), port, folder, {"buffers": 3, "buffer_bytes": 1 << 16}, tiny=True)
    from artd_workers.transfer.device import Cuda
    from tools.gpu.push_server import Server, model_folder

    model, sleeps = model_folder(folder / "model", config), "sleep" in args.items.split(",")
    server = Server(model, args.gpus - 1, args.share, args.out / "vllm.log", sleeps)
    try:
        began = time.perf_counter()
        trainer = Trainer(config, "cuda:0")
        torch.cuda.synchronize()
        drawn = time.perf_counter() - began
        server.ready()
        print(f"weights drawn in {drawn:.1f} s, server ready after {time.perf_counter() - began:.1f} s", flush=True)
    except BaseException:
        server.stop()
        raise
    return Rig(trainer, server, Cuda(0), folder, {"buffer_bytes": args.buffer_mib << 20} if args.buffer_mib else {})


Items = Mapping[str, Callable[[Any, int], Any]]


def run(args: argparse.Namespace, one: Rig, known: Items, names: Sequence[str], out: Path) -> int:
    """Each line appended to `out` as soon as an item knows it. What an item that fails has left of the engine is mended before the
    next, else there is no next. Returns how many failed."""
    what: Line = {"family": args.family, "layers": args.layers, "gpus": args.gpus}
    first, failed = {} if args.tiny else machine(), 0
    for name in ["open", *names]:
        began = time.perf_counter()
        try:
            for line in known[name](one, args.rounds):
                written(out, what | first | {"item": name} | line | {"at_s": round(time.perf_counter() - began, 2)})
                first = {}
        except (Exception, lines.Late) as error:
            written(out, what | first | {"item": name, "failed": repr(error)[:900]})
            if isinstance(error, lines.Late):
                raise
            failed += 1
            traceback.print_exc()
            if name == "open" or not mended(one):
                break
    return failed


def mended(one: Rig) -> bool:
    try:
        one.mend()
    except Exception:
        traceback.print_exc()
        return False
    return True


def written(out: Path, line: Line) -> None:
    text = json.dumps(line, default=lambda x: round(x, 6))
    print(text, flush=True)
    with out.open("a") as file:
        print(text, file=file)


def options(items: str, share: float) -> argparse.ArgumentParser:
    """What `rig` and `run` have to be told, but for `layers` and `gpus`. items, share: where nothing is said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", default=items, help=f"names with commas between them ({items})")
    parser.add_argument("--family", choices=shape.FAMILIES, default="qwen3_moe")
    parser.add_argument("--share", type=float, default=share, help="of the engine's GPU for its weights and KV cache")
    parser.add_argument(
        "--buffer-mib", type=int, default=0, help="of each of the trainer's buffers; 0: as artd has them"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=int, default=lines.LIMIT, help="seconds after which it ends by itself")
    return parser


def main() -> int:
    parser = options(DEFAULT, 0.4)
    parser.description = (__doc__ or "").splitlines()[0]
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is ended on the way out
    folder = Path(tempfile.mkdtemp(prefix="artd-push-"))
    try:
        with lines.limited(args.limit):
            one = rig(args, folder)
            try:
                return int(run(args, one, push_items.ITEMS, args.items.split(","), args.out / "push.jsonl") > 0)
            finally:
                one.engine.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
