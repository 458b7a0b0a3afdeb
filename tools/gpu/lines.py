"""A GPU script whose items share a process: its command line, and one JSON line for each result as soon as it is known.

Owner of: no state. Invariants: imported before torch, so that the environment it sets is read; an item that fails is a line
with its error, and the next one runs all the same; a script that hangs says where, and ends by itself.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ |= OFF | {"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")}

LIMIT = 560
"""Seconds: a command on a lent machine has ten minutes, and what hangs has to be cleared away."""
_CLEARED_S = 20

Item = Callable[[bool], Iterator[dict[str, Any]]]
"""tiny -> lines."""


class Late(BaseException):
    """The script's time is up; no item may take it for an error of its own."""


def parsed(name: str, items: Mapping[str, Item]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"tools.gpu.{name}")
    parser.add_argument("--items", default=",".join(items), help="names with commas between them")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--tiny", action="store_true", help="the same on a CPU, in small, to try the script")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds after which it ends by itself, if not --tiny")
    return parser.parse_args()


def main(name: str, items: Mapping[str, Item]) -> int:
    """Run the items asked for (all without --items), appending to DIR/NAME.jsonl. Returns the exit status."""
    args = parsed(name, items)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with (args.out / f"{name}.jsonl").open("a") as file, nullcontext() if args.tiny else limited(args.limit):
        for item in args.items.split(","):
            started = time.perf_counter()
            try:
                for line in items[item](args.tiny):
                    _write(file, {"item": item} | line | {"at_s": round(time.perf_counter() - started, 1)})
            except (Exception, Late) as error:
                failed += 1
                traceback.print_exc()
                _write(file, {"item": item, "error": repr(error)[:500]})
                if isinstance(error, Late):
                    break
    return int(failed > 0)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises Late in the body when they have passed, and ends the process where nothing hears that: a wait in C."""

    def late(_signal: int, _frame: object) -> None:
        faulthandler.dump_traceback()
        raise Late(f"{seconds} s have passed")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + _CLEARED_S, exit=True)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def _write(file: Any, line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
    print(json.dumps(line), file=file, flush=True)
