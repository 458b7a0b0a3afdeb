"""One run as a client sees it.

Owner of: the last `RunInfo`, and the ordinals of bodies submitted by value. Invariants: the key of a submit is fixed before
it is sent, so that the connection may repeat it; equal samples of one group count as often as they were submitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from artd_schema import client_api as api
from artd_schema.codec import digest, to_json
from artd_schema.spec import RunSpec
from artd_schema.trajectory import Split, Turn

from .connection import Connection
from .errors import Invalid, Stalled, TimedOut
from .openai_client import async_openai
from .turns import reference

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from .client import Client

POLL_S = 30.0
Row = dict[str, Any]


class Run:
    """Made by `Client.run`. `info` is what the daemon said last; `refresh` asks again."""

    def __init__(self, client: Client, connection: Connection, info: api.RunInfo) -> None:
        self._client = client
        self._connection = connection
        self._keys: dict[str, dict[str, set[int]]] = {}  # group -> body digest -> ordinals in use
        self.info = info

    def __repr__(self) -> str:
        return f"<Run {self.name!r} {self.state} step {self.step} served {self.served}>"

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def model(self) -> str:
        """The name to ask the gateway for: it is always the newest step that is served."""
        return self.info.name

    @property
    def state(self) -> str:
        """active, paused or finished."""
        return self.info.state

    @property
    def spec(self) -> RunSpec:
        return self.info.spec

    @property
    def step(self) -> int:
        """Newest committed step, -1 before the first checkpoint."""
        return self.info.step

    @property
    def served(self) -> int:
        """Newest step that an engine serves, -1 when none does."""
        return self.info.served

    @property
    def base_url(self) -> str:
        """Of the gateway's OpenAI interface."""
        return self.info.base_url

    @property
    def api_key(self) -> str:
        return self.info.api_key

    def openai(self, **options: Any) -> AsyncOpenAI:
        """An AsyncOpenAI bound to the gateway; options go to its constructor. It is closed with the client."""
        made = async_openai(self.base_url, self.api_key, options)
        self._client.closing(made.close)
        return made

    async def refresh(self) -> Run:
        """Ask the daemon for `info` again."""
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
        key: str | None = None,
        split: Split = "train",
        metrics: dict[str, float] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> api.Submitted:
        """Submit one trajectory; when this returns, it is durable.

        Either `responses` of artd's gateway (completions, ids, or pairs with a choice), in the order in which they were
        made, or `turns` (see `artd_client.turn`). key: the same key with the same content counts once, with other content it is
        a Conflict; None makes one from the responses' ids, or from the turns (an equal body again in the same group is
        a further sample). Raises ArtdError.
        """
        refs = tuple(reference(response) for response in responses)
        if bool(refs) == bool(turns):
            raise Invalid("a trajectory is either `responses` or `turns`: give one of them", "responses")
        op = api.Submit(
            run=self.name,
            group=group,
            reward=float(reward),
            key=key or (digest(to_json(refs)) if refs else ""),
            refs=refs,
            split=split,
            metrics=metrics or {},
            metadata=metadata or {},
        )
        if refs:
            return await self._connection.ask(op, api.Submitted)
        body = msgspec.msgpack.encode(list(turns))
        if key:
            return await self._connection.ask(op, api.Submitted, (body,))
        return await self._submit_counted(op, body)

    async def _submit_counted(self, op: api.Submit, body: bytes) -> api.Submitted:
        """Submit by value under a key of (group, body, how many equal ones went before)."""
        sha = digest(op.group.encode() + b"\0" + body)
        used = self._keys.setdefault(op.group, {}).setdefault(sha, set())
        ordinal = next(i for i in range(len(used) + 1) if i not in used)
        used.add(ordinal)
        try:
            op = msgspec.structs.replace(op, key=f"{sha}-{ordinal}" if ordinal else sha)
            answer = await self._connection.ask(op, api.Submitted, (body,))
        except BaseException:
            used.discard(ordinal)  # whoever tries again means this same sample
            raise
        if answer.group_state != "open":
            self._keys.pop(op.group, None)
        return answer

    async def seal(self, group: str) -> api.GroupInfo:
        """Close a group that will get no more trajectories; says whether it can be trained."""
        return await self._connection.ask(api.Seal(run=self.name, group=group), api.GroupInfo)

    async def flush(self) -> None:
        """Seal every open group and train on what there is, even on fewer groups than groups_per_step."""
        await self._connection.ask(api.Flush(run=self.name), api.Done)

    async def wait(self, step: int, timeout: float | None = None) -> api.StepInfo:  # noqa: ASYNC109
        """Wait until `step` is committed and served. timeout: seconds, None = as long as it takes.

        Raises Stalled when it cannot come without more groups, TimedOut (naming what the run was doing), Failed when the
        run is paused or finished, DaemonNotRunning when the daemon stays away.
        """
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while True:
            left = POLL_S if end is None else min(POLL_S, max(0.0, end - loop.time()))
            op = api.WaitStep(run=self.name, step=step, timeout_s=left)
            answer = await self._connection.call(op, timeout=left + self._connection.timeout)
            match answer:
                case api.StepInfo():
                    return answer
                case api.Stalled():
                    raise Stalled(answer.step, answer.sealed, answer.trainable, answer.needed)
                case api.Pending() if end is not None and loop.time() >= end:
                    raise TimedOut(
                        f"step {step} of run {self.name!r} did not come within {timeout:g} s: the run is at step "
                        f"{answer.step}, phase {answer.phase}; see `artctl status`"
                    )

    # ---- looking and steering -----------------------------------------------------------------------------------------------

    async def trajectories(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return await self._client.rows("trajectories", run=self.name, states=states, limit=limit)

    async def groups(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return await self._client.rows("groups", run=self.name, states=states, limit=limit)

    async def batches(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return await self._client.rows("batches", run=self.name, states=states, limit=limit)

    async def jobs(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return await self._client.rows("jobs", run=self.name, states=states, limit=limit)

    async def checkpoints(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return await self._client.rows("checkpoints", run=self.name, states=states, limit=limit)

    async def pushes(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return await self._client.rows("pushes", run=self.name, states=states, limit=limit)

    def events(self, after: int = 0) -> AsyncGenerator[Row, None]:
        """Events of this run with id > after, for ever."""
        return self._client.events(run=self.name, after=after)

    async def pause(self, reason: str = "operator") -> None:
        """Train no more until resumed; the run is served on."""
        await self._connection.ask(api.Pause(run=self.name, reason=reason), api.Done)

    async def resume(self) -> None:
        await self._connection.ask(api.Resume(run=self.name), api.Done)

    async def rollback(self, step: int) -> None:
        """Go on from an older step, in a new lineage: the steps after it are left, and what they trained stays trained. The
        run keeps its state; pause it first, or what waits is trained at once."""
        await self.refresh()
        await self._connection.ask(api.Rollback(run=self.name, step=step, lineage=self.info.lineage), api.Done)
        await self.refresh()

    async def finish(self) -> None:
        """End the run for good; its engine and trainer stop."""
        await self._connection.ask(api.Finish(run=self.name), api.Done)
