"""A data folder with something of everything in it, made by the daemon's own services. `artd check` finds it clean, and the
check's tests then break it."""

from __future__ import annotations

import asyncio
import atexit
import functools
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from artd.datadir.layout import DataDir
from artd.recover import identify
from artd.retention.checkpoints import CheckpointRetention
from artd.rollouts.ingest import Ingest
from artd.runs.lifecycle import set_run_state
from artd.serving.pusher import Pusher
from artd.store.blobs import Blobs
from artd.store.store import Store
from artd.tables.jobs import abandon
from artd_client import turn
from artd_schema.data.base import BaseModel
from artd_schema.data.trajectory import ExchangeRef, Sampling, Turn
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import engine_name, trainer_name
from tests.fakes.routes import SHAPE, rows_of
from tests.fakes.rows import BASE, VOCAB, FakeWire, add_run, add_worker, body, data_dir, open_store
from tests.fakes.staging import stage
from tests.fakes.steps import claim, make_dispatch, pack, staged

MIXTURE = BaseModel("c" * 64, VOCAB, (), SHAPE)
INLINE = 250  # bytes: a body of two turns is a file


class World:
    """One folder and its services. name, number: of the run that is worked on."""

    def __init__(self, store: Store, data: DataDir) -> None:
        self.store = store
        self.data = data
        self.ingest = Ingest(store, Blobs(data.blobs), INLINE)
        self.name = ""
        self.number = 0

    async def begin(self, name: str, base: BaseModel, **spec: object) -> None:
        self.name, self.number = name, await add_run(self.store, name, base, **spec)
        await self.commit()
        await self.serve()

    def wire(self) -> FakeWire:
        return FakeWire(self.number, trainer=1, engine=1)

    async def order(self) -> tuple[w.Run, FakeWire]:
        """Claim the job that is due."""
        wire = self.wire()
        return await claim(self.store, self.data, make_dispatch(self.store, self.data, wire)), wire

    async def commit(self) -> None:
        """The job that is due, through claim, staging and commit."""
        order, wire = await self.order()
        base = BASE if self.name == "old" else MIXTURE
        sha = stage(Path(order.dir), order, base.digest, run=self.name)
        await make_dispatch(self.store, self.data, wire).take_staged(trainer_name(self.number), staged(order, sha))
        assert wire.of(w.Committed), wire.sent

    async def serve(self) -> None:
        engine = engine_name(self.number)
        await add_worker(self.store, engine, 1, "ready", "/engine.sock")
        pusher = Pusher(self.store, self.wire(), self.data, lambda *_: None)
        await pusher._send_due(engine)
        if not pusher._sending:  # the first look only superseded what was prepared
            await pusher._send_due(engine)
        push = pusher._sending[engine].message
        await pusher.live(w.Live(push=push.push, fence=push.fence, max_abs=1e-6, mean_abs=1e-7))

    async def submit(self, group: str, *rewards: float, split: str = "train", turns: int = 1) -> None:
        """One trajectory for each reward, by value."""
        for index, reward in enumerate(rewards):
            op = api.Submit(run=self.name, group=group, reward=reward, key=f"{group}-{index}", split=split)
            await self.ingest.submit(op, [body(*self.turns(index, turns))])

    def turns(self, seed: int, count: int) -> list[Turn]:
        """Turns of which each goes on from the one before."""
        made, prompt = [], [1, 2, 3 + seed]
        for _ in range(count):
            rows = b"" if self.name == "old" else rows_of(SHAPE, 0, len(prompt) + 1)
            made.append(turn(prompt, [4, 5], [-1.0, -0.5], routes=rows, policy_epoch=[(0, 0)]))
            prompt = [*prompt, 4, 5]
        return made

    async def refer(self, group: str, *rewards: float) -> None:
        """One trajectory for each reward, by reference to the ledger, of two exchanges each."""
        for index, reward in enumerate(rewards):
            names = [f"{group}-{index}-{number}" for number in range(2)]
            for name, made in zip(names, self.turns(index, 2), strict=True):
                await self.exchange(name, made)
            refs = tuple(ExchangeRef(name, 0) for name in names)
            await self.ingest.submit(api.Submit(run=self.name, group=group, reward=reward, refs=refs), [])

    async def name_rollouts(self) -> None:
        """One rollout that is submitted, with a response that is superseded, and one that is open."""
        for place, made in enumerate(self.turns(0, 2)):
            await self.exchange(f"named-{place}", made, rollout="t1", place=place, request=f"{place}")
        await self.exchange("named-part", self.turns(0, 1)[0], rollout="t1", place=2, request="2", part=True)
        await self.exchange("named-open", self.turns(0, 1)[0], rollout="t2", request="0")
        await self.ingest.submit(api.Submit(run=self.name, group="named", reward=1.0, rollout="t1"), [])

    async def exchange(self, name: str, made: Turn, **rollout: Any) -> None:
        message = w.Exchange(
            response_id=name, run=self.name, model=f"{self.name}@0", split="train", sampling=Sampling(), choices=1,
            prompt_tokens=1, completion_tokens=1, seconds=0.1, **rollout,
        )  # fmt: skip
        made = msgspec.structs.replace(made, response_id=name)
        assert (await self.ingest.exchange(message, [msgspec.msgpack.encode(made)])).error == ""

    async def step(self) -> None:
        """Pack what is sealed, train, serve."""
        assert await pack(self.store, self.data)
        await self.commit()
        await self.serve()

    async def cancel(self) -> None:
        """End the queued job; its trajectories wait again."""

        def write(c: sqlite3.Connection) -> None:
            job = c.execute("SELECT * FROM job WHERE state = 'queued'").fetchone()
            abandon(c, self.store.clock.now_ms(), job, self.name)

        await self.store.write(write)

    async def retire(self) -> None:
        for folder in await self.store.write(CheckpointRetention(self.store, self.data)._retire):
            shutil.rmtree(self.data.root / folder)


