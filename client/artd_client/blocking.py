"""Runs the asynchronous client in a thread for the blocking one: an event loop, and the parts that `sync` does not generate.

Every call blocks until the asynchronous call ends; interrupting the caller cancels that call. Many threads may share a client.
Closing it ends every call, which then raises Closed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

from artd_schema.data.trajectory import Split
from artd_schema.wire import client_api as api

from .client import Client
from .errors import Closed
from .openai_client import sync_openai
from .rollout import Group, Rollout
from .run import Run
from .turns import Given

if TYPE_CHECKING:
    from openai import OpenAI

T = TypeVar("T")
CLOSED = "this client is closed"


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open = True
        self._door = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="artd-client", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and return its result. Raises Closed when the loop ends first."""
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


class BlockingClient:
    """Opens and closes a `Client` in a loop of its own, and runs its calls there."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._running: Loop | None = None

    def __enter__(self) -> Self:
        if self._running is not None:
            raise Closed("this client is open already")
        loop = Loop()
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
        """Close the client. Calls that are under way raise Closed; closing twice is fine."""
        loop, self._running = self._running, None
        if loop is not None:
            try:
                loop.call(self._client.close())
            finally:
                loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises Closed when this client is not open, or is closed before `work` ends."""
        running = self._running
        if running is None:
            work.close()
            raise Closed("this client is not open; use `with SyncClient() as art:`")
        return running.call(work)

    def _follow(self, source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield what `source` yields, and close `source` with this generator."""

        async def following() -> T:
            return await anext(source)

        async def end() -> None:
            await source.aclose()

        try:
            while True:
                yield self._call(following())
        finally:
            if self._running is not None:
                self._call(end())


class BlockingRun:
    """Runs the calls of a `Run` in its client's loop."""

    def __init__(self, client: BlockingClient, run: Run) -> None:
        self._client = client
        self._run = run

    def __repr__(self) -> str:
        return repr(self._run)

    @property
    def info(self) -> api.RunInfo:
        """The daemon's last description of the run; `refresh` asks again."""
        return self._run.info

    def openai(self, **options: Any) -> OpenAI:
        """Return an OpenAI client for the gateway. `options` go to its constructor. It closes with this client."""
        made = sync_openai(self._run.base_url, self._run.api_key, options)

        async def close() -> None:
            made.close()

        self._client._client.closing(close)
        return made

    def rollout(self, name: str) -> SyncRollout:
        """See `Run.rollout`."""
        return SyncRollout(self, self._run.rollout(name))

    @contextlib.contextmanager
    def group(self, prompt_id: str, n: int | None = None) -> Generator[SyncGroup, None, None]:
        """See `Run.group`."""
        opened = self._run.group(prompt_id, n)
        group = self._client._call(_enter(opened))
        try:
            yield SyncGroup(self, group)
        except BaseException as error:
            self._client._call(_leave(opened, error))
            raise
        self._client._call(_leave(opened, None))


async def _enter(opened: contextlib.AbstractAsyncContextManager[Group]) -> Group:
    return await opened.__aenter__()


async def _leave(opened: contextlib.AbstractAsyncContextManager[Group], error: BaseException | None) -> None:
    await opened.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)


class SyncRollout:
    """See `Rollout`."""

    def __init__(self, run: BlockingRun, rollout: Rollout) -> None:
        self._run = run
        self._rollout = rollout

    def __repr__(self) -> str:
        return repr(self._rollout)

    @property
    def name(self) -> str:
        """The rollout's name."""
        return self._rollout.name

    @property
    def root_url(self) -> str:
        """See `Rollout.root_url`."""
        return self._rollout.root_url

    @property
    def base_url(self) -> str:
        """See `Rollout.base_url`."""
        return self._rollout.base_url

    @property
    def headers(self) -> dict[str, str]:
        """See `Rollout.headers`."""
        return self._rollout.headers

    @property
    def api_key(self) -> str:
        """See `Rollout.api_key`."""
        return self._rollout.api_key

    @property
    def model(self) -> str:
        """See `Rollout.model`."""
        return self._rollout.model

    def openai(self, **options: Any) -> OpenAI:
        """Return an OpenAI client for this rollout. `options` go to its constructor. It closes with the client."""
        return self._run.openai(**({"base_url": self.base_url} | options))

    def submit(
        self, reward: float, group: str = "", *, key: str | None = None, split: Split = "train",
        metrics: Mapping[str, float] | None = None, metadata: dict[str, Any] | None = None, advantages: Given = None,
        weights: Given = None,
    ) -> api.Submitted:  # fmt: skip
        """See `Rollout.submit`."""
        submitting = self._rollout.submit(
            reward,
            group,
            key=key,
            split=split,
            metrics=metrics,
            metadata=metadata,
            advantages=advantages,
            weights=weights,
        )
        return self._run._client._call(submitting)


class SyncGroup:
    """See `Group`."""

    def __init__(self, run: BlockingRun, group: Group) -> None:
        self.name = group.name
        self.rollouts = [SyncRollout(run, rollout) for rollout in group]

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[SyncRollout]:
        return iter(self.rollouts)
