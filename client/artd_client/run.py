"""One run, as a client sees it.

The key of a submission is fixed before it is sent, so the connection may repeat it, and every error carries that key.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import msgspec

from artd_schema.codec import digest, to_json
from artd_schema.data.trajectory import Given as Credited
from artd_schema.data.trajectory import Pick, Split, Turn
from artd_schema.run.spec import Learning, RunSpec
from artd_schema.wire import client_api as api

from .connection import Connection
from .errors import ArtdError, Failed, Invalid, Stalled, TimedOut
from .openai_client import async_openai
from .progress import Progress
from .rollout import Group, Rollout, open_group
from .rows import Row, follow_events, read_rows
from .trajectory import Trajectory, Vocabulary
from .turns import Given, count_parts, make_credits, reference, turn

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

POLL_S = 30.0
ANSWER_S = 5.0
"""Seconds that a daemon may take to answer that a wait has timed out."""
Close = Callable[[], Awaitable[object]]
"""Closes something that was made for a run."""


class Run:
    """A run; `Client.run` makes it. `info` is the daemon's last description of it, and `refresh` asks again."""

    def __init__(
        self, connection: Connection, info: api.RunInfo, progress: Progress, closing: Callable[[Close], None]
    ) -> None:
        self._connection = connection
        self._progress = progress
        self._closing = closing
        self._vocabulary = Vocabulary()
        self.info = info

    def __repr__(self) -> str:
        return f"<Run {self.name!r} {self.state} step {self.step} served {self.served}>"

    @property
    def name(self) -> str:
        """The run's name."""
        return self.info.name

    @property
    def model(self) -> str:
        """The model name for requests to the gateway: it stands for the newest served step."""
        return self.info.name

    @property
    def state(self) -> str:
        """The run's state: active, paused or finished."""
        return self.info.state

    @property
    def spec(self) -> RunSpec:
        """The run's spec. Raises Failed when the daemon cannot read it."""
        if self.info.spec is None:
            raise Failed(f"run {self.name!r} is {self.state}: {self.info.reason}", "spec")
        return self.info.spec

    @property
    def learning(self) -> Learning:
        """What the run's next batch is trained with: `spec`, and what `update` has changed since. Raises as `spec`."""
        return self.info.learning or self.spec.learning

    @property
    def step(self) -> int:
        """The newest committed step, -1 before the first checkpoint."""
        return self.info.step

    @property
    def served(self) -> int:
        """The newest step that an engine serves, -1 when none does."""
        return self.info.served

    @property
    def base_url(self) -> str:
        """The URL of the gateway's OpenAI interface, which ends in `/v1`."""
        return self.info.base_url

    @property
    def api_key(self) -> str:
        """The gateway's bearer token."""
        return self.info.api_key

    def openai(self, **options: Any) -> AsyncOpenAI:
        """Return an AsyncOpenAI for the gateway. `options` go to its constructor. It closes with the client."""
        made = async_openai(self.base_url, self.api_key, options)
        self._closing(made.close)
        return made

    def rollout(self, name: str) -> Rollout:
        """Return a rollout by its name, 1 to 200 characters, which belongs to this run for ever: a base URL and headers of its own.
        Raises Invalid."""
        return Rollout(self, name)

    def group(self, prompt_id: str, n: int | None = None) -> AbstractAsyncContextManager[Group]:
        """Return a context of a new group with `n` rollouts of fresh names that begin with `prompt_id`. n: None = the run's group_size,
        at which a group of the split `train` seals itself.

        At its end the group is sealed. When an exception leaves it, the group is discarded, and its rollouts expire. Raises Invalid.
        """
        return open_group(self, prompt_id, self.spec.group_size if n is None else n)

    async def refresh(self) -> Self:
        """Ask the daemon for `info` again. Returns this run."""
        self.info = await self._connection.ask(api.CreateRun(name=self.name), api.RunInfo)
        return self

    # ---- trajectories ---------------------------------------------------------------------------------------------------

    async def submit(
        self,
        group: str,
        reward: float,
        *,
        responses: Iterable[Any] = (),
        turns: Sequence[Turn] = (),
        rollout: str = "",
        key: str | None = None,
        split: Split = "train",
        metrics: Mapping[str, float] | None = None,
        metadata: dict[str, Any] | None = None,
        advantages: Given = None,
        weights: Given = None,
    ) -> api.Submitted:
        """Submit one trajectory; when this returns, it is durable.

        Give one of: `rollout`, the name under which all its requests were sent; `responses` of artd's gateway (completions, ids, or
        pairs with a choice) in the order in which they were made; `turns` (see `artd_client.turn`). `reward`: a finite number. `metrics`: numbers stored with the trajectory.
        `metadata`: anything that JSON can express.

        `advantages`, for a run with `advantages={"baseline": "given"}`, and `weights`, factors of the loss of at least 0 (0: not
        trained): one number for the trajectory; or for each turn one number, or one for each of its sampled tokens.

        `key`: up to 256 characters. The same key with the same content counts once; with other content it is a Conflict.
        Without a key one is made: from the responses' ids or the rollout's name, or for `turns` a new one per call, so that every call is a further
        sample. An ArtdError carries the key: after TimedOut, DaemonNotRunning or Closed the trajectory may have been stored,
        and `submit(..., key=error.key)` counts it once. A program that may be restarted midway should give keys.

        Raises Invalid, NotFound (a response), Conflict (the group is closed, or the run finished), TooLarge, Busy (wait
        `retry_after` seconds), and the errors of every call: TimedOut, DaemonNotRunning, Draining, Closed.
        """
        _check_forms(group, responses, turns, split)
        refs = tuple(reference(response) for response in responses)
        if bool(refs) + bool(turns) + bool(rollout) != 1:
            raise Invalid("a trajectory is either `responses`, `turns` or a `rollout`: give one of them", "responses")
        turns_given = len(refs) or len(turns) or count_parts(advantages, weights)
        op = api.Submit(
            run=self.name,
            group=group,
            reward=_number("reward", reward),
            key=key or (uuid.uuid4().hex if turns else digest(to_json({"rollout": rollout} if rollout else refs))),
            refs=refs,
            rollout=rollout,
            split=split,
            metrics={str(name): _number(f"metrics[{name!r}]", value) for name, value in (metrics or {}).items()},
            metadata=metadata or {},
            credits=make_credits(advantages, weights, turns_given),
        )
        bulk = (msgspec.msgpack.encode(list(turns)),) if turns else ()
        try:
            return await self._connection.ask(op, api.Submitted, bulk)
        except ArtdError as error:
            error.key = op.key
            raise

    async def submit_example(
        self,
        prompt_ids: Iterable[int],
        token_ids: Iterable[int],
        *,
        weights: Iterable[float] | None = None,
        key: str | None = None,
    ) -> api.Submitted:
        """Submit an example to a run with `loss={"kind": "sft"}`; when this returns, it is durable.

        The run is trained to continue `prompt_ids` with `token_ids`. `weights`: a factor of the loss of each of `token_ids`, at least 0; 0
        leaves a token untrained, such as a user's words within a conversation. `key`: as in `submit`; it also names the group of one.

        Raises what `submit` raises; Invalid if the run trains on rollouts.
        """
        ids = list(token_ids)
        example = msgspec.structs.replace(turn(prompt_ids, ids, [0.0] * len(ids)), given=Credited(example=True))
        name = key or uuid.uuid4().hex
        given = None if weights is None else [list(weights)]
        return await self.submit(f"example-{name}"[:256], 0.0, turns=[example], key=name, weights=given)

    async def seal(self, group: str) -> api.GroupInfo:
        """Close a group that gets no more trajectories. Returns its state (sealed, or discarded with the reason) and size.

        Closing it again changes nothing. Raises NotFound.
        """
        return await self._connection.ask(api.Seal(run=self.name, group=group), api.GroupInfo)

    async def flush(self) -> None:
        """Seal every open group and train on what there is, even on fewer groups than groups_per_step."""
        await self._connection.ask(api.Flush(run=self.name), api.Done)

    async def wait(
        self,
        step: int,
        timeout: float | None = None,  # noqa: ASYNC109
        engines: Literal["first", "all"] = "first",
    ) -> api.StepInfo:
        """Wait until `step` is committed and served. `timeout` is in seconds, None = without limit.

        `engines` says whether the first engine that serves the step ends the wait, or the last one of the run does.
        After 5 s the client's `progress` is called with what the call is waiting for. A worker that artd no longer
        restarts is logged as a warning, and the wait continues, because an operator may repair it. Raises Stalled if
        the step needs more groups, TimedOut, which says what the run was doing, Failed if the run is paused or
        finished, and DaemonNotRunning if no daemon answers until the time-out (without one: for longer than the
        client's time-out).
        """
        waiter = object()
        try:
            return await self._wait(step, timeout, waiter, engines)
        finally:
            self._progress.leave(waiter)

    async def _wait(
        self,
        step: int,
        timeout: float | None,  # noqa: ASYNC109
        waiter: object,
        engines: Literal["first", "all"],
    ) -> api.StepInfo:
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        told = ""
        while True:
            poll = self._progress.poll_s(waiter, POLL_S)
            left = poll if end is None else min(poll, max(0.0, end - loop.time()))
            grace = self._connection.timeout if end is None else max(end - loop.time() - left, ANSWER_S)
            op = api.WaitStep(run=self.name, step=step, timeout_s=left, engines=engines)
            answer = await self._connection.call(op, timeout=left + min(grace, self._connection.timeout))
            match answer:
                case api.StepInfo():
                    return answer
                case api.Stalled():
                    raise Stalled(answer.step, answer.sealed, answer.trainable, answer.needed, answer.discarded)
                case api.Pending() if (
                    end is not None and not loop.time() < end
                ):  # written this way, a NaN ends the wait too
                    problem = f"; {answer.problem}" if answer.problem else ""
                    raise TimedOut(
                        f"step {step} of run {self.name!r} did not come within {timeout:g} s: the run is at step "
                        f"{answer.step}, phase {answer.phase}{problem}; see `artctl status`"
                    )
                case api.Pending(problem=problem, doing=doing):
                    self._progress.say(waiter, doing)
                    if problem not in ("", told):
                        log.warning("step %d of run %r waits: %s; see `artctl status`", step, self.name, problem)
                        told = problem

    # ---- looking and steering -----------------------------------------------------------------------------------------------

    async def trajectories(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        """Return trajectories of this run, newest first, in `states` (() = all), at most `limit`; columns as in `Client.rows`."""
        return await read_rows(self._connection, "trajectories", run=self.name, states=states, limit=limit)

    async def samples(
        self, step: int | None = None, pick: Pick = "newest", *, split: Split = "train", limit: int = 5
    ) -> list[Trajectory]:
        """Return trajectories to read: those of the batch that made `step`, or some of the newest 1,000 of a split if
        `step` is None.

        `pick` is newest, best or worst (by reward), or random. `limit` is from 1 to 1,000. A step without a batch gives
        none.
        """
        op = api.Samples(run=self.name, step=step, split=split, pick=pick, limit=limit)
        answer = await self._connection.ask(op, api.Rows)
        return [await self.trajectory(int(row["id"])) for row in answer.rows]

    async def trajectory(self, trajectory: int) -> Trajectory:
        """Return one trajectory with its text, messages and turns. Raises NotFound."""
        op = api.ReadTrajectory(run=self.name, trajectory=trajectory)
        found = await self._connection.ask(op, api.Body)
        tokenizer, problem = await self._vocabulary.get(self._connection, self.name)
        return Trajectory(found, tokenizer, problem)

    async def groups(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        """Return groups of this run, newest first, in `states` (() = all), at most `limit`; columns as in `Client.rows`."""
        return await read_rows(self._connection, "groups", run=self.name, states=states, limit=limit)

    async def batches(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        """Return batches of this run, newest first, in `states` (() = all), at most `limit`; columns as in `Client.rows`."""
        return await read_rows(self._connection, "batches", run=self.name, states=states, limit=limit)

    async def jobs(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        """Return jobs of this run, newest first, in `states` (() = all), at most `limit`; columns as in `Client.rows`."""
        return await read_rows(self._connection, "jobs", run=self.name, states=states, limit=limit)

    async def checkpoints(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        """Return checkpoints of this run, newest first, in `states` (() = all), at most `limit`; columns as in `Client.rows`."""
        return await read_rows(self._connection, "checkpoints", run=self.name, states=states, limit=limit)

    async def pushes(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        """Return pushes of this run, newest first, in `states` (() = all), at most `limit`; columns as in `Client.rows`."""
        return await read_rows(self._connection, "pushes", run=self.name, states=states, limit=limit)

    def events(self, after: int = 0) -> AsyncGenerator[Row, None]:
        """Yield events of this run with an id above `after`, oldest first, for ever."""
        return follow_events(lambda: self._connection, self.name, after)

    async def pause(self, reason: str = "operator") -> None:
        """Stop training until `resume`; the run is still served. Raises Conflict when it is finished."""
        await self._connection.ask(api.Pause(run=self.name, reason=reason), api.Done)

    async def resume(self) -> None:
        """Train again, and start again the workers that the daemon had given up. Raises Conflict when the run is finished."""
        await self._connection.ask(api.Resume(run=self.name), api.Done)

    async def update(self, **changes: Any) -> None:
        """Change what the run learns with, from the next batch that is packed on: `update(optimizer={"lr": 1e-6}, loss={"kl": None})`.

        Fields that are not named stay as they are; None takes one back to its default. All of `optimizer` and of `loss` but `kind` may
        change. The change is durable when this returns. Raises Invalid with the field, NotFound, Conflict when the run is finished.
        """
        await self._connection.ask(api.UpdateRun(run=self.name, changes=changes), api.Done)
        await self.refresh()

    async def discard_group(self, group: str) -> None:
        """Discard an open or sealed group with its trajectories, which are never trained. Raises NotFound, Conflict."""
        await self._connection.ask(api.DiscardGroup(run=self.name, group=group), api.Done)

    async def rollback(self, step: int) -> None:
        """Continue from an older step, in a new lineage. Later steps are abandoned; what they trained stays trained.

        The run keeps its state. Pause it first, or waiting groups are trained at once. Raises NotFound, Conflict.
        """
        await self.refresh()
        await self._connection.ask(api.Rollback(run=self.name, step=step, lineage=self.info.lineage), api.Done)
        await self.refresh()

    async def finish(self) -> None:
        """End the run for good; its engine and trainer stop."""
        await self._connection.ask(api.Finish(run=self.name), api.Done)

    async def delete(self) -> None:
        """Delete this finished run with its trajectories, checkpoints and metrics. Raises Conflict when it is not finished.

        Its name is free at once; its files are deleted soon after.
        """
        await self._connection.ask(api.DeleteRun(run=self.name), api.Done)


def _number(what: str, value: object) -> float:
    """Return `value` as a float. Raises Invalid, which names `what`."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise Invalid(f"{what}: {value!r} is not a number", what) from None


def _check_forms(group: object, responses: object, turns: object, split: object) -> None:
    """Raise Invalid for arguments that would otherwise be misread."""
    if not isinstance(group, str):
        raise Invalid(f"group: {group!r} is not a name (str)", "group")
    if not group.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in group):
        raise Invalid(f"group: {group!r} cannot be written as UTF-8", "group")
    if split not in get_args(Split):
        raise Invalid(f"unknown split {split!r}; use one of: {', '.join(map(repr, get_args(Split)))}", "split")
    if isinstance(responses, str) or hasattr(responses, "choices"):
        raise Invalid("responses: is one response; give a list, responses=[response]", "responses")
    if isinstance(turns, Turn):
        raise Invalid("turns: is one turn; give a list, turns=[turn(...)]", "turns")
