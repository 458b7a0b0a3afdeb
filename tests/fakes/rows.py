"""What unit tests of the daemon's services put into a store: runs, turns, checkpoints on disk, and a recording wire.

The services' own functions make the rows wherever one exists, so a test starts from a state that the daemon can be in.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sqlite3
import tempfile
from array import array
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from artd.clock import Clock
from artd.datadir.layout import DataDir
from artd.errors import RequestError
from artd.rollouts.ingest import Ingest
from artd.runs.lifecycle import _insert
from artd.store import migrate
from artd.store.blobs import Blobs
from artd.store.store import Store
from artd.store.writer import connect
from artd_schema.data.base import BaseModel
from artd_schema.data.trajectory import ExchangeRef, RouteShape, Sampling, Turn
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import GATEWAY, engine_name, parse_worker, trainer_name

from .staging import stage  # noqa: F401 - part of this toolbox

VOCAB = 100


def EVERY_STEP() -> dict[str, frozenset[str]]:
    """A gateway that has confirmed every step of run `r`, on each of its engines."""
    engines = frozenset(engine_name(1, replica) for replica in range(3))
    return {f"r@{step}": engines for step in range(100)}


BASE = BaseModel("b" * 64, VOCAB, ())
ROUTES = RouteShape(layers=2, topk=2, experts=4)
MIXTURE = BaseModel("b" * 64, VOCAB, (), ROUTES)


class FakeClock(Clock):
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000
        self.seconds = 100.0

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.ms += int(seconds * 1000)
        self.seconds += seconds


TRAINER, ENGINE = trainer_name(1), engine_name(1)
"""The workers of the first run."""
FIRST = {"trainer": TRAINER, "engine": ENGINE, "gateway": GATEWAY}


class FakeWire:
    """WorkerWire's face: `connected` says which spawn of which worker is there; `sent` records (name, message). `run` is the run of the
    workers that are given by their kinds."""

    def __init__(self, run: int = 1, /, **connected: int) -> None:
        names = {"trainer": trainer_name(run), "engine": engine_name(run), "gateway": GATEWAY}
        self.connected = {names[kind]: spawn for kind, spawn in connected.items()}
        self.sent: list[tuple[str, Any]] = []

    def spawn(self, name: str) -> int | None:
        return self.connected.get(name)

    def send(self, name: str, message: Any, bulk: Sequence[bytes] = ()) -> bool:
        if name not in self.connected:
            return False
        self.sent.append((name, message))
        return True

    def of(self, kind: type) -> list[Any]:
        """Messages of one kind, oldest first."""
        return [message for _, message in self.sent if isinstance(message, kind)]


def never(error: BaseException) -> None:
    raise AssertionError(f"the store failed: {error!r}")


@functools.cache
def empty_database(_scripts: tuple[tuple[int, str], ...]) -> bytes:
    """Return a database without rows, as `migrate` makes it of these scripts: to make one for each test would be a good part of their time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "artd.db"
        with contextlib.closing(connect(path)) as connection:
            migrate.migrate(connection)
        return path.read_bytes()


@contextlib.asynccontextmanager
async def open_store(root: Path, clock: Clock | None = None, on_fatal: Any = never) -> AsyncIterator[Store]:
    """Open the store of `root`, and make it where there is none."""
    if not (root / "artd.db").exists():
        (root / "artd.db").write_bytes(empty_database(tuple(migrate.scripts())))
    store = Store(root / "artd.db", clock or FakeClock(), on_fatal)
    await store.open()
    store._writer._connection.execute("PRAGMA synchronous = OFF")  # no test pulls the plug, and disks are slow
    try:
        yield store
    finally:
        await store.close()


def data_dir(root: Path) -> DataDir:
    """A data folder as `DataDir.make` makes it, with its sockets below it."""
    data = DataDir(root, root / "run")
    for folder in (data.tmp, data.logs, data.checkpoints, data.code, data.blobs, data.runtime):
        folder.mkdir(mode=0o700, exist_ok=True)
    return data


def spec(**changes: Any) -> RunSpec:
    return RunSpec(
        model="/models/toy",
        **({"group_size": 2, "groups_per_step": 1, "row_length": 64, "drop_longer": True} | changes),
    )


