"""When a killed process gives its GPU's memory back: `python -m tools.gpu.killed [--items idle,busy] [--out DIR] [--tiny]`.

Purpose: artd starts the next engine once the last one is dead by /proc (`guardian.Stat.dead`). Here a child holds most of a GPU, in
eight threads besides CUDA's own, is killed with SIGKILL, and each millisecond says what /proc calls it and what the GPU has in use. One
JSON line an item and round: `zombie_held_gb`, the most in use while the first thread had ended and others had not; `dead_held_gb`,
the most in use when artd would call it dead, as long as nobody has collected it, too. `--tiny`: without a GPU, memory of the host for the
GPU's.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from artd.supervise.procfs import read_stat
from tools.gpu import lines

GIB = 1 << 30
ROUNDS = 3
HOLD = """
import sys, threading, time, torch
size, device, busy = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "busy"
held = [torch.ones(size // 8, dtype=torch.uint8, device=device) for _ in range(8)]
a = torch.ones(2048, 2048, device=device)
def work():
    while True:
        if busy: a @ a
        else: time.sleep(1)
for _ in range(8): threading.Thread(target=work, daemon=True).start()
if device == "cuda": torch.cuda.synchronize()
print("holds", flush=True)
time.sleep(600)
"""
"""Of the child: BYTES DEVICE idle|busy."""


def gpu_in_use() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def one(how: str, size: int, device: str, in_use: Callable[[int], int]) -> dict[str, Any]:
    """A child killed, and followed until it is dead. in_use: bytes, given the child's pid."""
    command = [sys.executable, "-c", HOLD, str(size), device, how]
    before = in_use(0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "holds\n"
        alive = in_use(child.pid) - before
        began = time.perf_counter()
        child.kill()
        seen = list(followed(child.pid, began, lambda: in_use(child.pid) - before))
    return {
        "alive_gb": alive / 1e9, "threads": seen[0]["threads"], "looks": len(seen), "zombie_s": first(seen, lambda look: look["state"] == "Z"),
        "dead_s": first(seen, lambda look: look["dead"]), "empty_s": first(seen, lambda look: look["held"] < 1e9),
        "zombie_held_gb": most([look for look in seen if look["state"] == "Z" and not look["dead"]]),
        "dead_held_gb": most([look for look in seen if look["dead"]]),
    }  # fmt: skip


def followed(pid: int, began: float, held: Callable[[], int]) -> Iterator[dict[str, Any]]:
    """Looks, until half a second after its death. /proc is asked before the GPU: what the GPU still has then, it had before."""
    last = float("inf")
    while time.perf_counter() < last:
        stat = read_stat(pid)
        at = time.perf_counter() - began
        assert stat is not None, "it is not collected before the end"
        if stat.dead:
            last = min(last, time.perf_counter() + 0.5)
        yield {"at": round(at, 4), "state": stat.state, "threads": stat.threads, "dead": stat.dead, "held": held()}
        time.sleep(0.001)


def first(looks: list[dict[str, Any]], what: Callable[[dict[str, Any]], bool]) -> float | None:
    return next((look["at"] for look in looks if what(look)), None)


def most(looks: list[dict[str, Any]]) -> float | None:
    return max(look["held"] for look in looks) / 1e9 if looks else None


def item(how: str) -> lines.Item:
    def rounds(tiny: bool) -> Iterator[dict[str, Any]]:
        size, device = (GIB // 8, "cpu") if tiny else (100 * GIB, "cuda")
        for _ in range(ROUNDS):
            yield one(how, size, device, host_in_use if tiny else lambda pid: gpu_in_use())

    return rounds


def host_in_use(pid: int) -> int:
    """Resident bytes of a process that has some."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * 4096 if pid else 0
    except (FileNotFoundError, ProcessLookupError):
        return 0


if __name__ == "__main__":
    sys.exit(lines.main("killed", {how: item(how) for how in ("idle", "busy")}))
