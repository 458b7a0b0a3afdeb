"""What the supervisor is told about a worker, and what it tells about it.

Owner of: no state. Invariants: plain data and one protocol; the daemon implements `Listener` over the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from artd_schema.worker import WorkerKind

from .postmortem import Status
from .reap import Leftover
from .states import State


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to make one process. tmpdir: made (0700) before it and removed after its proven death; also its cwd. fds: descriptors
    that it inherits, under the same numbers."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    tmpdir: Path
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A worker. launch: called with each new spawn number; start_timeout_s: from its start to Ready; leftovers: processes
    of it from older boots that outlived SIGKILL: nothing is started beside them."""

    name: str
    kind: WorkerKind
    launch: Callable[[int], Launch]
    start_timeout_s: float
    leftovers: tuple[Leftover, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Info:
    """What table `process` holds of a worker. pid, ticks, session: None while it has no process; a leftover of an older
    boot counts as one."""

    kind: WorkerKind
    spawn: int
    restarts: int
    boot_id: str = ""
    pid: int | None = None
    ticks: int | None = None
    session: int | None = None
    error: str = ""
    log: str = ""


class Listener(Protocol):
    """The daemon's side; every call is awaited by the worker's task, in order, before it goes on."""

    async def next_spawn(self, name: str) -> int:
        """A number that this worker never had, durable before it is returned."""

    async def on_exit(self, name: str, spawn: int, status: Status, ordered: bool, tail: str) -> None:
        """A process of the worker is proven dead, with its whole subtree."""

    async def on_state(self, name: str, state: State, info: Info) -> None:
        """The worker is now in `state`; called again in `starting` once the process is there."""
