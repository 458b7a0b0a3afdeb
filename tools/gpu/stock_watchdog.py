"""What ends a push of `tools.gpu.stock` that hangs, on either side; no trainer's model: tensors are zeros.

Run as `python -m tools.gpu.stock_watchdog RENDEZVOUS TABLE` it is a trainer that is killed in the middle of its push.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from artd_schema.data.manifest import WeightEntry
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import EngineError
from artd_workers.models.registry import plan_for
from artd_workers.trainer.push.stock import Sender
from artd_workers.transfer.nccl.communicator import NcclError
from tools.gpu import shape
from tools.gpu.stock_rig import Engine, Line, engines, gpu_mib, meet, push

HANG_S = 4.0
"""Deadline of the engine's side; the trainer's is three times as long."""


def watchdog(tiny: bool) -> Iterator[Line]:
    """The trainer hangs, and is killed, in the middle of a push: the engine's call ends by its deadline; the engine is killed:
    the trainer's broadcast ends by its own."""
    config = shape.config(2 if tiny else 4, tiny)
    table = _table(config)
    if tiny:
        yield from _tiny_watchdog(config, table)
        return
    before = gpu_mib(1)
    with engines(config, tiny, 2) as (folder, (first, second)):
        for engine in (first, second):
            engine.ready()
            engine.probe("probe_plain", plain=True)
        yield {"what": "trainer hangs, then the engine is killed"} | _hang(first, folder / "hung", table)
        yield {"what": "trainer is killed"} | _kill(second, folder, table)
    yield {"what": "memory of the engine's GPU, MiB", "before": before, "after": gpu_mib(1)}


def _hang(engine: Engine, rendezvous: Path, table: Sequence[WeightEntry]) -> Line:
    device = torch.device("cuda", 0)
    sender, errors, go = Sender(rendezvous, device), [], threading.Event()
    joined = meet(engine, sender, rendezvous)["seconds"]
    good = push(engine, sender, table, _zeros(table, device), True)["total"]

    def stuck() -> Iterator[Tensor]:
        for number, tensor in enumerate(_zeros(table, device)):
            if number == len(table) // 2:
                go.wait()
            yield tensor

    def send() -> None:
        try:
            sender.send(table, stuck(), 3 * HANG_S)
        except NcclError as error:
            errors.append((time.perf_counter(), str(error)))

    engine.pause(0.0, Deadline(10.0))
    began, thread = time.perf_counter(), threading.Thread(target=send)
    thread.start()
    told = _ends(engine, table)
    ended = time.perf_counter()
    engine.server.kill()
    killed = time.perf_counter()
    go.set()  # it goes on, to an engine that is gone
    thread.join()
    alive = float(torch.ones(256, 256, device=device).matmul(torch.ones(256, 256, device=device)).sum())
    return {
        "joined": joined, "a good push": good, "engine's call ended": ended - began, "deadline": HANG_S, "said": told,
        "engine killed in": killed - ended, "trainer's broadcast ended": errors[0][0] - began if errors else None,
        "its deadline": 3 * HANG_S, "trainer said": errors[0][1] if errors else "it did not fail", "trainer's GPU works": alive == 256**3,
        "dead": sender.dead,
    }  # fmt: skip


def _kill(engine: Engine, folder: Path, table: Sequence[WeightEntry]) -> Line:
    """A child sends half of the tensors and is killed."""
    rendezvous, listed = folder / "killed", folder / "table"
    listed.write_bytes(msgspec.json.encode(table))
    child = subprocess.Popen([sys.executable, "-m", "tools.gpu.stock_watchdog", str(rendezvous), str(listed)])
    try:
        engine.join(str(rendezvous), Deadline(60.0), "stock")
        engine.pause(0.0, Deadline(10.0))
        began = time.perf_counter()
        told = _ends(engine, table)
        ended = time.perf_counter() - began
    finally:
        status = child.wait(30.0)
    engine.server.kill()
    return {"engine's call ended": ended, "deadline": HANG_S, "said": told, "trainer's status": status}


def die(rendezvous: str, listed: str) -> None:
    """A trainer that is killed in the middle of its push."""
    table = msgspec.json.decode(Path(listed).read_bytes(), type=list[WeightEntry])
    device = torch.device("cuda", 0)

    def tensors() -> Iterator[Tensor]:
        for number, tensor in enumerate(_zeros(table, device)):
            if number == len(table) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield tensor

    sender = Sender(Path(rendezvous), device)
    sender.join(60.0)
    sender.send(table, tensors(), 60.0)


def _ends(engine: Engine, table: Sequence[WeightEntry]) -> str:
    try:
        engine.take(table, True, Deadline(HANG_S))
    except EngineError as error:
        return f"{type(error).__name__}: {error}"
    return "it succeeded"


def _tiny_watchdog(config: dict[str, Any], table: Sequence[WeightEntry]) -> Iterator[Line]:
    with engines(config, True) as (folder, (engine,)):
        sender = Sender(folder / "pair", torch.device("cpu"), engine.nccl)
        meet(engine, sender, folder / "pair")
        engine.never(0)
        began = time.perf_counter()
        try:
            sender.send(table, _zeros(table, torch.device("cpu")), 0.5)
        except NcclError as error:
            yield {"what": "nothing is ever done", "trainer said": str(error), "seconds": time.perf_counter() - began}


def _table(config: dict[str, Any]) -> list[WeightEntry]:
    names = (part for row in plan_for(config).codec.rows for part in row.parts)
    return [WeightEntry(name, "bfloat16", shape.size_of(name, config)) for name in names]


def _zeros(table: Sequence[WeightEntry], device: torch.device) -> Iterator[Tensor]:
    return (torch.zeros(entry.shape, dtype=torch.bfloat16, device=device) for entry in table)


if __name__ == "__main__":
    die(*sys.argv[1:])
