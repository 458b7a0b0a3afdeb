"""The configuration that a worker gets in `Welcome`."""

from __future__ import annotations

from msgspec import Struct

from artd_schema.data.base import BaseModel
from artd_schema.data.trajectory import RouteShape
from artd_schema.packages import PackageCode
from artd_schema.run.spec import RunSpec


class TrainerConfig(Struct, frozen=True, kw_only=True):
    """What a trainer process needs to know about its run.

    `base` has the files of the base model, which the trainer checks before it is ready (None: it does not check).
    `loss` is the package's code of the spec's loss, whose copy is on PYTHONPATH (None: artd's own). `family` is
    likewise the package's code that plans the base model.
    """

    run: str
    spec: RunSpec
    base_digest: str
    base: BaseModel | None = None
    loss: PackageCode | None = None
    family: PackageCode | None = None


class EngineConfig(Struct, frozen=True, kw_only=True):
    """What an engine harness needs.

    `dir` is the folder of this spawn, with mode 0700 (socket, FileStore, TMPDIR). `log` is the file of the server's
    output. `routes` asks for the experts of every token, in this shape (None: a dense model, or expert_replay=false).
    The harness ends an engine that computed nothing for `stall_s` seconds while requests ran; 0: never. `base` is as in
    TrainerConfig.
    """

    run: str
    spec: RunSpec
    dir: str
    log: str
    python: str
    routes: RouteShape | None = None
    stall_s: float = 0.0
    base: BaseModel | None = None


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """What a gateway needs. Every request must carry the bearer token `token`. The gateway inherits its listening
    socket (ARTD_LISTENER), so no address is here."""

    token: str
