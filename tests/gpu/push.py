"""The direct push, seen and timed: `python -m tests.gpu.push [--layers 4] [--gpus 1] [--items ...] [--rounds 50] [--out DIR]`.

Purpose: this process is the trainer (Megatron's layout, rank-16 adapter on attention and every expert), a stock vLLM server
with our worker extension the engine, on the same GPU or on the next one. One JSON line for each item, appended to
DIR/push.jsonl as soon as it is known, the most valuable first. `--tiny`: the same items in one process on a CPU, with
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
from pathlib import Path
from typing import Any

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ |= OFF

import torch  # noqa: E402

from tests.gpu import push_items, shape  # noqa: E402
from tests.gpu.push_rig import Rig  # noqa: E402
from tests.gpu.push_trainer import Trainer  # noqa: E402

DEFAULT = "table,in_place,staged,truth,stock_road,refusals,repeat,streams,gap"


def machine() -> dict[str, Any]:
    import importlib.metadata as metadata

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return {
        "gpu": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        "torch": torch.__version__, "python": platform.python_version(), "vllm": metadata.version("vllm"),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def rig(args: argparse.Namespace, folder: Path) -> Rig:
    """The trainer, the engine and what measures them."""
    config = shape.config(args.layers, args.tiny)
    if args.tiny:
        from tests.direct_rig import MemoryPort
        from tests.gpu.push_tiny import TinyEngine

        trainer, port = Trainer(config, "cpu"), MemoryPort()
        return Rig(trainer, TinyEngine(config), port, folder, tiny=True)
    from artd_workers.engines.direct.device import Cuda
    from tests.gpu.push_server import Server, model_folder

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
    return Rig(trainer, server, Cuda(0), folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", default=DEFAULT, help=f"names with commas between them ({DEFAULT})")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--share", type=float, default=0.4, help="of the engine's GPU for its weights and KV cache")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is ended on the way out
    folder, failed = Path(tempfile.mkdtemp(prefix="artd-push-")), 0
    what = {"layers": args.layers, "gpus": args.gpus}
    try:
        one = rig(args, folder)
        try:
            with (args.out / "push.jsonl").open("a") as file:
                lines = [what | ({} if args.tiny else machine())]
                for name in ["open", *args.items.split(",")]:
                    began = time.perf_counter()
                    try:
                        lines += [{"item": name} | line for line in push_items.ITEMS[name](one, args.rounds)]
                    except Exception as error:
                        failed += 1
                        lines.append({"item": name, "failed": repr(error)[:900]})
                    lines[-1]["at_s"] = round(time.perf_counter() - began, 2)
                    for line in lines:
                        text = json.dumps(what | line, default=lambda x: round(x, 6))
                        print(text, flush=True)
                        print(text, file=file, flush=True)
                    lines = []
                    if failed and name == "open":
                        break
        finally:
            one.engine.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
