"""Messages between the daemon and its managed children (protocol 1): ROUTER in the daemon, DEALER in the worker.

Frames: [b"A1", header, bulk...]; the header is one of the tagged unions below in msgpack. Every effect of a worker is
conditional on its fence: a message with an older one is answered `Fenced` and changes nothing.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from artd_schema.data.trajectory import RouteShape, Sampling, Split
from artd_schema.run.engines import DEFAULT
from artd_schema.run.spec import Mode

from .worker_config import EngineConfig, GatewayConfig, TrainerConfig

LISTENER = "ARTD_LISTENER"
"""Environment of a gateway: the number of the listening TCP socket that it inherits."""
WorkerKind = Literal["trainer", "engine", "gateway"]
FailureClass = Literal["transient", "permanent", "interrupted", "full"]
"""full: there was no space for the result."""
Transfer = Literal["gloo", "stock", "direct", "nccl"]
"""How a live push's weights travel. gloo: broadcast tensor by tensor between CPUs; stock: the engine's own transfer calls over
NCCL; direct: the engine pulls the trainer's memory; nccl: the same plan, sent over NCCL (docs/weights.md)."""


class _Message(Struct, frozen=True, kw_only=True, tag_field="t", tag=str.lower, omit_defaults=True, gc=False):
    pass


class CheckpointRef(Struct, frozen=True, kw_only=True):
    """A committed checkpoint. dir: absolute path; sha: sha256 hex of its manifest.json."""

    run: str
    step: int
    epoch: int
    lineage: int
    sha: str
    dir: str


# ---- daemon -> worker -----------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    """Answer to Hello. heartbeat_s: send `Beat` this often; max_message: bytes, all frames of one message together."""

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
    """Do a job. dir: staging folder for this (job, fence), made by the worker; parent: checkpoint to start from (none
    for init); batch, manifest: paths of the packed tensors and their JSON manifest; replay,
    replay_manifest: paths of the batch's replay bundle ("" = none); epoch: policy epoch of the result."""

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


class Cancel(_Message, frozen=True):
    """Stop this job as soon as it can be; answer `Failed` with class interrupted."""

    job: int
    fence: int


class Committed(_Message, frozen=True):
    """The staged result is durable: the worker's resident state now is this checkpoint."""

    job: int
    fence: int
    checkpoint: CheckpointRef


class Fenced(_Message, frozen=True):
    """The message came too late; drop the work and remove its files."""

    job: int
    fence: int


class Ack(_Message, frozen=True):
    """A terminal report was taken; stop resending it."""

    job: int
    fence: int


