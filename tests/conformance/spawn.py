"""One spawn of an engine as the suite sees it: a real harness, and a relay before its server.

A test can spoil a call or kill a process, and see what the harness reports, /proc, and what the server answers a client. A
`Kind` holds what differs from engine to engine; the author of another engine writes one. Nothing is observed through the code
under test, but by the suite's own HTTP, files and /proc.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from artd.supervise import procfs
from artd_schema.crashpoint import VARIABLE as CRASH_DIR
from artd_schema.data.manifest import CheckpointManifest
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Adapter, Capabilities, EngineError, model_name
from tests.engine import folders
from tests.fake_daemon import INSTANCE, WorkerDaemon, start_engine
from tests.process.helpers import session_members
from tests.spare_cpu import leave_a_cpu

from .speech import Client, Speech

RELAY = Path(__file__).with_name("relay.py")
Flaw = Literal["", "dies", "stalls", "wrong", "short", "absent"]
"""What a trainer's side does in the middle of its tensors: ends, goes silent, sends one changed, leaves one out. absent: it
never comes (nobody calls `Feed.send`)."""


class Feed(Protocol):
    """The trainer's side of the live pushes to one spawn. rendezvous, transfer: of `Push`."""

    rendezvous: str
    transfer: w.Transfer

    def send(self, push: w.Push, flaw: Flaw = "") -> None:
        """Begin to give the tensors of a push; returns before the engine has them."""

    def close(self) -> None: ...


class Kind(Protocol):
    """One engine. python: the harness's interpreter; server: the program that the harness starts as the engine's
    interpreter; ways: of a live push (keys of `pushes.CALLS`); deadline_s: of a push that is to hang; patience_s: for what has to
    succeed; tokens: a request makes them in about a second; ahead: spawns that are started beside the one that is tried;
    harness: the module that runs as the harness; versions: what the engine's can do; speech: its wire; workers: whether its other processes do the work, which else only have to live; env: of the harness."""

    python: str
    server: str
    spec: RunSpec
    routes: RouteShape | None
    ways: tuple[str, ...]
    deadline_s: float
    patience_s: float
    tokens: int
    workers: bool
    ahead: int
    env: dict[str, str]
    harness: str
    versions: Sequence[Capabilities]
    speech: Speech

    def client(self, socket: str) -> Client:
        """Somebody who asks the server behind this socket."""

    def adapter(self, socket: Path, deadline: Deadline, owner: str) -> Adapter:
        """An adapter to this server, whose own routes are called as this owner."""

    def checkpoint(self, step: int) -> Path:
        """Folder of a committed checkpoint, the same for every call. Steps 0, 1, 2 and 3 differ by far more than a
        canary's bounds."""

    def feed(self, folder: Path, way: str) -> Feed:
        """folder: of the spawn, on this machine."""


