"""What the daemon tells a worker of its task, in `Welcome`."""

from __future__ import annotations

from msgspec import Struct

from artd_schema.data.base import BaseModel
from artd_schema.data.trajectory import RouteShape
from artd_schema.packages import PackageCode
from artd_schema.run.spec import RunSpec


class TrainerConfig(Struct, frozen=True, kw_only=True):
    """What a trainer process needs to know of its run. base: the files of the base model, which it checks before it is ready
    (None: it does not). loss: the package's code that the spec's loss is, whose copy is on PYTHONPATH (None: artd's own);
    family: that which plans the base model, likewise."""

    run: str
    spec: RunSpec
    base_digest: str
    base: BaseModel | None = None
    loss: PackageCode | None = None
    family: PackageCode | None = None


class EngineConfig(Struct, frozen=True, kw_only=True):
    """What an engine harness needs. dir: 0700 folder of this spawn (socket, FileStore, TMPDIR); log: the server's
    output. routes: capture the experts of every token, in this shape (None: a dense model, or expert_replay=false). stall_s: end an
    engine that computed nothing for so many seconds while requests ran, 0: never.
    base: as for the trainer."""

    run: str
    spec: RunSpec
    dir: str
    log: str
    python: str
    routes: RouteShape | None = None
    stall_s: float = 0.0
    base: BaseModel | None = None


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """token: bearer token that every request must carry. Where to listen is no word: the process inherits the socket
    (ARTD_LISTENER)."""

    token: str
