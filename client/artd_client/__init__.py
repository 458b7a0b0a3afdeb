"""The Python client of artd: `Client` for asyncio programs, `SyncClient` for others.

It imports only the schema, msgspec and pyzmq, and `openai` when `run.openai()` is called.
"""

from artd_schema.data.trajectory import ExchangeRef, Sampling, Turn
from artd_schema.run.spec import (
    AdvantageSpec,
    CorrectionSpec,
    EngineSpec,
    KlSpec,
    LengthSpec,
    LoraSpec,
    LossSpec,
    OptimizerSpec,
    RunSpec,
    TrainerSpec,
)
from artd_schema.wire.client_api import GroupInfo, RunInfo, StepInfo, Submitted

from .address import Remote
from .blocking import SyncGroup, SyncRollout
from .client import Client
from .errors import (
    ArtdError,
    Busy,
    Closed,
    Conflict,
    DaemonNotRunning,
    Draining,
    Failed,
    Invalid,
    NotAllowed,
    NotFound,
    Stalled,
    TimedOut,
    TooLarge,
    WrongProtocol,
)
from .rollout import Group, Rollout
from .run import Run
from .sync import SyncClient, SyncRun
from .trajectory import Trajectory
from .turns import turn

__all__ = [
    "AdvantageSpec",
    "ArtdError",
    "Busy",
    "Client",
    "Closed",
    "Conflict",
    "CorrectionSpec",
    "DaemonNotRunning",
    "Draining",
    "EngineSpec",
    "ExchangeRef",
    "Failed",
    "Group",
    "GroupInfo",
    "Invalid",
    "KlSpec",
    "LengthSpec",
    "LoraSpec",
    "LossSpec",
    "NotAllowed",
    "NotFound",
    "OptimizerSpec",
    "Remote",
    "Rollout",
    "Run",
    "RunInfo",
    "RunSpec",
    "Sampling",
    "Stalled",
    "StepInfo",
    "Submitted",
    "SyncClient",
    "SyncGroup",
    "SyncRollout",
    "SyncRun",
    "TimedOut",
    "TooLarge",
    "TrainerSpec",
    "Trajectory",
    "Turn",
    "WrongProtocol",
    "turn",
]
