"""The same client for programs without an event loop.

Owner of: one thread with one event loop, and the `Client` in it. Invariants: every call blocks until the asynchronous one
ended; an interrupt of the caller cancels it there; safe for many threads, and no call outlives the client: it ends with
Closed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from artd_schema import client_api as api
from artd_schema.spec import RunSpec
from artd_schema.trajectory import Split, Turn

from .client import Client, Table
from .errors import Closed
from .openai_client import sync_openai
from .progress import Tell, to_stderr
from .remote import Remote
from .run import Row, Run

if TYPE_CHECKING:
    from openai import OpenAI

T = TypeVar("T")
CLOSED = "this client is closed"


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open = True
        self._door = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="artd-client", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of `work`. Raises Closed when the loop ends before that."""
        with self._door:
            if not self._open:
                work.close()
                raise Closed(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Closed(CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        with self._door:
            self._open = False
            ending = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class SyncClient:
    """`with SyncClient() as art:`; every method is that of `Client`, and blocks. Safe for many threads; it may be used where an
    event loop runs (it blocks that loop), and not in a process forked while it was open."""

    def __init__(
        self, data_dir: str | os.PathLike[str] | None = None, *, timeout: float = 60.0, remote: Remote | None = None,
        progress: Tell | None = to_stderr,
    ) -> None:  # fmt: skip
        self._client = Client(data_dir, timeout=timeout, remote=remote, progress=progress)
        self._running: _Loop | None = None

    def __enter__(self) -> Self:
        if self._running is not None:
            raise Closed("this client is open already")
        loop = _Loop()
        try:
            loop.call(self._client.__aenter__())
        except BaseException:
            loop.close()
            raise
        self._running = loop
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        loop, self._running = self._running, None
        if loop is not None:
            try:
                loop.call(self._client.close())
            finally:
                loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        running = self._running
        if running is None:
            work.close()
            raise Closed("this client is not open; use `with SyncClient() as art:`")
        return running.call(work)

    @property
    def daemon(self) -> api.Welcome:
        return self._client.daemon

    def run(
        self, name: str, model: str | os.PathLike[str] | None = None, *, spec: RunSpec | None = None, **fields: Any
    ) -> SyncRun:
        return SyncRun(self, self._call(self._client.run(name, model, spec=spec, **fields)))

    def rows(
        self, what: Table, *, run: str = "", states: Sequence[str] = (), before: int | None = None,
        after: int | None = None, limit: int = 100,
    ) -> list[Row]:  # fmt: skip
        return self._call(self._client.rows(what, run=run, states=states, before=before, after=after, limit=limit))

    def runs(self) -> list[Row]:
        return self._call(self._client.runs())

    def jobs(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return self._call(self._client.jobs(states, limit))

    def workers(self) -> list[Row]:
        return self._call(self._client.workers())

    def events(self, run: str | None = None, after: int = 0) -> Generator[Row, None, None]:
        source = self._client.events(run, after)

        async def following() -> Row:
            return await anext(source)

        async def end() -> None:
            await source.aclose()

        try:
            while True:
                yield self._call(following())
        finally:
            if self._running is not None:
                self._call(end())

    def cancel(self, job: int) -> None:
        self._call(self._client.cancel(job))

    def discard(self, job: int) -> None:
        self._call(self._client.discard(job))

    def retry(self, job: int) -> None:
        self._call(self._client.retry(job))

    def collect(self, dry: bool = False, resume: bool = False) -> api.Collected:
        return self._call(self._client.collect(dry, resume))

    def shutdown(self, drain_s: float = 60.0) -> None:
        self._call(self._client.shutdown(drain_s))


class SyncRun:
    """See `Run`."""

    def __init__(self, client: SyncClient, run: Run) -> None:
        self._client = client
        self._run = run

    def __repr__(self) -> str:
        return repr(self._run)

    @property
    def info(self) -> api.RunInfo:
        return self._run.info

    @property
    def name(self) -> str:
        return self._run.name

    @property
    def model(self) -> str:
        return self._run.model

    @property
    def state(self) -> str:
        return self._run.state

    @property
    def spec(self) -> RunSpec:
        return self._run.spec

    @property
    def step(self) -> int:
        return self._run.step

    @property
    def served(self) -> int:
        return self._run.served

    @property
    def base_url(self) -> str:
        return self._run.base_url

    @property
    def api_key(self) -> str:
        return self._run.api_key

    def openai(self, **options: Any) -> OpenAI:
        """An OpenAI client bound to the gateway; options go to its constructor. It is closed with the client."""
        made = sync_openai(self.base_url, self.api_key, options)

        async def close() -> None:
            made.close()

        self._client._client.closing(close)
        return made

    def refresh(self) -> Self:
        self._client._call(self._run.refresh())
        return self

    def submit(
        self,
        group: str,
        reward: float,
        *,
        responses: Iterable[Any] = (),
        turns: Sequence[Turn] = (),
        key: str | None = None,
        split: Split = "train",
        metrics: Mapping[str, float] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> api.Submitted:
        work = self._run.submit(
            group, reward, responses=responses, turns=turns, key=key, split=split, metrics=metrics, metadata=metadata
        )
        return self._client._call(work)

    def seal(self, group: str) -> api.GroupInfo:
        return self._client._call(self._run.seal(group))

    def flush(self) -> None:
        self._client._call(self._run.flush())

    def wait(self, step: int, timeout: float | None = None) -> api.StepInfo:
        return self._client._call(self._run.wait(step, timeout))

    def trajectories(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return self._client._call(self._run.trajectories(states, limit))

    def groups(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return self._client._call(self._run.groups(states, limit))

    def batches(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return self._client._call(self._run.batches(states, limit))

    def jobs(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return self._client._call(self._run.jobs(states, limit))

    def checkpoints(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return self._client._call(self._run.checkpoints(states, limit))

    def pushes(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return self._client._call(self._run.pushes(states, limit))

    def events(self, after: int = 0) -> Generator[Row, None, None]:
        return self._client.events(self.name, after)

    def pause(self, reason: str = "operator") -> None:
        self._client._call(self._run.pause(reason))

    def resume(self) -> None:
        self._client._call(self._run.resume())

    def discard_group(self, group: str) -> None:
        self._client._call(self._run.discard_group(group))

    def rollback(self, step: int) -> None:
        self._client._call(self._run.rollback(step))

    def finish(self) -> None:
        self._client._call(self._run.finish())

    def delete(self) -> None:
        self._client._call(self._run.delete())
