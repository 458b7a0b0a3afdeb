"""Runs the asynchronous client in a thread for the blocking one: an event loop, and the parts that `sync` does not generate.

Every call blocks until the asynchronous call ends; interrupting the caller cancels that call. Many threads may share a client.
Closing it ends every call, which then raises Closed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Self, TypeVar

from artd_schema.wire import client_api as api

from .client import Client
from .errors import Closed
from .openai_client import sync_openai
from .run import Run

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
