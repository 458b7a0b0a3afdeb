"""Fetches models for the daemon: one child process per name fetches and hashes, and clients that ask hear its progress.

Nothing here blocks the event loop, and no child outlives the daemon.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from dataclasses import dataclass, field

import msgspec

from artd.errors import Invalid
from artd_schema.data.base import BaseModel

log = logging.getLogger(__name__)
WAIT_S = 5.0
KEPT_S = 60.0
"""Seconds for which the result of a fetch is kept for a client that asks again; later it may no longer be true."""


class Fetched(msgspec.Struct, frozen=True):
    """A model on disk. `path` is its absolute folder, `base` its manifest."""

    path: str
    base: BaseModel


class _Line(msgspec.Struct, frozen=True):
    """A line of the child's output."""

    doing: str = ""
    error: str = ""
    path: str = ""
    base: BaseModel | None = None


@dataclass
class _Fetch:
    task: asyncio.Task[Fetched]
    doing: list[str] = field(default_factory=list)


class Fetcher:
    """Runs one child per model. `command` runs it, followed by the name; tests give another command."""

    def __init__(self, command: tuple[str, ...] = (sys.executable, "-m", "artd.models")) -> None:
        self._command = command
        self._under_way: dict[str, _Fetch] = {}

    async def get(self, name: str) -> Fetched | str:
        """Return the model, or after a few seconds a line that says what is being done; then ask again. Raises Invalid."""
        fetch = self._under_way.get(name)
        if fetch is None:
            doing = [f"{name}: looking for it"]
            fetch = self._under_way[name] = _Fetch(asyncio.ensure_future(self._run(name, doing)), doing)
            fetch.task.add_done_callback(functools.partial(self._keep_for_a_while, name, fetch))
        await asyncio.wait([fetch.task], timeout=WAIT_S)
        if not fetch.task.done():
            return fetch.doing[0]
        self._forget(name, fetch)
        return fetch.task.result()

    def _keep_for_a_while(self, name: str, fetch: _Fetch, task: asyncio.Task[Fetched]) -> None:
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved; perhaps nobody asks again
            task.get_loop().call_later(KEPT_S, self._forget, name, fetch)

    def _forget(self, name: str, fetch: _Fetch) -> None:
        """Drop this fetch, so that the next request starts anew. A newer fetch of the name stays."""
        if self._under_way.get(name) is fetch:
            del self._under_way[name]

    async def _run(self, name: str, doing: list[str]) -> Fetched:
        child = await asyncio.create_subprocess_exec(
            *self._command, name, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            limit=1 << 24, start_new_session=True,
        )  # fmt: skip
        assert child.stdout is not None
        last = _Line()
        try:
            async for text in child.stdout:
                last = msgspec.json.decode(text, type=_Line)
                if last.doing:
                    doing[0] = last.doing
            await child.wait()
        finally:
            if child.returncode is None:
                child.terminate()
        if last.base is None:
            why = last.error or f"model {name} could not be fetched: the child ended with {child.returncode}"
            raise Invalid(why, field="spec.model")
        log.info("model %s is at %s", name, last.path)
        return Fetched(last.path, last.base)
