"""The same client for programs without an event loop: what `Client` and `Run` do, in calls that block.

Generated from `client.py` and `run.py` by `python -m tests.house.blocking --write`: do not edit.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from artd_schema.data.trajectory import Pick, Split, Turn
from artd_schema.run.spec import Learning, RunSpec
from artd_schema.wire import client_api as api

from .address import Remote
from .blocking import BlockingClient, BlockingRun
from .client import Client
from .progress import Tell, to_stderr
from .rows import Row, Table
from .trajectory import Trajectory
from .turns import Given


class SyncClient(BlockingClient):
    """`with SyncClient() as art:`; every method is that of `Client`, and blocks. Safe for many threads; it may be used where an
    event loop runs (it blocks that loop), and not in a process forked while it was open."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        timeout: float = 60.0,
        remote: Remote | None = None,
        progress: Tell | None = to_stderr,
    ) -> None:
        super().__init__(Client(data_dir, timeout=timeout, remote=remote, progress=progress))

    @property
    def daemon(self) -> api.Welcome:
        return self._client.daemon

    def run(
        self, name: str, model: str | os.PathLike[str] | None = None, *, spec: RunSpec | None = None, **fields: Any
    ) -> SyncRun:
        return SyncRun(self, self._call(self._client.run(name, model, spec=spec, **fields)))

    def rows(
        self,
        what: Table,
        *,
        run: str = "",
        states: Sequence[str] = (),
        before: int | None = None,
        after: int | None = None,
        limit: int = 100,
    ) -> list[Row]:
        return self._call(self._client.rows(what, run=run, states=states, before=before, after=after, limit=limit))

    def runs(self) -> list[Row]:
        return self._call(self._client.runs())

    def jobs(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return self._call(self._client.jobs(states, limit))

    def workers(self) -> list[Row]:
        return self._call(self._client.workers())

    def events(self, run: str | None = None, after: int = 0) -> Generator[Row, None, None]:
        return self._follow(self._client.events(run, after))

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


class SyncRun(BlockingRun):
    """See `Run`."""

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
    def learning(self) -> Learning:
        return self._run.learning

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
        rollout: str = "",
        key: str | None = None,
        split: Split = "train",
        metrics: Mapping[str, float] | None = None,
        metadata: dict[str, Any] | None = None,
        advantages: Given = None,
        weights: Given = None,
    ) -> api.Submitted:
        return self._client._call(
            self._run.submit(
                group,
                reward,
                responses=responses,
                turns=turns,
                rollout=rollout,
                key=key,
                split=split,
                metrics=metrics,
                metadata=metadata,
                advantages=advantages,
                weights=weights,
            )
        )

    def submit_example(
        self,
        prompt_ids: Iterable[int],
        token_ids: Iterable[int],
        *,
        weights: Iterable[float] | None = None,
        key: str | None = None,
    ) -> api.Submitted:
        return self._client._call(self._run.submit_example(prompt_ids, token_ids, weights=weights, key=key))

    def seal(self, group: str) -> api.GroupInfo:
        return self._client._call(self._run.seal(group))

    def flush(self) -> None:
        self._client._call(self._run.flush())

    def wait(self, step: int, timeout: float | None = None, engines: Literal["first", "all"] = "first") -> api.StepInfo:
        return self._client._call(self._run.wait(step, timeout, engines))

    def trajectories(self, states: Sequence[str] = (), limit: int = 100) -> list[Row]:
        return self._client._call(self._run.trajectories(states, limit))

    def samples(
        self, step: int | None = None, pick: Pick = "newest", *, split: Split = "train", limit: int = 5
    ) -> list[Trajectory]:
        return self._client._call(self._run.samples(step, pick, split=split, limit=limit))

    def trajectory(self, trajectory: int) -> Trajectory:
        return self._client._call(self._run.trajectory(trajectory))

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
        return self._client._follow(self._run.events(after))

    def pause(self, reason: str = "operator") -> None:
        self._client._call(self._run.pause(reason))

    def resume(self) -> None:
        self._client._call(self._run.resume())

    def update(self, **changes: Any) -> None:
        self._client._call(self._run.update(**changes))

    def discard_group(self, group: str) -> None:
        self._client._call(self._run.discard_group(group))

    def rollback(self, step: int) -> None:
        self._client._call(self._run.rollback(step))

    def finish(self) -> None:
        self._client._call(self._run.finish())

    def delete(self) -> None:
        self._client._call(self._run.delete())
