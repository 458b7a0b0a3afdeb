"""The asynchronous client.

Owner of: one connection, and the OpenAI clients that it handed out. Invariants: everything that it returns is durable in the daemon.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from artd_schema import client_api as api
from artd_schema import paths
from artd_schema.spec import RunSpec

from .connection import Connection, expect
from .errors import Closed, Invalid
from .progress import Progress, Tell, to_stderr
from .remote import Remote
from .rows import Row, Table, follow_events, read_rows
from .run import Run
from .specs import make_spec, reading_s


class Client:
    """`async with Client() as art:`; everything artd does, for asyncio programs.

    data_dir: the daemon's data folder; None = $ARTD_DATA_DIR, else $XDG_DATA_HOME/artd/data. timeout: seconds that a
    request may take, time without a daemon included: when the daemon stops or dies and another is started within it,
    nothing is noticed but the delay. remote: a daemon on another machine, in place of data_dir. progress: gets a line now and
    then while `run` or `wait` takes longer than 5 s (default: to stderr; None = silence).

    Opening raises DaemonNotRunning at once when no daemon lives. Every call raises ArtdError: TimedOut, DaemonNotRunning or
    Draining when its time is over, Closed when the client is. A call may be cancelled at any moment; what was asked for may
    then have been done or not. Safe for many tasks of one event loop (asyncio, also by way of anyio).
    """

    def __init__(
        self, data_dir: str | os.PathLike[str] | None = None, *, timeout: float = 60.0, remote: Remote | None = None,
        progress: Tell | None = to_stderr,
    ) -> None:  # fmt: skip
        if remote is not None and data_dir is not None:
            raise Invalid("give either data_dir or remote, not both", "remote")
        if not timeout > 0:
            raise Invalid(
                f"timeout: {timeout} is not more than 0 seconds (float('inf') = as long as it takes)", "timeout"
            )
        self.data_dir = paths.data_dir(data_dir)
        self._where = remote or self.data_dir
        self._timeout = timeout
        self.progress = Progress(progress)
        self._connection: Connection | None = None
        self._closing: list[Callable[[], Awaitable[object]]] = []

    async def __aenter__(self) -> Self:
        if self._connection is not None:
            raise Closed("this client is open already")
        connection = Connection(self._where, self._timeout)
        await connection.open()
        self._connection = connection
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and the OpenAI clients made by runs; what is under way ends with Closed. Idempotent."""
        closing, self._closing = self._closing, []
        connection, self._connection = self._connection, None
        async with AsyncExitStack() as stack:  # each, whatever becomes of the others
            if connection is not None:
                stack.push_async_callback(connection.close)
            for close in closing:
                stack.push_async_callback(close)

    def closing(self, close: Callable[[], Awaitable[object]]) -> None:
        """Have `close` awaited when this client closes."""
        self._closing.append(close)

    @property
    def daemon(self) -> api.Welcome:
        """What the daemon said of itself: instance, version, max_message."""
        welcome = self._open.welcome
        assert welcome is not None
        return welcome

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise Closed("this client is not open; use `async with Client() as art:`")
        return self._connection

    # ---- runs -------------------------------------------------------------------------------------------------------------

    async def run(
        self, name: str, model: str | os.PathLike[str] | None = None, *, spec: RunSpec | None = None, **fields: Any
    ) -> Run:
        """Create a run or attach to it.

        Either `spec`, or `model` and any field of RunSpec: `lora={"rank": 8}`, `group_size=8` ... Neither attaches only:
        NotFound when there is no such run. `model` is the folder of a Hugging Face checkpoint, `ORG/NAME[@COMMIT]` of the Hub or
        a name that `artd model fetch` knows: the daemon fetches those, which takes as long as it takes. A run that exists with
        another spec is a Conflict that names the field, and so is another run that is not finished. Raises Invalid with the bad
        field. The daemon hashes the model's folder first, so this may take longer than `timeout`: 10 s more for each GB of it.
        """
        connection = self._open
        wanted = make_spec(model, spec, fields)
        timeout = self._timeout + (reading_s(wanted.model) if wanted else 0)  # the daemon hashes the model's folder
        op, waiter = api.CreateRun(name=name, spec=wanted), object()
        try:
            while isinstance(answer := await connection.call(op, (), timeout), api.Pending):
                self.progress.poll_s(waiter, 0.0)
                self.progress.say(waiter, answer.doing)
        finally:
            self.progress.leave(waiter)
        return Run(connection, expect(op, answer, api.RunInfo), self.progress, self.closing)

    # ---- looking ------------------------------------------------------------------------------------------------------------

    async def rows(
        self, what: Table, *, run: str = "", states: Sequence[str] = (), before: int | None = None,
        after: int | None = None, limit: int = 100,
    ) -> list[Row]:  # fmt: skip
        """Rows of a table, with the columns of docs/cli-json.md; times are milliseconds since the epoch.

        Newest first, below id `before`; with `after` oldest first, above that id (0 = from the first row). The last id of a
        page is the bound of the next one, so rows that come meanwhile move nothing. states: () = all; limit: rows at most,
        up to 10,000. Workers are all there are: they have no run and no id. Raises NotFound for an unknown run, Invalid for
        a state that no row can have.
        """
        return await read_rows(self._open, what, run=run, states=states, before=before, after=after, limit=limit)

    async def runs(self) -> list[Row]:
        return await self.rows("runs")

    async def jobs(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return await self.rows("jobs", states=states, limit=limit)

    async def workers(self) -> list[Row]:
        return await self.rows("workers")

    def events(self, run: str | None = None, after: int = 0) -> AsyncGenerator[Row, None]:
        """Events with id > after, oldest first, then new ones as they happen, for ever. run: None = of all runs.

        Each once and none left out, also when the daemon is started again; DaemonNotRunning when it stays away."""
        return follow_events(lambda: self._open, run or "", after)

    # ---- steering -----------------------------------------------------------------------------------------------------------

    async def cancel(self, job: int) -> None:
        """Cancel a job for good: its trajectories wait again, and its run pauses. Raises NotFound, Conflict."""
        await self._open.ask(api.CancelJob(job=job), api.Done)

    async def discard(self, job: int) -> None:
        """End a job for good, with its trajectories: they are never trained. Raises NotFound, Conflict."""
        await self._open.ask(api.DiscardJob(job=job), api.Done)

    async def retry(self, job: int) -> None:
        """Queue a quarantined job again on the same batch. Raises NotFound, Conflict."""
        await self._open.ask(api.RetryJob(job=job), api.Done)

    async def collect(self, dry: bool = False, resume: bool = False) -> api.Collected:
        """Have deleted what has had its time and what nothing refers to. dry: only say what would go; resume: retention that a
        jump of the clock stopped goes on."""
        return await self._open.ask(api.Collect(dry=dry, resume=resume), api.Collected)

    async def shutdown(self, drain_s: float = 60.0) -> None:
        """Stop the daemon; its workers get drain_s seconds. Returns when it has begun to stop, not when it is gone."""
        await self._open.ask(api.Shutdown(drain_s=drain_s), api.Done)
