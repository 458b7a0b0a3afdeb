"""Defines the data that describes a worker to the supervisor, and the protocol by which the supervisor reports on it.

The daemon implements `Listener` over the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from artd_schema.wire.worker import WorkerKind

from .postmortem import Status
from .reap import Leftover
from .states import State


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to start one process. `tmpdir` is also its cwd: the supervisor makes it (mode 0700) before the process and removes it after
    the proven death. The process inherits the descriptors `fds` under the same numbers."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    tmpdir: Path
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A worker. The supervisor calls `launch` with each new spawn number. `start_timeout_s` limits the time from its start to Ready.
    `leftovers` are its processes from older boots that outlived SIGKILL; the supervisor starts nothing beside them."""

    name: str
    kind: WorkerKind
    launch: Callable[[int], Launch]
    start_timeout_s: float
    leftovers: tuple[Leftover, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Info:
    """The row of a worker in table `process`. `pid`, `ticks` and `session` are None while it has no process; a leftover of an older
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
    """The daemon's side. The worker's task awaits every call, in order, before it goes on."""

    async def next_spawn(self, name: str) -> int:
        """Return a number that this worker never had; it is durable before this returns."""

    async def on_exit(self, name: str, spawn: int, status: Status, ordered: bool, tail: str) -> None:
        """Record that a process of the worker and its whole subtree are proven dead."""

    async def on_state(self, name: str, state: State, info: Info) -> None:
        """Record that the worker is now in `state`. The worker calls it again in `starting` when the process exists."""
