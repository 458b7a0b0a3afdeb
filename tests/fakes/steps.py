"""Steps without workers: claims the run's job, stages its result, commits it, and says that it is served. The daemon's own
services do the work; only the trainer and the engine are missing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

from artd.datadir.layout import DataDir
from artd.packing import child, service
from artd.serving.pusher import Pusher
from artd.store.blobs import Blobs
from artd.store.store import Store
from artd.training.dispatch import Dispatch
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import engine_name, trainer_name

from .rows import FakeWire, add_run, add_worker, data_dir, make_ingest, one, stage, submit

INSTANCE = "i" * 32


def room(needed: int) -> str:
    """A disk that lacks nothing."""
    return ""


def make_dispatch(store: Store, data: DataDir, wire: Any = None) -> Dispatch:
    return Dispatch(store, wire or FakeWire(trainer=1), data, INSTANCE, room)


def make_pusher(store: Store, data: DataDir, wire: Any = None, kills: list[tuple[str, str]] | None = None) -> Pusher:
    taken: list[tuple[str, str]] = [] if kills is None else kills
    wire = wire or FakeWire(trainer=1, engine=1)
    return Pusher(store, wire, data, lambda name, why: taken.append((name, why)))


async def claim(store: Store, data: DataDir, dispatch: Dispatch | None = None) -> w.Run:
    """The order that the ready trainer of the newest run would get now."""
    run = await one(store, "SELECT max(id) FROM run")
    await add_worker(store, trainer_name(run), 1, "ready")
    known = dispatch or make_dispatch(store, data, FakeWire(run, trainer=1))
    order = await store.write(lambda c: known._claim_due(c, run))
    assert order is not None, "no job is due"
    return order


def staged(order: w.Run, sha: str, **changes: Any) -> w.Staged:
    return w.Staged(**({"job": order.job, "fence": order.fence, "dir": order.dir, "manifest_sha": sha} | changes))


async def commit_next(store: Store, data: DataDir, **changes: Any) -> w.CheckpointRef:
    """Run the next job (init or train) through claim, staging and commit."""
    run = await one(store, "SELECT max(id) FROM run")
    wire = FakeWire(run, trainer=1)
    dispatch = make_dispatch(store, data, wire)
    order = await claim(store, data, dispatch)
    await dispatch.take_staged(trainer_name(run), staged(order, stage(Path(order.dir), order, **changes)))
    (answer,) = wire.of(w.Committed)
    return answer.checkpoint


async def serve(store: Store, spawn: int = 1, data: DataDir | None = None) -> None:
    """Push the newest run's newest checkpoint to its engine and have that say Live."""
    run = await one(store, "SELECT max(id) FROM run")
    engine = engine_name(run)
    await add_worker(store, engine, spawn, "ready", "/engine.sock")
    root = store.path.parent
    pusher = make_pusher(store, data or DataDir(root, root), FakeWire(run, engine=spawn))
    message = await store.write(lambda c: pusher._claim(c, engine))
    if message is None:  # the first look only prepared it
        message = await store.write(lambda c: pusher._claim(c, engine))
    assert message is not None, "no push is due"
    await pusher.live(w.Live(push=message.push, fence=message.fence, max_abs=1e-6, mean_abs=1e-7))


async def pack_here(request: child.PackRequest, stall_s: float = 0.0) -> child.PackResult | child.PackFailure:
    """Do what the packing child does, in this process."""
    return child.attempt(request)


async def pack(store: Store, data: DataDir, by: Callable[..., Awaitable[Any]] = pack_here) -> bool:
    """Pack what is due. by: who packs it; `service.run_child` is the real child. Whether there was something."""
    packer = service.Packer(store, Blobs(data.blobs), data, room)
    request, groups = await store.write(packer._due)
    with mock.patch.object(service, "run_child", by):
        return request is not None and await packer._pack(request, groups)


async def packed_run(store: Store, root: Path, **changes: Any) -> DataDir:
    """A run at step 0 whose train job, of a group of two, is queued; changes: of its spec."""
    data = data_dir(root)
    await add_run(store, **changes)
    await commit_next(store, data)
    ingest = make_ingest(store, data)
    for key, reward in (("a", 0.0), ("b", 1.0)):
        await submit(ingest, key=key, reward=reward)
    assert await pack(store, data)
    return data


async def train_next(store: Store, data: DataDir, run: str = "r") -> w.CheckpointRef:
    """Submit one group, pack it, and commit the step."""
    ingest = make_ingest(store, data)
    sql = "SELECT json_extract(spec, '$.group_size') AS size, lineage, step FROM run WHERE name = ?"
    (now,) = await store.read(sql, (run,))
    group = f"auto-{now['lineage']}-{now['step']}"
    for number in range(now["size"]):
        await submit(ingest, group=group, key=f"{group}-{number}", reward=float(number))
    assert await pack(store, data), "nothing was packed"
    return await commit_next(store, data)