class Push(_Message, frozen=True):
    """Bring a committed checkpoint into an engine. To the harness always; to the trainer too when `source` is `live`.

    name: served model name, `RUN@STEP`. source disk: the engine reads the checkpoint folder; live: the weights come out of
    the trainer's memory, by `transfer`. rendezvous: a path of one per (trainer spawn, engine spawn), below the engine's
    folder. gloo: the FileStore file in which a group of two meets (trainer rank 0), which then broadcasts the tensors of
    weights.json in order; stock: the same for NCCL; direct: a folder, made by the trainer, in which it writes its `Offer`
    as `offer` for the `EngineTable` that the harness wrote as `table` beside it, before it feeds the push; nccl: the same.
    engine: the worker that is pushed to; a trainer keeps apart what it has for each engine. A push with a lower fence than one seen for
    its engine is refused. deadline_s: seconds without a sign of progress (a phase, a tensor loaded)
    that are the end.
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
    """To the harness, after its `Pausing`: nothing more is admitted to the engine, pause it."""

    push: int
    fence: int


class PushEnd(_Message, frozen=True):
    """To the trainer: the push has ended (live or failed); abort what is left of it."""

    push: int
    fence: int


class Unload(_Message, frozen=True):
    """To the harness: unload this adapter name when its last request has ended (lora mode)."""

    name: str


class Hold(_Message, frozen=True):
    """To the gateway: admit nothing more to this engine until a newer Route; answer Held at once."""

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
    """engine: worker name; socket: Unix socket of the OpenAI server; served: newest last; hold: admit nothing now;
    routes: the engine captures routed experts in this shape, and the gateway takes them for the ledger; kind, grammar: as in
    its spec."""

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
    """To the gateway: the whole routing table. Replaces the last one; runs lists names that exist even if none
    serves."""

    seq: int
    runs: tuple[str, ...]
    engines: tuple[EngineRoute, ...]


class ExchangeAck(_Message, frozen=True):
    """The ledger entry is durable (error ""), or was refused with this error."""

    response_id: str
    error: str = ""


class Exit(_Message, frozen=True):
    """End in order within grace_s seconds."""

    grace_s: float


ToWorker = (
    Welcome
    | Reject
    | Run
    | Cancel
    | Committed
    | Fenced
    | Ack
    | Push
    | Proceed
    | PushEnd
    | Unload
    | Hold
    | Route
    | ExchangeAck
    | Exit
)

# ---- worker -> daemon -----------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """First message. instance: of the data folder that this process was started for (ARTD_INSTANCE); spawn: number that
    the supervisor gave it (ARTD_SPAWN); build: code digest."""

    kind: WorkerKind
    name: str
    instance: str
    protocol: int
    spawn: int
    pid: int
    build: str
    versions: dict[str, str] = field(default_factory=dict)


class Ready(_Message, frozen=True):
    """The worker can take work. socket: engine's OpenAI socket; url: gateway's address. transfers: how trainer or engine
    can do its part of a live push, best first; obstacle: why the engine takes no direct one ("" = it does, or it is on
    a CPU)."""

    socket: str = ""
    url: str = ""
    transfers: tuple[Transfer, ...] = ("gloo",)
    obstacle: str = ""


class Beat(_Message, frozen=True):
    """Heartbeat from a thread of its own. push: of an engine, that of (push, fence) in place of a job; progress: marks so far, of which a job that goes on makes ever more (a row
    forward or backward, a phase that is over); rss: bytes held now."""

    job: int = 0
    fence: int = 0
    progress: int = 0
    rss: int = 0
    push: int = 0


class Accepted(_Message, frozen=True):
    """The job was taken up."""

    job: int
    fence: int


class Staged(_Message, frozen=True):
    """A job's result lies complete and fsynced in its folder; resent until Committed, Ack or Fenced comes.

    manifest_sha: sha256 hex of manifest.json; metrics: loss, grad_norm, ... ; seconds: named durations.
    """

    job: int
    fence: int
    dir: str
    manifest_sha: str
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Failed(_Message, frozen=True):
    """A job ended without a result; resent until Ack or Fenced. error: what, where, what next; trace: tail of the
    stack."""

    job: int
    fence: int
    failure: FailureClass
    error: str
    trace: str = ""


class Refused(_Message, frozen=True):
    """The trainer does not hold the checkpoint that a push names, or cannot send it by the push's transfer; the daemon
    pushes from disk instead. transfer: what it cannot do at all, for this engine (None: another push may go that way)."""

    push: int
    fence: int
    reason: str
    transfer: Transfer | None = None


class Pausing(_Message, frozen=True):
    """Harness: this merged push has done all that it does beside running requests; the engine is paused, and its weights are
    touched, after `Proceed`."""

    push: int
    fence: int


class Live(_Message, frozen=True):
    """The engine serves the push's checkpoint, verified by its canary, or by every tensor's checksum alone where requests went on
    across it. Only the harness says so.

    seconds: phases (hold, pause, transfer, load, resume, verify); max_abs, mean_abs: canary differences in nats, None without.
    """

    push: int
    fence: int
    max_abs: float | None = None
    mean_abs: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class PushFailed(_Message, frozen=True):
    """A push did not get to live; the engine's weights are unknown and its process is ended by the harness."""

    push: int
    fence: int
    phase: str
    error: str


class Held(_Message, frozen=True):
    """Gateway: nothing more is admitted to the engine. in_flight: requests still running there."""

    push: int
    fence: int
    engine: str
    in_flight: int


class RouteTaken(_Message, frozen=True):
    """Gateway: this routing table is in force."""

    seq: int


class Exchange(_Message, frozen=True):
    """Gateway: one response for the ledger; bulk frames: one msgpack `Turn` per choice, in order of choice.

    The HTTP response's last byte leaves only after ExchangeAck. model: name served, `RUN@STEP`.
    """

    response_id: str
    run: str
    model: str
    split: Split
    sampling: Sampling
    choices: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class Down(_Message, frozen=True):
    """The harness's server died or could not start; tail: its last log lines. The harness exits after this."""

    error: str
    tail: str = ""


FromWorker = (
    Hello
    | Ready
    | Beat
    | Accepted
    | Staged
    | Failed
    | Refused
    | Pausing
    | Live
    | PushFailed
    | Held
    | RouteTaken
    | Exchange
    | Down
)
