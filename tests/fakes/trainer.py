"""A trainer that trains nothing: it speaks the protocol through the real link, and stages tiny valid checkpoints.

A stand-in for the megatron runtime's interpreter runs it. Faults (see script.py), by step: `train:N` fences at which it kills
itself in the middle; `fail:N`, `refuse:N`, `interrupt:N` transient, permanent and free failures; `damage:N` a file that is not
what its manifest says; `gil:N` fences at which native code holds the GIL for ten seconds; `exit` spawns that end at once;
`memory`: it needs memory that only one process can have, and dies without. Gates: `train:N` in the middle, `staged:N` before
the report. Marks, by the sha of the result: `told:SHA FENCE` when it heard Committed, `fenced:SHA FENCE` when the result was
refused.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import hashlib
import json
import os
import signal
import time
from pathlib import Path

from artd_schema.crashpoint import reach
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.daemon_link import Link, LinkClosed
from tests.fakes.script import Script
from tests.fakes.staging import stage

ROW_S = 0.2
FAILURES: dict[str, w.FailureClass] = {"fail": "transient", "refuse": "permanent", "interrupt": "interrupted"}


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    script = Script.from_env()
    link = Link.from_env("trainer", {"fake": "1"})
    if script.wants("exit", link.identity.spawn):
        raise SystemExit(f"fake trainer: told to end at spawn {link.identity.spawn}")
    welcome = link.start()
    assert welcome.trainer is not None
    link.send(w.Ready())
    script.mark("started", link.identity.spawn)
    if "memory" in script.read():
        take_memory(script)
    staged: dict[tuple[int, int], str] = {}
    try:
        while True:
            received = link.receive(1.0)
            if received is None:
                continue
            message, _ = received
            if isinstance(message, w.Run) and (message.job, message.fence) not in staged:
                staged[message.job, message.fence] = work(link, script, message, welcome.trainer)
            elif isinstance(message, w.Committed):
                script.mark(f"told:{message.checkpoint.sha}", message.fence)
                reach("train.committed")
            elif isinstance(message, w.Fenced) and (sha := staged.get((message.job, message.fence))):
                script.mark(f"fenced:{sha}", message.fence)
            elif isinstance(message, w.Push) and script.wants("unfed", message.push):
                link.send(w.Refused(push=message.push, fence=message.fence, reason="told to refuse"))
            elif isinstance(message, w.Exit):
                link.close()
                return
    except LinkClosed:
        return


def work(link: Link, script: Script, order: w.Run, config: TrainerConfig) -> str:
    """Do a job; the sha of what was staged, "" for nothing."""
    point = f"train:{order.step}"
    link.busy(order.job, order.fence)
    link.send(w.Accepted(job=order.job, fence=order.fence))
    reach("train.accepted")
    if order.parent is not None:
        assert (Path(order.parent.dir) / "manifest.json").is_file(), "the parent's files are not there"
        assert Path(order.batch).is_file() and Path(order.manifest).is_file(), "the batch's files are not there"
        read_replay(script, order)
    script.gate(point, order.fence)
    train(link, script.number("train_s"))
    if script.wants(f"gil:{order.step}", order.fence):
        ctypes.PyDLL(None).sleep(10)
    if script.wants(f"die:{order.step}", order.fence):
        print(f"last words of fence {order.fence}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    for name, failure in FAILURES.items():
        if script.wants(f"{name}:{order.step}", order.fence):
            link.report(w.Failed(job=order.job, fence=order.fence, failure=failure, error=f"told to: {failure}"))
            link.idle()
            return ""
    reach("train.stepped")
    sha = stage(Path(order.dir), order, config.base_digest, run=config.run)
    if script.wants(f"damage:{order.step}", order.fence):
        (Path(order.dir) / "weights.bin").write_bytes(b"other bytes")
    script.gate(f"staged:{order.step}", order.fence)
    link.report(w.Staged(job=order.job, fence=order.fence, dir=order.dir, manifest_sha=sha, seconds={"train": 0.01}))
    link.idle()
    return sha


def train(link: Link, seconds: float) -> None:
    """Row after row for so long, each a mark of progress. A gate makes none, and heartbeats go on at both."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, ROW_S))
        link.progress()


def take_memory(script: Script) -> None:
    """Have it until this process ends. Another that holds it is this one's death, as by the kernel's memory killer."""
    try:
        fcntl.flock(os.open(script.path.with_suffix(".memory"), os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.kill(os.getpid(), signal.SIGKILL)


def read_replay(script: Script, order: w.Run) -> None:
    """What a trainer asks of a batch's replay bundle; the mark `replay:STEP N` says that N tokens have routes."""
    wanted = json.loads(Path(order.manifest).read_bytes())["replay"]
    if not wanted:
        assert not order.replay and not order.replay_manifest, "a bundle that its batch does not know"
        return
    told = Path(order.replay_manifest).read_bytes()
    assert hashlib.sha256(told).hexdigest() == wanted, "the bundle is not the batch's"
    assert Path(order.replay).is_file(), "the bundle's tensors are not there"
    script.mark(f"replay:{order.step}", json.loads(told)["covered"])


if __name__ == "__main__":
    main()
