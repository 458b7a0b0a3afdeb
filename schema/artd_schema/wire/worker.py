"""Messages between the daemon and its managed children (protocol 1): ROUTER in the daemon, DEALER in the worker.

Frames: [b"A1", header, bulk...]; the header is one of the tagged unions below in msgpack. Every effect of a worker is
conditional on its fence: a message with an older one is answered `Fenced` and changes nothing.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from artd_schema.data.trajectory import RouteShape, Sampling, Split
from artd_schema.run.engines import DEFAULT
from artd_schema.run.spec import Learning, Mode

from .deliveries import Delivery, Recall, Recalled
from .message import Message as _Message
from .worker_config import EngineConfig, GatewayConfig, TrainerConfig

LISTENER = "ARTD_LISTENER"
"""Environment of a gateway: the number of the listening TCP socket that it inherits."""
WorkerKind = Literal["trainer", "engine", "gateway"]
FailureClass = Literal["transient", "permanent", "interrupted", "full"]
"""`full`: there was no space for the result."""
Transfer = Literal["gloo", "stock", "direct", "nccl"]
"""How a live push's weights travel (docs/weights.md): broadcast between CPUs (gloo), by the engine's own NCCL calls
(stock), pulled by the engine from the trainer's memory (direct), or sent over NCCL by the plan of direct (nccl)."""


class CheckpointRef(Struct, frozen=True, kw_only=True):
    """A committed checkpoint. `dir` is an absolute path; `sha` is the sha256 of its manifest.json in hex."""

    run: str
    step: int
    epoch: int
    lineage: int
    sha: str
    dir: str


# ---- daemon -> worker -----------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    """The answer to Hello. `heartbeat_s` is the time between two `Beat`s. `max_message` limits all frames of one
    message, in bytes."""

    worker: str
    heartbeat_s: float
    max_message: int
    trainer: TrainerConfig | None = None
    engine: EngineConfig | None = None
    gateway: GatewayConfig | None = None


class Reject(_Message, frozen=True):
    """The daemon does not take this worker (wrong protocol, unknown spawn); the worker exits."""

    reason: str


class Run(_Message, frozen=True):
    """An order to do a job in the staging folder `dir`, which the worker creates. `parent` is the checkpoint to start
    from, None for init. `batch` and `manifest` are the paths of the packed tensors and their JSON manifest; `replay`
    and `replay_manifest` those of the batch's replay bundle ("" = none). `epoch` is the policy epoch of the result.
    `learning` is what a train job learns with, None where that is the spec."""

    job: int
    fence: int
    kind: Literal["init", "train"]
    step: int
    epoch: int
    lineage: int
    dir: str
    instance: str
    parent: CheckpointRef | None = None
    batch: str = ""
    manifest: str = ""
    batch_sha: str = ""
    replay: str = ""
    replay_manifest: str = ""
    learning: Learning | None = None


class Cancel(_Message, frozen=True):
    """An order to stop this job as soon as possible. The worker answers `Failed` with the class interrupted."""

    job: int
    fence: int


class Committed(_Message, frozen=True):
    """The staged result is durable: the weights in the worker's memory are now this checkpoint."""

    job: int
    fence: int
    checkpoint: CheckpointRef


class Fenced(_Message, frozen=True):
    """The message came too late: the worker drops the work and removes its files."""

    job: int
    fence: int


class Ack(_Message, frozen=True):
    """The daemon has taken a final report: the worker stops resending it."""

    job: int
    fence: int


class Push(_Message, frozen=True):
    """An order to bring a committed checkpoint into an engine. The harness always gets it; the trainer gets it, too, if
    `source` is `live`.

    - `name`: the served model name, `RUN@STEP`.
    - `source`: with `disk` the engine reads the checkpoint folder; with `live` the weights come from the trainer's
      memory, by `transfer`.
    - `rendezvous`: a path for each (trainer spawn, engine spawn), below the engine's folder. gloo, stock: a file
      through which the two sides meet. direct, nccl:
      a folder that the trainer creates. It writes its `Offer` there as `offer`, in answer to the `EngineTable` that the harness wrote as `table` beside it.
    - `engine`: the worker that gets the weights. A push with a lower fence than an earlier one for its engine is
      refused.
    - `deadline_s`: the push fails after this many seconds without a sign of progress (a phase, a loaded tensor).
    """

    push: int
    fence: int
    checkpoint: CheckpointRef
    mode: Mode
    source: Literal["live", "disk"]
    name: str
    drain_s: float
    deadline_s: float
    rendezvous: str = ""
    transfer: Transfer = "gloo"
    engine: str = ""


class Proceed(_Message, frozen=True):
    """To the harness, after its `Pausing`: no more requests are admitted to the engine, so pause it."""

    push: int
    fence: int


class PushEnd(_Message, frozen=True):
    """To the trainer: the push has ended (live or failed), so it aborts what is left of it."""

    push: int
    fence: int


class Unload(_Message, frozen=True):
    """To the harness: unload this adapter when its last request has ended (lora mode)."""

    name: str


class Hold(_Message, frozen=True):
    """To the gateway: admit no more requests to this engine until a newer Route, and answer Held at once."""

    push: int
    fence: int
    engine: str


class Served(Struct, frozen=True, kw_only=True):
    """One model name that an engine serves."""

    name: str
    run: str
    step: int
    epoch: int


