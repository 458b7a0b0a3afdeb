"""Messages between clients (Python client, artctl) and the daemon, from a client's DEALER to the daemon's ROUTER.

Frames: [b"A1", Request or Reply in msgpack, bulk...]. The client numbers its requests; a reply carries the number. Submit by
value carries its body (msgpack list[Turn]) as one bulk frame. A request with a `key` counts once: the same key with the same
content gets the first reply again, with other content `Conflict`. Orders carry a `request` id instead.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from artd_schema.data.trajectory import Credit, ExchangeRef, Pick, Split
from artd_schema.run.spec import Learning, RunSpec, Seconds

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""An integer that an SQLite column can store."""
Step = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


MOST_REFS = 4096
"""The most responses of one trajectory."""
MOST_STATES = 16
"""The most states of one List; no table has more."""


class _Op(Struct, frozen=True, kw_only=True, tag_field="t", tag=str.lower, omit_defaults=True, gc=False):
    pass


class Order(_Op, frozen=True, kw_only=True):
    """A change that counts once. `request`: an id that the client makes for each call; the daemon carries out requests with the same id
    once; "" = every time."""

    request: str = ""


class Hello(_Op, frozen=True):
    """The first request of a connection. Answered by Welcome."""

    protocol: int
    client: str


class CreateRun(_Op, frozen=True):
    """Create a run or attach to it. `spec` None = only attach, NotFound if there is none. Answered by RunInfo, or by Pending
    while the model is fetched."""

    name: str
    spec: RunSpec | None = None


class Submit(_Op, frozen=True):
    """Submit one trajectory to a group. Answered by Submitted.

    `key`: unique in the run for ever; "" = sha256 of its response ids or of its body. By reference: `refs`, no bulk. By value: one bulk
    frame, msgpack list[Turn]. `group`: name of the group, which the first submission creates. `reward`: from -1e30 to 1e30. `metrics`: at
    most 256 finite numbers. `metadata`: anything that JSON can express. `credits`: for each turn its advantages and weights; () = none."""

    run: str
    group: str
    reward: float
    key: str = ""
    refs: Annotated[tuple[ExchangeRef, ...], Meta(max_length=MOST_REFS)] = ()
    split: Split = "train"
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    credits: Annotated[tuple[Credit, ...], Meta(max_length=MOST_REFS)] = ()
    rollout: Annotated[str, Meta(max_length=200)] = ""  # in place of `refs`; one credit may stand for all its turns


class Seal(_Op, frozen=True):
    """Close a group that gets no more trajectories. Answered by GroupInfo."""

    run: str
    group: str


class Flush(Order, frozen=True):
    """Seal every open group and pack what there is, even fewer groups than groups_per_step. Answered by Done."""

    run: str


class WaitStep(_Op, frozen=True):
    """Wait for a step. Answered by StepInfo once it is committed, and the first of the run's `engines` or all of them serve it; by Pending
    after `timeout_s` seconds, by Stalled when no rollout is open and too few groups are trainable."""

    run: str
    step: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    timeout_s: Seconds = 30.0
    engines: Literal["first", "all"] = "first"


class List(_Op, frozen=True):
    """Read one page of a table: newest rows first, with ids below `before`; with `after` oldest first, with ids above it. `states`:
    () = all. Answered by Rows."""

    what: Literal[
        "runs", "jobs", "trajectories", "groups", "rollouts", "batches", "checkpoints", "pushes", "workers", "events"
    ]
    run: str = ""
    states: Annotated[tuple[str, ...], Meta(max_length=MOST_STATES)] = ()
    before: Number | None = None
    after: Number | None = None
    limit: Number = 100


class Events(_Op, frozen=True):
    """Read events with an id above `after`, oldest first. Waits up to `timeout_s` seconds for the first one. Answered by Rows."""

    after: Number = 0
    run: str = ""
    limit: Number = 1000
    timeout_s: Seconds = 30.0


class Samples(_Op, frozen=True):
    """Trajectories for people to read: of the batch that made `step`, else of the newest ones of a split; answered by Rows, in the order
    of `pick`."""

    run: str
    step: Step | None = None
    split: Split = "train"
    pick: Pick = "newest"
    limit: Number = 5


class ReadTrajectory(_Op, frozen=True):
    """Everything of one trajectory but its routes; answered by Body."""

    run: str
    trajectory: Number


class ReadTokenizer(_Op, frozen=True):
    """The `tokenizer.json` of a run's model; answered by TokenizerFile."""

    run: str


class Pause(Order, frozen=True):
    """Stop training until Resume. `reason`: the text that the status shows."""

    run: str
    reason: Annotated[str, Meta(max_length=1000)] = "operator"


class Resume(Order, frozen=True):
    """Let a paused run train again, whatever paused it. Broken workers (five deaths in ten minutes) are started again."""

    run: str


class UpdateRun(Order, frozen=True):
    """Change what a run learns with, from its next batch on: `{"optimizer": {"lr": 1e-6}}`, null for a field's default. Answered by Done."""

    run: str
    changes: Annotated[dict[str, Any], Meta(min_length=1, max_length=16)]


class Finish(_Op, frozen=True):
    """End a run for good: training, its engine and its trainer stop."""

    run: str


class DeleteRun(Order, frozen=True):
    """Delete a finished run with everything that it stored. Answered by Done once the deletion is durable."""

    run: str


class Rollback(_Op, frozen=True):
    """Continue from an older step of the run's chain, in a new lineage. Answered by Done.

    `lineage`: the run's present one (RunInfo). The same request again changes nothing, whatever was trained since.
    """

    run: str
    step: Step
    lineage: Number


