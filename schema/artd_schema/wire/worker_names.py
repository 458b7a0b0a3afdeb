"""Worker names: this module alone makes them from (kind, run, replica) and reads them back.

A name is a worker's identity in rows, in messages, in the environment by which the daemon finds its processes, and in the names of logs
and folders. `run` is the id of a run, which is never given again (docs/adr/0004-keys-by-run-and-replica.md).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .worker import WorkerKind

_KINDS: dict[str, WorkerKind] = {"gateway": "gateway", "trainer": "trainer", "engine": "engine"}
_NAME = re.compile(r"(gateway)|(trainer)-([1-9]\d*)|(engine)-([1-9]\d*)-(\d+)")


class WorkerId(NamedTuple):
    """The key of a worker. `run` is 0 for the gateway, which serves every run; only an engine has a `replica` other than 0."""

    kind: WorkerKind
    run: int = 0
    replica: int = 0

    @property
    def name(self) -> str:
        """`gateway`, `trainer-RUN` or `engine-RUN-REPLICA`."""
        numbers = {"gateway": (), "trainer": (self.run,), "engine": (self.run, self.replica)}[self.kind]
        return "-".join([self.kind, *map(str, numbers)])


GATEWAY = WorkerId("gateway").name


def trainer_name(run: int) -> str:
    return WorkerId("trainer", run).name


def engine_name(run: int, replica: int = 0) -> str:
    return WorkerId("engine", run, replica).name


def parse_worker(name: str) -> WorkerId:
    """Return the key that `name` was made from. Raises ValueError for a name that no worker has."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not a worker's name; those are gateway, trainer-RUN and engine-RUN-REPLICA")
    kind, *numbers = (part for part in found.groups() if part is not None)
    return WorkerId(_KINDS[kind], *map(int, numbers))


def label(kind: str, replica: int) -> str:
    """Return what people call a worker of a run that they know: its kind, and its number if it is not the first."""
    return f"{kind} {replica}" if replica else kind
