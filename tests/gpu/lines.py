"""A GPU script whose items share a process: its command line, and one JSON line for each result as soon as it is known.

Owner of: no state. Invariants: imported before torch, so that the environment it sets is read; an item that fails is a line
with its error, and the next one runs all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ |= OFF | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

Item = Callable[[bool], Iterator[dict[str, Any]]]
"""tiny -> lines."""


def main(name: str, items: Mapping[str, Item]) -> int:
    """Run the items asked for (all without --items), appending to DIR/NAME.jsonl. Returns the exit status."""
    parser = argparse.ArgumentParser(description=f"tests.gpu.{name}")
    parser.add_argument("--items", default=",".join(items), help="names with commas between them")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--tiny", action="store_true", help="the same on a CPU, in small, to try the script")
    args = parser.parse_args()
    failed = 0
    with (args.out / f"{name}.jsonl").open("a") as file:
        for item in args.items.split(","):
            started = time.perf_counter()
            try:
                for line in items[item](args.tiny):
                    _write(file, {"item": item} | line | {"at_s": round(time.perf_counter() - started, 1)})
            except Exception as error:
                failed += 1
                traceback.print_exc()
                _write(file, {"item": item, "error": repr(error)[:500]})
    return int(failed > 0)


def _write(file: Any, line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
    print(json.dumps(line), file=file, flush=True)
