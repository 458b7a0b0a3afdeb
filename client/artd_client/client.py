"""The asynchronous client. What it returns is durable in the daemon."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from artd_schema import paths
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api

from .address import Remote
from .connection import Connection, expect
from .errors import Closed, Invalid
from .progress import Progress, Tell, to_stderr
from .rows import Row, Table, follow_events, read_rows
from .run import Run
from .specs import make_spec, reading_s


class Client:
    """`async with Client() as art:` connects an asyncio program to a daemon.

    `data_dir`: the daemon's data folder; None means $ARTD_DATA_DIR, else $XDG_DATA_HOME/artd/data. `remote`: a daemon on
    another machine, in place of `data_dir`. `timeout`: seconds that a request may take. Time without a daemon counts: if the
    daemon stops or dies and another one starts within the time-out, the request only takes longer. `progress`: called with a
    line of text now and then while `run` or `wait` takes more than 5 s; the default prints to stderr, None prints nothing.

    Opening raises DaemonNotRunning at once when no daemon is alive. Every call raises ArtdError: TimedOut, DaemonNotRunning or
    Draining when its time is over, Closed when the client is closed. A call may be cancelled at any moment; the daemon may or
    may not have carried it out. Many tasks of one event loop (asyncio, or anyio on asyncio) may share a client.
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
        """Close the connection and the OpenAI clients that runs made. Calls that are under way raise Closed; closing twice is
        fine."""
        closing, self._closing = self._closing, []
        connection, self._connection = self._connection, None
        async with AsyncExitStack() as stack:  # closes each, even if another one raises
            if connection is not None:
                stack.push_async_callback(connection.close)
            for close in closing:
                stack.push_async_callback(close)

    def closing(self, close: Callable[[], Awaitable[object]]) -> None:
        """Register `close` to be awaited when this client closes."""
        self._closing.append(close)

    @property
    def daemon(self) -> api.Welcome:
        """The daemon's description of itself: instance, version and max_message (bytes)."""
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
        """Create a run, or attach to one that exists.

        Give either `spec`, or `model` and any fields of RunSpec, such as `lora={"rank": 8}, group_size=8`. With neither, the
        call only attaches, and raises NotFound when there is no such run. `model` is the folder of a Hugging Face checkpoint,
        `ORG/NAME[@COMMIT]` of the Hub, or a name that `artd model fetch` knows; the daemon downloads the latter two, however
        long that takes. It then hashes the model's folder, for which the call gets 10 s more per GB.

        Raises Invalid with the bad field. Raises Conflict, which names the field, when the run exists with another spec, and
        when another run is not finished.
        """
        connection = self._open
        wanted = make_spec(model, spec, fields)
        timeout = self._timeout + (
            reading_s(wanted.model) if wanted else 0
        )  # the daemon hashes the model's folder first
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
        """Return rows of a table, with the columns of docs/cli-json.md. Times are milliseconds since the epoch.

        They come newest first, with ids below `before`. With `after` they come oldest first, with ids above it; 0 starts at the
        first row. The last id of a page is the bound of the next page, so rows that are added meanwhile do not shift it.
        `states`: only rows in these states, () = all. `limit`: the most rows, up to 10,000. `workers` lists all workers; they
        have no run and no id. Raises NotFound for an unknown run, Invalid for an unknown state.
        """
        return await read_rows(self._open, what, run=run, states=states, before=before, after=after, limit=limit)

    async def runs(self) -> list[Row]:
        """Return the newest runs, at most 100; columns as in `rows`."""
        return await self.rows("runs")

    async def jobs(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        """Return the newest jobs of all runs, in `states` (() = all); columns as in `rows`."""
        return await self.rows("jobs", states=states, limit=limit)

    async def workers(self) -> list[Row]:
        """Return every worker; columns as in `rows`."""
        return await self.rows("workers")

    def events(self, run: str | None = None, after: int = 0) -> AsyncGenerator[Row, None]:
        """Yield events with an id above `after`, oldest first, then new ones as they happen, for ever. `run`: None = events of
        all runs.

        No event is left out or repeated, even when the daemon restarts. Raises DaemonNotRunning when it stays away.
        """
        return follow_events(lambda: self._open, run or "", after)

    # ---- steering -----------------------------------------------------------------------------------------------------------

    async def cancel(self, job: int) -> None:
        """Cancel a job for good. Its trajectories wait to be packed again, and its run pauses. Raises NotFound, Conflict."""
        await self._open.ask(api.CancelJob(job=job), api.Done)

    async def discard(self, job: int) -> None:
        """End a job for good and discard its trajectories, which are never trained. Raises NotFound, Conflict."""
        await self._open.ask(api.DiscardJob(job=job), api.Done)

    async def retry(self, job: int) -> None:
        """Queue a quarantined job again, on the same batch. Raises NotFound, Conflict."""
        await self._open.ask(api.RetryJob(job=job), api.Done)

    async def collect(self, dry: bool = False, resume: bool = False) -> api.Collected:
        """Run garbage collection now: delete expired payloads and files that nothing refers to.

        `dry`: only return what would be deleted. `resume`: first allow deletion by age again, which a jump of the clock
        stopped.
        """
        return await self._open.ask(api.Collect(dry=dry, resume=resume), api.Collected)

    async def shutdown(self, drain_s: float = 60.0) -> None:
        """Stop the daemon; its workers get `drain_s` seconds to end. Returns when the daemon begins to stop."""
        await self._open.ask(api.Shutdown(drain_s=drain_s), api.Done)
