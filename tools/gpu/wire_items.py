"""What `tools.gpu.wire` does to a trainer and an engine. Each item yields JSON-like lines.

Owner of: no state. Invariants: as `push_items`; a refusal is followed by a new connection and a push over it that counts.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from artd_schema.wire.direct import EngineTable
from tools.gpu.push_refusals import error_of
from tools.gpu.push_rig import TIMEOUT_S, Line, over
from tools.gpu.wire_rig import WireRig

HANG_S = 3.0
"""Deadline of what must not end by itself."""


def in_place(rig: WireRig, rounds: int) -> Iterator[Line]:
    """Over NaN, then `rounds` times."""
    rig.engine.rpc("probe_spoil")
    rig.prepare(change=False)
    yield {"what": "first push, over NaN", **rig.push(), **checked(rig)}
    yield {"what": "in place", **many(rig, rounds, staged=False)}


def staged(rig: WireRig, rounds: int) -> Iterator[Line]:
    rig.prepare()
    yield {"what": "first staged push", **rig.push(staged=True), **checked(rig)}
    yield {"what": "staged", **many(rig, rounds, staged=True)}


def ipc(rig: WireRig, rounds: int) -> Iterator[Line]:
    """The same pushes by CUDA IPC, for a ratio in one run; then over NCCL again."""
    yield {"what": "CUDA IPC, open", **rig.share()}
    for way in (False, True):
        rig.prepare()
        rig.push(staged=way)
        yield {"what": f"CUDA IPC, {'staged' if way else 'in place'}", **many(rig, rounds, staged=way)}
    rig.shared = False
    yield {"what": "NCCL again, open", **rig.connect()}
    yield {"what": "NCCL again, in place", **rig.push()}


def many(rig: WireRig, rounds: int, staged: bool) -> Line:
    """Pushes of a new adapter each, every checksum compared by the engine: seconds of the phases."""
    lines = []
    for _ in range(rounds):
        rig.prepare()
        lines.append(rig.push(staged=staged))
    return {"rounds": rounds, "median": over(lines, statistics.median), "largest": over(lines, max)}


def checked(rig: WireRig) -> Line:
    return {"again_summed": rig.engine.rpc("artd_direct_check")["summed"]}


# ---- refusals -----------------------------------------------------------------------------------------------------------


def fence(rig: WireRig, _rounds: int) -> Iterator[Line]:
    """A stale trainer's header: nothing is copied, NaN stays."""
    rig.engine.rpc("probe_spoil")
    rig.prepare(change=False)
    right = rig.fence()
    feed = rig.feed(right["fence"] - 1)
    yield {"what": "the fence of the push before", **ends(rig, right)}
    rig.disconnect()
    feed.join()
    yield from after(rig)


def silent(rig: WireRig, _rounds: int) -> Iterator[Line]:
    """A trainer that sends nothing; one that sends two buffers; an engine that takes nothing."""
    yield {"what": "nothing is sent", "deadline": HANG_S, **ends(rig, rig.fence())}
    yield from after(rig)
    right = rig.fence()
    with rig.trainer.wire.within(TIMEOUT_S):  # type: ignore[attr-defined]
        half(rig.trainer.feeder, right["fence"])
    yield {"what": "two buffers are sent", "deadline": HANG_S, **ends(rig, right)}
    yield from after(rig)
    began = time.perf_counter()
    said = error_of(lambda: rig.trainer.feed(rig.fence()["fence"], HANG_S))
    yield {"what": "nothing is taken", "deadline": HANG_S, "seconds": time.perf_counter() - began, **said, **alive(rig)}
    yield from after(rig)


def killed(rig: WireRig, _rounds: int) -> Iterator[Line]:
    """A trainer's process that is killed when it has sent two buffers: the engine's call ends, and its memory is free."""
    folder = rig.folder / "child"
    folder.mkdir()
    table = msgspec.convert(rig.engine.rpc("artd_direct_table"), EngineTable)
    (folder / "table").write_bytes(msgspec.msgpack.encode(table))
    right = rig.fence()
    words = [folder, rig.trainer.config["num_hidden_layers"], right["fence"], int(rig.tiny)]
    child = subprocess.Popen(
        [sys.executable, "-m", "tools.gpu.wire_child", *map(str, words)], stdout=subprocess.PIPE, text=True
    )
    marks: list[float] = []

    def kill() -> None:
        assert child.stdout is not None and child.stdout.readline().strip() == "half"
        time.sleep(0.3)
        child.kill()
        marks.append(time.perf_counter())

    striking = threading.Thread(target=kill)
    try:
        while not (folder / "offer").exists():
            if child.poll() is not None:
                raise RuntimeError("the child ended before it had offered anything: see above")
            time.sleep(0.02)
        rig.engine.rpc("artd_direct_open", str(folder / "offer"))
        rig.engine.rpc("artd_direct_expect", str(folder / "sums.json"))
        striking.start()
        line = ends(rig, right, TIMEOUT_S)
        striking.join()
    finally:
        child.kill()
        child.wait()
    took = time.perf_counter() - marks[0]
    yield {"what": "a trainer that is killed", **line, "from kill to error": took, "child": child.returncode}
    yield from after(rig)


def half(source: Any, fence: int) -> None:
    """Send the header and two buffers of a push."""
    source.outlet.begin(fence)
    for slot in range(2):
        source._schedule.fill(slot)
    source._schedule.queue.settle()
    source.outlet.ready = 2


def ends(rig: WireRig, fence: Line, timeout_s: float = HANG_S) -> Line:
    """A pull that must fail, and what it says."""
    began = time.perf_counter()
    rig.engine.pause()
    try:
        said = error_of(lambda: rig.engine.rpc("artd_direct_pull", fence, timeout_s))
    finally:
        rig.engine.rpc("probe_forgive")
        rig.engine.resume()
    return {"seconds": time.perf_counter() - began, **said}


def after(rig: WireRig) -> Iterator[Line]:
    """A new connection, and a push over NaN that counts."""
    opened = rig.connect()
    rig.engine.rpc("probe_spoil")
    yield {"what": "a right push after it", "met": opened["met"], **rig.push(), **checked(rig)}


def alive(rig: WireRig) -> Line:
    """Whether the trainer's GPU still computes."""
    one = torch.ones(256, 256, device=rig.trainer.device)
    return {"trainer's GPU works": float(one.matmul(one).sum()) == 256**3}


def emptied() -> None:
    """What was on this process's GPU is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


ITEMS: dict[str, Callable[[WireRig, int], Iterator[Line]]] = {
    "in_place": in_place, "staged": staged, "fence": fence, "killed": killed, "silent": silent, "ipc": ipc,
}  # fmt: skip
REFUSALS = ("fence", "killed", "silent")
