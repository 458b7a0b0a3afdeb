"""Messages between clients (Python client, artctl) and the daemon: DEALER to the client ROUTER.

Frames: [b"A1", Request or Reply in msgpack, bulk...]. Requests are numbered by the client; a reply carries the number.
Submit carries its body (msgpack list[Turn]) as the one bulk frame. Requests with a `key` are idempotent: the same key
with the same content gives the first reply again, with other content `Conflict`. Orders carry a `request` id instead.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from .spec import RunSpec, Seconds
from .trajectory import Credit, ExchangeRef, Split

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""Of a row: what SQLite holds."""
Step = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


MOST_REFS = 4096
"""Responses of one trajectory."""
MOST_STATES = 16
"""States of one list: more than any table has."""


class _Op(Struct, frozen=True, kw_only=True, tag_field="t", tag=str.lower, omit_defaults=True, gc=False):
    pass


class Order(_Op, frozen=True, kw_only=True):
    """A change that counts once. request: an id that the client draws for each call; the daemon does a request that comes
    again under its id only once ("" = always)."""

    request: str = ""


class Hello(_Op, frozen=True):
    """First request of a connection; answered by Welcome."""

    protocol: int
    client: str


class CreateRun(_Op, frozen=True):
    """Create a run or attach to it; answered by RunInfo, by Pending while its model is being fetched. spec None = attach only (NotFound if there is none)."""

    name: str
    spec: RunSpec | None = None


class Submit(_Op, frozen=True):
    """Submit one trajectory to a group; answered by Submitted.

    key: dedup key, unique in the run for ever ("" = sha256 of its response ids or of its body). By reference: refs, no
    bulk. By value: one bulk frame, msgpack list[Turn]. group: name of the group, created on first use. reward: from -1e30 to
    1e30; metrics: at most 256 finite numbers; metadata: whatever JSON can say. credits:
    for each turn its advantages and weights; () = none.
    """

    run: str
    group: str
    reward: float
    key: str = ""
    refs: Annotated[tuple[ExchangeRef, ...], Meta(max_length=MOST_REFS)] = ()
    split: Split = "train"
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    credits: Annotated[tuple[Credit, ...], Meta(max_length=MOST_REFS)] = ()


class Seal(_Op, frozen=True):
    """Seal a group: no more trajectories; answered by GroupInfo."""

    run: str
    group: str


class Flush(Order, frozen=True):
    """Seal every open group and pack what there is, even fewer than groups_per_step; answered by Done."""

    run: str


class WaitStep(_Op, frozen=True):
    """Answered by StepInfo once `step` is committed and served, by Stalled when no rollout is open and too few groups
    are trainable, or by Pending after timeout_s."""

    run: str
    step: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    timeout_s: Seconds = 30.0


class List(_Op, frozen=True):
    """One page of a table; answered by Rows. Newest first, with ids below `before`; with `after` oldest first, with ids above
    it. states: () = all."""

    what: Literal["runs", "jobs", "trajectories", "groups", "batches", "checkpoints", "pushes", "workers", "events"]
    run: str = ""
    states: Annotated[tuple[str, ...], Meta(max_length=MOST_STATES)] = ()
    before: Number | None = None
    after: Number | None = None
    limit: Number = 100


class Events(_Op, frozen=True):
    """Events with id > after, oldest first; waits up to timeout_s for the first; answered by Rows."""

    after: Number = 0
    run: str = ""
    limit: Number = 1000
    timeout_s: Seconds = 30.0


class Pause(Order, frozen=True):
    """Train no more until resumed. reason: what the status says of it."""

    run: str
    reason: Annotated[str, Meta(max_length=1000)] = "operator"


class Resume(Order, frozen=True):
    """Let a paused run go on, whatever paused it. Workers that are broken (five deaths in ten minutes) are started again."""

    run: str


class Finish(_Op, frozen=True):
    """End a run for good: no more training; its engine and trainer stop."""

    run: str


class DeleteRun(Order, frozen=True):
    """Delete a finished run with everything it stored; answered by Done when that is sure to happen."""

    run: str


class Rollback(_Op, frozen=True):
    """Go on from an older step of the run's chain, in a new lineage; answered by Done. lineage: the run's now (RunInfo); the
    same request again changes nothing, whatever has been trained meanwhile."""

    run: str
    step: Step
    lineage: Number


