"""A trainer that trains nothing: speaks the protocol through the real link and stages tiny valid checkpoints.

Run by a stand-in for the megatron runtime's interpreter. Faults (see script.py), by step: `train:N` fences at which it
kills itself in the middle, `fail:N` / `refuse:N` transient and permanent failures, `damage:N` a file that is not what
its manifest says, `exit` spawns that end at once. Gates: `train:N` in the middle, `staged:N` before the report.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

from artd_schema import worker as w
from artd_workers.harness import Link, LinkClosed
from tests.fakes.script import Script
from tests.fakes.staging import stage


def main() -> None:
    script = Script.from_env()
    link = Link.from_env("trainer", {"fake": "1"})
    if script.wants("exit", link.identity.spawn):
        raise SystemExit(f"fake trainer: told to end at spawn {link.identity.spawn}")
    welcome = link.start()
    assert welcome.trainer is not None
    link.send(w.Ready())
    script.mark("started", link.identity.spawn)
    try:
        while True:
            received = link.receive(1.0)
            if received is None:
                continue
            message, _ = received
            if isinstance(message, w.Run):
                work(link, script, message, welcome.trainer)
            elif isinstance(message, w.Push) and script.wants("unfed", message.push):
                link.send(w.Refused(push=message.push, fence=message.fence, reason="told to refuse"))
            elif isinstance(message, w.Exit):
                link.close()
                return
    except LinkClosed:
        return


def work(link: Link, script: Script, order: w.Run, config: w.TrainerConfig) -> None:
    point = f"train:{order.step}"
    link.busy(order.job, order.fence)
    link.send(w.Accepted(job=order.job, fence=order.fence))
    if order.parent is not None:
        assert (Path(order.parent.dir) / "manifest.json").is_file(), "the parent's files are not there"
        assert Path(order.batch).is_file() and Path(order.manifest).is_file(), "the batch's files are not there"
        read_replay(script, order)
    script.gate(point, order.fence)
    time.sleep(script.number("train_s"))
    if script.wants(f"die:{order.step}", order.fence):
        os.kill(os.getpid(), signal.SIGKILL)
    for name, failure in (("fail", "transient"), ("refuse", "permanent")):
        if script.wants(f"{name}:{order.step}", order.fence):
            link.report(w.Failed(job=order.job, fence=order.fence, failure=failure, error=f"told to: {failure}"))
            link.idle()
            return
    sha = stage(Path(order.dir), order, config.base_digest, run=config.run)
    if script.wants(f"damage:{order.step}", order.fence):
        (Path(order.dir) / "weights.bin").write_bytes(b"other bytes")
    script.gate(f"staged:{order.step}", order.fence)
    link.report(w.Staged(job=order.job, fence=order.fence, dir=order.dir, manifest_sha=sha, seconds={"train": 0.01}))
    link.idle()


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