@functools.cache
def template() -> Path:
    """A world that was made once for all tests of this process; they copy it before they change anything."""
    root = Path(tempfile.mkdtemp(prefix="artd-world."))
    atexit.register(shutil.rmtree, root)
    asyncio.run(make(root))
    return root


def copy(target: Path) -> Path:
    """A world of one's own."""
    return Path(shutil.copytree(template(), target))


async def make(root: Path) -> None:
    """A finished dense run of two steps, and an active mixture at step 2 whose third train job runs, once failed.

    There are open, sealed, packed, trained, discarded and eval groups; bodies in rows and in files, by value and by reference;
    an abandoned batch; retired checkpoints; a served step.
    """
    data = data_dir(root)
    async with open_store(root) as store:
        await fill(store, data)


async def fill(store: Store, data: DataDir) -> None:
    """The rows and files of `make`."""
    await store.write(lambda c: identify(c, data, store.clock.now_ms()))
    world = World(store, data)
    await world.begin("old", BASE, keep_checkpoints=1)
    for step in (1, 2):
        await world.submit(f"s{step}", 0.0, 1.0, turns=step)
        await world.step()
    await world.retire()
    await store.write(lambda c: set_run_state(c, store.clock.now_ms(), world.number, "finished", ""))
    await world.begin("r", MIXTURE)
    await world.refer("s1", 0.0, 1.0)
    await world.step()
    await world.submit("s2", 0.0, 1.0, turns=2)
    assert await pack(store, data)
    await world.cancel()
    await world.step()
    await world.submit("flat", 1.0, 1.0)
    await world.submit("held", 0.5, split="eval")
    await world.submit("s3", 0.0, 1.0)
    await world.submit("s4", 0.0, 1.0)
    await world.submit("open", 0.0)
    await world.exchange("unused", world.turns(0, 1)[0])
    await world.exchange("large", msgspec.structs.replace(world.turns(0, 1)[0], raw=b"x" * INLINE))
    await world.name_rollouts()
    assert await pack(store, data)
    order, wire = await world.order()
    failed = w.Failed(job=order.job, fence=order.fence, failure="interrupted", error="the disk was full")
    await make_dispatch(store, data, wire).take_failed(trainer_name(world.number), failed)
    await add_worker(store, trainer_name(world.number), 1, "ready")
    await world.order()