async def add_run(store: Store, name: str = "r", base: BaseModel = BASE, **changes: Any) -> int:
    """A run with its queued init job; returns its id."""
    await store.write(lambda c: _insert(c, store.clock.now_ms(), name, spec(**changes), base))
    return (await store.read("SELECT id FROM run WHERE name = ?", (name,)))[0]["id"]


def ids(*values: int) -> bytes:
    return array("i", values).tobytes()


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


def turn(**changes: Any) -> Turn:
    """A turn that is right; `changes` make it wrong."""
    good: dict[str, Any] = {"prompt_ids": ids(1, 2), "token_ids": ids(3, 4), "logprobs": floats(-0.5, -0.25)}
    return Turn(**(good | changes))


def body(*turns: Turn) -> bytes:
    return msgspec.msgpack.encode(list(turns or (turn(),)))


def make_ingest(store: Store, data: DataDir, max_inline: int = 65536) -> Ingest:
    return Ingest(store, Blobs(data.blobs), max_inline)


async def submit(ingest: Ingest, group: str = "g", reward: float = 1.0, key: str = "", **changes: Any) -> api.Submitted:
    """One trajectory by value; the body depends on the key, so that keys alone tell trajectories apart."""
    turns = changes.pop("turns", (turn(raw=key.encode()),))
    return await ingest.submit(api.Submit(run="r", group=group, reward=reward, key=key, **changes), [body(*turns)])


async def exchange(
    ingest: Ingest, response_id: str = "resp-1", split: str = "train", turns: Sequence[Turn] = (), **changes: Any
) -> w.ExchangeAck:
    """The gateway's word of one response, of one choice unless `turns` says otherwise."""
    turns = turns or [turn(policy_epoch=((0, 0),), response_id=response_id)]
    fields = {
        "response_id": response_id, "run": "r", "model": "r@0", "split": split, "sampling": Sampling(),
        "choices": len(turns), "prompt_tokens": 2, "completion_tokens": 2, "seconds": 0.1,
    }  # fmt: skip
    return await ingest.exchange(w.Exchange(**(fields | changes)), [msgspec.msgpack.encode(t) for t in turns])


def by_reference(*refs: tuple[Any, ...], group: str = "g", reward: float = 1.0, **changes: Any) -> api.Submit:
    """A submit of responses: (id, choice), or (id,) for the first choice."""
    return api.Submit(run="r", group=group, reward=reward, refs=tuple(ExchangeRef(*ref) for ref in refs), **changes)


async def add_worker(store: Store, name: str, spawn: int = 1, state: str = "ready", address: str = "") -> None:
    """Insert or change a worker's row. A worker of the first run may be given by its kind."""
    worker = parse_worker(FIRST.get(name, name))

    def write(c: sqlite3.Connection) -> None:
        c.execute(
            "INSERT INTO process (name, kind, run_id, replica, state, boot, spawn, address, since) VALUES (?, ?, ?, ?, ?, 1, ?, ?, 0)"
            " ON CONFLICT (name) DO UPDATE SET state = excluded.state, spawn = excluded.spawn, address = excluded.address",
            (worker.name, worker.kind, worker.run or None, worker.replica, state, spawn, address),
        )

    await store.write(write)


async def count(store: Store, table: str, where: str = "1") -> int:
    return (await store.read(f"SELECT count(*) FROM {table} WHERE {where}"))[0][0]


async def one(store: Store, sql: str, *parameters: Any) -> Any:
    """The only column of the only row."""
    (row,) = await store.read(sql, parameters)
    return row[0]


async def settle(task: asyncio.Task[Any]) -> None:
    """Cancel a service's task and wait for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


WHOLE = "SELECT t.*, d.metrics, d.body FROM trajectory t JOIN trajectory_data d ON d.trajectory_id = t.id"
"""Trajectories with their bodies and metrics."""


def body_of(row: sqlite3.Row, data: DataDir) -> bytes:
    """What a trajectory's row holds, or the blob that it names."""
    found: bytes = row["body"] if row["blob"] is None else Path(data.blob(row["blob"])).read_bytes()
    return found


async def refused(kind: type[RequestError], field: str, text: str, awaitable: Awaitable[object]) -> None:
    """It ends in this error, which names the field and says the text."""
    with pytest.raises(kind) as caught:
        await awaitable
    assert caught.value.field == field and text in caught.value.message, caught.value.message
