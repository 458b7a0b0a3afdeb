"""The contract of an engine beside its adapter, and the engine of a kind.

The harness names no engine. `ENGINES` of `artd_schema.run.engines` names the module of each, which is imported on demand.
"""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Literal, Protocol

from artd_schema.run.engines import engine_kind
from artd_schema.run.spec import EngineSpec
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.process.progress import Work

from .adapter import Adapter, Capabilities

Device = Literal["cpu", "cuda"]


class Server(Protocol):
    """One spawn of an engine's server.

    `folder`: `EngineConfig.dir`. `scratch`: its TMPDIR. `ended`: set once it has ended. `lost`: why artd ended it although it
    was alive, "" if artd did not.
    """

    folder: Path
    socket: Path
    scratch: Path
    ended: threading.Event
    lost: str

    def spawn(self) -> None:
        """Start the server from the main thread and return at once. Raises EngineError."""

    def serving(self) -> bool:
        """Return whether it can serve. Raises EngineError once it has ended."""

    def death(self) -> str:
        """Return why it ended, in one sentence."""

    def first_error(self) -> str:
        """Return the first exception in this spawn's log as the end of a sentence, "" if there is none."""

    def tail(self) -> str:
        """Return the last lines of this spawn's log."""

    def kill(self) -> None:
        """End its process group at once. Any thread."""

    def stop(self, grace_s: float) -> list[int]:
        """End it within about grace_s and remove its files. Returns processes that could not be ended."""


class Engine(Protocol):
    """One engine: the `ENGINE` of the module that its entry names as `worker`."""

    def server(self, config: EngineConfig) -> Server:
        """Return a server that is not started yet."""

    def adapter(self, socket: Path, deadline: Deadline) -> Adapter:
        """Return an adapter to a healthy server. Raises EngineError, also for a version that artd does not drive."""

    def read_version(self) -> Capabilities:
        """Return what the version that `server` starts can do. Raises EngineError."""

    def device(self, spec: EngineSpec) -> Device:
        """Return where the server will run. Raises EngineError."""

    def work(self, socket: Path) -> Work:
        """Return what the server says of its work. Raises EngineError."""


def engine_of(kind: str) -> Engine:
    """Return the engine of `EngineSpec.kind`. Raises UnknownEngine."""
    found: Engine = importlib.import_module(engine_kind(kind).worker).ENGINE
    return found