@dataclass
class Spawn:
    """One harness and its server. root: a short path of its own (a socket path has 107 bytes)."""

    kind: Kind
    root: Path
    number: int
    config: EngineConfig
    daemon: WorkerDaemon
    socket: str = ""

    @classmethod
    def start(cls, kind: Kind, root: Path, number: int, faults: dict[str, Any] | None = None) -> Spawn:
        """A spawn that is Ready, or whose Down has come (see `daemon.received`). faults: from the start."""
        relay = root / "relay"
        relay.mkdir(mode=0o700, parents=True)
        (relay / "faults").write_text(json.dumps(faults or {}))
        python = root / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {RELAY} {kind.server} "$@"\n')
        python.chmod(0o700)
        config = EngineConfig(run="toy", spec=kind.spec, dir=str(root / "e"), log=str(root / "engine.log"),
                                python=str(python), routes=kind.routes)  # fmt: skip
        tags = {"ARTD_RELAY": str(relay), "ARTD_RELAY_QUIET": ",".join(kind.speech.quiet), CRASH_DIR: str(root)}
        daemon = start_engine(config, kind.python, kind.env | tags, number, kind.harness)
        made = cls(kind, root, number, config, daemon)
        answer = made.daemon.expect((w.Ready, w.Down), 600.0)
        made.socket = answer.socket if isinstance(answer, w.Ready) else ""
        leave_a_cpu(one.pid for one in made._engine())
        return made

    # ---- what is done to it -------------------------------------------------------------------------------------------

    @contextmanager
    def faults(self, faults: dict[str, Any]) -> Iterator[None]:
        """For a while, these calls go wrong (`relay.py`)."""
        file = self.root / "relay" / "faults"
        file.with_suffix(".new").write_text(json.dumps(faults))
        file.with_suffix(".new").replace(file)
        try:
            yield
        finally:
            file.write_text("{}")

    def kill_server(self) -> None:
        """SIGKILL the server's main process, alone."""
        os.kill(self.server, signal.SIGKILL)

    def kill_workers(self) -> None:
        """SIGKILL the server's other processes, which hold the weights, and leave the main one."""
        procfs.strike([one for one in self._engine() if one.pid != self.server], signal.SIGKILL)

    def adapter(self, deadline_s: float = 20.0, owner: str = "") -> Adapter:
        """An adapter of its own to the server, through the relay. owner: in place of this spawn's."""
        return self.kind.adapter(Path(self.socket), Deadline(deadline_s), owner or owner_of(INSTANCE, self.number))

    def end(self) -> None:
        """End what is left of it."""
        with self.daemon:
            pass
        procfs.strike(session_members(self.daemon.process.pid), signal.SIGKILL)

    # ---- what is seen of it -------------------------------------------------------------------------------------------

    @property
    def server(self) -> int:
        """Process of the server."""
        return int((self.root / "relay" / "server").read_text())

    @property
    def upstream(self) -> str:
        """The server's own socket, behind the relay."""
        return str(self.root / "relay" / "upstream")

    def calls(self) -> list[dict[str, Any]]:
        """Every call so far: route, query, body. The last line may be half written yet."""
        lines = (self.root / "relay" / "calls").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def living(self) -> list[int]:
        """Processes of its session that live."""
        return [one.pid for one in session_members(self.daemon.process.pid)]

    def _engine(self) -> list[procfs.Stat]:
        """The server's processes that live."""
        harness = self.daemon.process.pid
        mine = [one for one in session_members(harness) if one.pid != harness]
        return [one for one in mine if str(RELAY) not in _command(one.pid)]

    @property
    def client(self) -> Client:
        """Somebody beside the harness."""
        return self.kind.client(self.upstream)

    def complete(self, model: str, tokens: int, prompt: Sequence[int] = (5, 6, 7)) -> str:
        """A greedy completion of so many tokens; why it ended."""
        return self.client.complete(model, tokens, prompt)

    def gap(self, model: str, step: int) -> tuple[float, float]:
        """How far its scores are from the canary of a checkpoint, in nats: the largest and the mean difference."""
        canary = manifest(self.kind.checkpoint(step)).canary
        scored = self.client.scores(model, canary.prompts)
        found = [
            abs(score - want)
            for row, wanted in zip(scored, canary.logprobs, strict=True)
            for score, want in zip(row, wanted, strict=True)
        ]
        return max(found), sum(found) / len(found)

    def name(self, step: int) -> str:
        """The name under which it serves a step."""
        merged = self.kind.spec.rollout_weights_mode == "merged"
        return model_name(self.config) if merged else f"toy@{step}"

    def serves(self, step: int, model: str = "") -> bool:
        """Whether what it answers is what the trainer computed for this checkpoint. model: asked (that step's name)."""
        canary = manifest(self.kind.checkpoint(step)).canary
        largest, mean = self.gap(model or self.name(step), step)
        return largest <= canary.max_abs and mean <= canary.mean_abs


def owner_of(instance: str, spawn: int) -> str:
    """Who a spawn's harness says it is, in a header of its calls."""
    return f"{instance}/{spawn}"


_PAIRS = itertools.count(1)


def rendezvous(folder: Path) -> Path:
    """Where a trainer's side and a spawn meet: a path of their own, not there yet."""
    return folder / f"pair-{next(_PAIRS)}"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""


def manifest(checkpoint: Path) -> CheckpointManifest:
    return msgspec.json.decode((checkpoint / "manifest.json").read_bytes(), type=CheckpointManifest)


def reference(checkpoint: Path, step: int) -> w.CheckpointRef:
    return w.CheckpointRef(
        run="toy", step=step, epoch=step, lineage=0, sha=folders.sha(checkpoint), dir=str(checkpoint)
    )


@contextmanager
def refused(match: str = "", kind: type[EngineError] = EngineError, within_s: float = 60.0) -> Iterator[None]:
    """The block must end with this error, in time."""
    began = time.monotonic()
    try:
        yield
    except EngineError as error:
        assert isinstance(error, kind), f"{type(error).__name__} in place of {kind.__name__}: {error}"
        assert match in str(error), f"expected {match!r}: {error}"
        assert str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    took = time.monotonic() - began
    assert took <= within_s, f"it took {took:.1f} s, {within_s:.1f} s were allowed"