class CancelJob(_Op, frozen=True):
    """End a job for good: its trajectories wait again, and its run pauses."""

    job: Number


class DiscardJob(_Op, frozen=True):
    """End a job for good, with its trajectories: they are never trained. The pause of its quarantine is lifted, no other."""

    job: Number


class DiscardGroup(_Op, frozen=True):
    """Discard an open or sealed group with its trajectories: they are never trained. Answered by Done."""

    run: str
    group: str


class RetryJob(Order, frozen=True):
    """Queue a quarantined job again on the same batch. The pause of its quarantine is lifted, no other."""

    job: Number


class Collect(_Op, frozen=True):
    """Delete now what has had its time and what nothing refers to; answered by Collected. dry: only say what would go;
    resume: retention that stopped at a jump of the clock goes on."""

    dry: bool = False
    resume: bool = False


class Shutdown(_Op, frozen=True):
    """Stop the daemon; workers get drain_s seconds. Answered by Done before it goes."""

    drain_s: Seconds = 60.0


Op = (
    Hello
    | CreateRun
    | Submit
    | Seal
    | Flush
    | WaitStep
    | List
    | Events
    | Pause
    | Resume
    | Finish
    | DeleteRun
    | Rollback
    | CancelJob
    | DiscardJob
    | DiscardGroup
    | RetryJob
    | Collect
    | Shutdown
)


class Request(Struct, frozen=True, kw_only=True):
    id: int
    op: Op


class _Answer(Struct, frozen=True, kw_only=True, tag_field="t", tag=str.lower, omit_defaults=True, gc=False):
    pass


class Welcome(_Answer, frozen=True):
    """max_message: bytes, all frames of a message together; the client refuses larger ones before sending. window: bytes of large
    messages that a client should have under way at once, 0: any; a single one always may."""

    protocol: int
    instance: str
    version: str
    max_message: int
    window: int = 0


class RunInfo(_Answer, frozen=True):
    """state: active, paused or finished; step: newest committed (-1 before the init job); served: newest live step
    (-1); spec: None when the stored one cannot be read (`reason` says why); lineage: of the next step, one more with each rollback."""

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


class Submitted(_Answer, frozen=True):
    """trajectory: id; duplicate: the key was known with the same content; group_state: open, or what its seal made of it
    (sealed, discarded; later packed, trained)."""

    trajectory: int
    duplicate: bool
    group_state: str


class GroupInfo(_Answer, frozen=True):
    """state: sealed, or discarded for `reason`; later packed or trained. size: trajectories."""

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
    """No rollout is open and fewer than `needed` sealed groups are trainable: submit more groups or flush. discarded: of the
    newest discarded groups, how many for which reason."""

    step: int
    sealed: int
    trainable: int
    needed: int
    discarded: dict[str, int] = {}


class Pending(_Answer, frozen=True):
    """The wait timed out, or a model is being fetched; ask again. phase: what the run is doing now; problem: the worker that
    is broken, for which somebody has to do something, "" = none; doing: the same for people, with seconds or bytes."""

    step: int
    phase: str
    problem: str = ""
    doing: str = ""


class Rows(_Answer, frozen=True):
    """more: the answer became large and ends before its limit; go on from its last id."""

    rows: list[dict[str, Any]]
    more: bool = False


class Collected(_Answer, frozen=True):
    """rows: {what, kind, count, bytes}; stopped: why nothing went by its age."""

    rows: list[dict[str, Any]]
    stopped: str = ""


class Done(_Answer, frozen=True):
    pass


class Error(_Answer, frozen=True):
    """code: one of CODES; message: what was wrong, where, what to do next; field: path of a bad field."""

    code: str
    message: str
    field: str = ""
    retry_after_s: float = 0.0


CODES = ("invalid", "not_found", "conflict", "busy", "too_large", "not_allowed", "draining", "failed")

Answer = Welcome | RunInfo | Submitted | GroupInfo | StepInfo | Stalled | Pending | Rows | Collected | Done | Error


class Reply(Struct, frozen=True, kw_only=True):
    id: int
    answer: Answer