class CancelJob(_Op, frozen=True):
    """End a job for good. Its trajectories wait to be packed again, and its run pauses."""

    job: Number


class DiscardJob(_Op, frozen=True):
    """End a job for good and discard its trajectories, which are never trained. Only the pause of its quarantine is lifted."""

    job: Number


class DiscardGroup(_Op, frozen=True):
    """Discard an open or sealed group with its trajectories, which are never trained. Answered by Done."""

    run: str
    group: str


class RetryJob(Order, frozen=True):
    """Queue a quarantined job again on the same batch. Only the pause of its quarantine is lifted."""

    job: Number


class Collect(_Op, frozen=True):
    """Delete expired payloads and files that nothing refers to, now. Answered by Collected.

    `dry`: only say what would be deleted. `resume`: first allow deletion by age again, which a jump of the clock stopped.
    """

    dry: bool = False
    resume: bool = False


class Shutdown(_Op, frozen=True):
    """Stop the daemon; workers get `drain_s` seconds. Answered by Done before the daemon stops."""

    drain_s: Seconds = 60.0


Op = (
    Hello | CreateRun | Submit | Seal | Flush | WaitStep | List | Events | Samples | ReadTrajectory | ReadTokenizer
    | Pause | Resume | UpdateRun | Finish | DeleteRun | Rollback | CancelJob | DiscardJob | DiscardGroup | RetryJob | Collect | Shutdown
)  # fmt: skip


class Request(Struct, frozen=True, kw_only=True):
    id: int
    op: Op


class _Answer(Struct, frozen=True, kw_only=True, tag_field="t", tag=str.lower, omit_defaults=True, gc=False):
    pass


class Welcome(_Answer, frozen=True):
    """The daemon's description of itself.

    `max_message`: bytes of all frames of a message; the client refuses larger ones before it sends them. `window`: bytes of
    large messages that a client may have under way at once, 0 = any; a single message is always allowed.
    """

    protocol: int
    instance: str
    version: str
    max_message: int
    window: int = 0


class RunInfo(_Answer, frozen=True):
    """The state of a run.

    `state`: active, paused or finished. `step`: newest committed step, -1 before the init job. `served`: newest live step, -1 =
    none. `spec`: as the run was made; None when the stored one cannot be read, and `reason` says why. `lineage`: of the next step; each
    rollback adds one. `learning`: what the next batch is trained with, None without `spec`.
    """

    name: str
    state: str
    reason: str
    spec: RunSpec | None
    step: int
    served: int
    created: bool
    base_url: str
    api_key: str
    lineage: int = 0
    learning: Learning | None = None


class Submitted(_Answer, frozen=True):
    """A durable trajectory.

    `trajectory`: its id. `duplicate`: the key was known, with the same content. `group_state`: open, or the result of its seal
    (sealed, discarded; later packed, trained).
    """

    trajectory: int
    duplicate: bool
    group_state: str


class GroupInfo(_Answer, frozen=True):
    """The state of a group: sealed, or discarded for `reason`; later packed or trained. `size`: number of trajectories."""

    group: str
    state: str
    size: int
    reason: str = ""


class StepInfo(_Answer, frozen=True):
    """A committed step that is served."""

    run: str
    step: int
    checkpoint: str
    metrics: dict[str, float]
    seconds: dict[str, float]


class Stalled(_Answer, frozen=True):
    """No rollout is open and fewer than `needed` sealed groups are trainable: submit more groups, or flush.

    `discarded`: reason -> number, of the newest discarded groups.
    """

    step: int
    sealed: int
    trainable: int
    needed: int
    discarded: dict[str, int] = {}


class Pending(_Answer, frozen=True):
    """The wait timed out, or a model is being fetched; ask again.

    `phase`: what the run is doing now. `problem`: a broken worker that needs an operator, "" = none. `doing`: the phase for
    people, with seconds or bytes.
    """

    step: int
    phase: str
    problem: str = ""
    doing: str = ""


class Rows(_Answer, frozen=True):
    """Rows of a table. `more`: the answer was cut because it is large; read on from its last id."""

    rows: list[dict[str, Any]]
    more: bool = False


class Body(_Answer, frozen=True):
    """A trajectory's content. `row` is as in Rows; `body` is msgpack list[Turn] without routes. `advantage` is that of
    its sampled tokens, None if it is in no batch or was left out of its batch's rows. `problem` says why there is no
    body, else it is empty."""

    row: dict[str, Any]
    body: bytes
    advantage: float | None = None
    problem: str = ""


class TokenizerFile(_Answer, frozen=True):
    """The content of a run's tokenizer file. `problem` says why there is none, else it is empty."""

    content: bytes
    problem: str = ""


class Collected(_Answer, frozen=True):
    """What a garbage collection did. `rows`: {what, kind, count, bytes}; `stopped`: why nothing was deleted by its age."""

    rows: list[dict[str, Any]]
    stopped: str = ""


class Done(_Answer, frozen=True):
    pass


class Error(_Answer, frozen=True):
    """A refusal. `code`: one of CODES; `message`: what was wrong, where, what to do next; `field`: path of the bad field."""

    code: str
    message: str
    field: str = ""
    retry_after_s: float = 0.0


CODES = ("invalid", "not_found", "conflict", "busy", "too_large", "not_allowed", "draining", "failed")

Answer = (
    Welcome
    | RunInfo
    | Submitted
    | GroupInfo
    | StepInfo
    | Stalled
    | Pending
    | Rows
    | Body
    | TokenizerFile
    | Collected
    | Done
    | Error
)


class Reply(Struct, frozen=True, kw_only=True):
    id: int
    answer: Answer