class EngineRoute(Struct, frozen=True, kw_only=True):
    """How the gateway reaches one engine. `socket` is the Unix socket of its OpenAI server. `served` has the newest
    step last. `hold` says that no request may be admitted now. `routes` is the shape of the experts that the gateway
    takes for the ledger. `kind` and `grammar` are those of the engine spec."""

    engine: str
    socket: str
    mode: Mode
    base_model: str
    max_model_len: int
    served: tuple[Served, ...]
    hold: bool = False
    routes: RouteShape | None = None
    kind: str = DEFAULT
    grammar: Literal["drop", "refuse"] = "drop"


class Route(_Message, frozen=True):
    """To the gateway: the whole routing table. `runs` lists all existing names, even those that no engine serves."""

    seq: int
    runs: tuple[str, ...]
    engines: tuple[EngineRoute, ...]


class ExchangeAck(_Message, frozen=True):
    """The ledger entry is durable (error ""), or was refused with this error. closed: because its rollout takes no more responses."""

    response_id: str
    error: str = ""
    closed: bool = False


class Exit(_Message, frozen=True):
    """End in order within grace_s seconds."""

    grace_s: float


ToWorker = (
    Welcome | Reject | Run | Cancel | Committed | Fenced | Ack | Push | Proceed | PushEnd | Unload | Hold
    | Route | ExchangeAck | Recalled | Exit
)  # fmt: skip

# ---- worker -> daemon -----------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """A worker's first message. `instance` is that of its data folder (ARTD_INSTANCE), `spawn` the supervisor's number
    for the process (ARTD_SPAWN), `build` the digest of its code."""

    kind: WorkerKind
    name: str
    instance: str
    protocol: int
    spawn: int
    pid: int
    build: str
    versions: dict[str, str] = field(default_factory=dict)


class Ready(_Message, frozen=True):
    """The worker can take work. `socket` is the engine's OpenAI socket, `url` the gateway's address. `transfers` are
    those that it can use for a live push, best first. `obstacle` says why the engine takes no direct one; "" if it
    does, or if it is on a CPU."""

    socket: str = ""
    url: str = ""
    transfers: tuple[Transfer, ...] = ("gloo",)
    obstacle: str = ""


class Beat(_Message, frozen=True):
    """A heartbeat. `progress` rises with every part of the job that is done (a row's forward or backward, a phase).
    `push` replaces `job` for an engine that is pushed to. `rss` is the memory in use, in bytes."""

    job: int = 0
    fence: int = 0
    progress: int = 0
    rss: int = 0
    push: int = 0


class Accepted(_Message, frozen=True):
    """The trainer has begun the job."""

    job: int
    fence: int


class Staged(_Message, frozen=True):
    """A job's result is complete and fsynced in its folder. The worker resends this until Committed, Ack or Fenced
    comes. `metrics` are loss, grad_norm, ...; `seconds` are named durations."""

    job: int
    fence: int
    dir: str
    manifest_sha: str
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Failed(_Message, frozen=True):
    """A job ended without a result; the worker resends this until Ack or Fenced comes. `error` says what failed and
    what to do; `trace` is the end of the stack."""

    job: int
    fence: int
    failure: FailureClass
    error: str
    trace: str = ""


class Refused(_Message, frozen=True):
    """The trainer does not have the checkpoint of a push, or cannot send it by the push's transfer: the daemon pushes
    from disk. `transfer` names a transfer that never works for this engine; None: another push may use it."""

    push: int
    fence: int
    reason: str
    transfer: Transfer | None = None


class Pausing(_Message, frozen=True):
    """From the harness: this merged push did all that it can do while requests run. The engine pauses after `Proceed`."""

    push: int
    fence: int


class Live(_Message, frozen=True):
    """The engine serves the push's checkpoint. Only the harness says so, after the canary or, if requests continued
    across the push, every tensor's checksum has verified it. `seconds` has the phases (hold, pause, transfer, load,
    resume, verify). `max_abs` and `mean_abs` are the canary's differences in nats."""

    push: int
    fence: int
    max_abs: float | None = None
    mean_abs: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class PushFailed(_Message, frozen=True):
    """A push did not become live. The engine's weights are unknown, and the harness ends the engine's process."""

    push: int
    fence: int
    phase: str
    error: str


class Held(_Message, frozen=True):
    """From the gateway: it admits no more requests to the engine. `in_flight` counts those that still run there."""

    push: int
    fence: int
    engine: str
    in_flight: int


class RouteTaken(_Message, frozen=True):
    """From the gateway: it routes by this table now."""

    seq: int


class Exchange(_Message, frozen=True):
    """From the gateway: one response for the ledger. Each bulk frame is the msgpack `Turn` of one choice. The HTTP
    response's last byte leaves only after ExchangeAck. `model` is the served name, `RUN@STEP`. `rollout` is a name, ""
    = none; `request` is the request's sha256, `place` its order (docs/adr/0006). `part`: a stream broke after this much."""

    response_id: str
    run: str
    model: str
    split: Split
    sampling: Sampling
    choices: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    rollout: str = ""
    request: str = ""
    place: int = 0
    part: bool = False


class Down(_Message, frozen=True):
    """The harness's server died or could not start, and the harness exits next. `tail` is the end of the server's log."""

    error: str
    tail: str = ""


FromWorker = (
    Hello | Ready | Beat | Accepted | Staged | Failed | Refused | Pausing | Live | PushFailed | Held
    | RouteTaken | Exchange | Delivery | Recall | Down
)  # fmt: skip
