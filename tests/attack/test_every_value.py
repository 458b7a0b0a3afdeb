"""Whatever a client may send: what is accepted boots, and packs or is discarded by name; what is not is refused by a typed error.

The values come from the annotations of the Structs themselves (tests/fakes/anything.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artd.api.job_orders import end_job
from artd.api.requests import Requests
from artd.errors import RequestError
from artd.packing import service
from artd.packing.service import Packer
from artd.recover import recover
from artd.retention.checkpoints import CheckpointRetention
from artd.rollouts.insert import seal_group
from artd.runs.lifecycle import Runs, _check_spec
from artd.serving.routing_table import load_table
from artd.store.blobs import Blobs
from artd.store.views import active_run_ids
from artd_schema.codec import Codec, WireError
from artd_schema.data.trajectory import Credit, Given, Sampling, Turn
from artd_schema.run.losses import EXAMPLES
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api
from artd_schema.wire.worker_names import engine_name
from tests.awake import until
from tests.fakes.anything import anything, mutations
from tests.fakes.rows import (
    EVERY_STEP,
    VOCAB,
    FakeClock,
    FakeWire,
    add_run,
    data_dir,
    make_ingest,
    open_store,
)
from tests.fakes.rows import spec as a_spec
from tests.fakes.steps import commit_next, make_dispatch, make_pusher, pack_here, room

WIRE = Codec[api.Request](api.Request)
ALWAYS = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8) | st.just([7] * 70)
ODD_IDS = st.lists(st.integers(-1, VOCAB), max_size=3)
LOGPROB = st.floats(-30, 0, width=32)
ODD_LOGPROB = st.sampled_from((-3.4e38, 1.0, float("nan"), float("-inf")))


class World:
    """A daemon's services on one store, in an event loop of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runner = asyncio.Runner()
        self.serial = 0

    def __enter__(self) -> World:
        self._stack = contextlib.AsyncExitStack()
        self.runner.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self._stack.aclose())
        self.runner.close()

    async def _open(self) -> None:
        self.store = await self._stack.enter_async_context(open_store(self.root, FakeClock()))
        self.data = data_dir(self.root)
        self.ingest = make_ingest(self.store, self.data, max_inline=512)
        self.runs = Runs(self.store, lambda: None, EVERY_STEP)
        self.packer = Packer(self.store, Blobs(self.data.blobs), self.data, room)

    async def boot(self) -> None:
        """What every boot does with the rows, and what the services ask first."""
        await recover(self.store, self.data)
        dispatch, pusher = make_dispatch(self.store, self.data), make_pusher(self.store, self.data)
        for run in await self.store.write(active_run_ids):
            await self.store.write(lambda c, run=run: dispatch._claim_due(c, run))
            await self.store.write(lambda c, run=run: pusher._claim(c, engine_name(run)))
        await self.store.write(load_table)
        await self.store.write(CheckpointRetention(self.store, self.data)._retire)
        await self.store.write(self.packer._due)


@pytest.fixture(name="world")
def a_world(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "run_child", pack_here)
    with World(tmp_path) as world:
        yield world


def received(op: api.Op) -> Any:
    """The operation as the daemon reads it, None where it refuses to."""
    try:
        return WIRE.decode(WIRE.encode(api.Request(id=1, op=op)))[0].op
    except (WireError, TypeError):  # the second: no client can send it
        return None


# ---- specs --------------------------------------------------------------------------------------------------------------


@st.composite
def specs(draw: Any) -> RunSpec:
    """A spec that is right but for some of its fields, or anything at all."""
    if draw(st.booleans()):
        return draw(anything(RunSpec))
    changes = draw(mutations(RunSpec))
    for name in ("lora", "optimizer", "loss", "engine", "trainer"):
        if draw(st.integers(0, 3)) == 0:
            good = getattr(a_spec(), name)
            changes[name] = msgspec.structs.replace(good, **draw(mutations(type(good))))
    return msgspec.structs.replace(a_spec(), **changes)


def test_a_spec_that_is_accepted_boots_and_packs(world):
    taken: list[RunSpec] = []

    @settings(ALWAYS, max_examples=100)
    @given(specs())
    def check(spec: RunSpec) -> None:
        op = received(api.CreateRun(name="r", spec=spec))
        if op is not None:
            taken.extend(world.runner.run(create(op)))

    def past_the_first_checkpoint(c: sqlite3.Connection) -> None:
        c.execute("UPDATE job SET state = 'cancelled', ended = 0, worker = NULL WHERE ended IS NULL")
        c.execute("UPDATE run SET step = 0 WHERE state = 'active'")

    async def create(op: api.CreateRun) -> list[RunSpec]:
        assert op.spec is not None
        world.serial += 1
        name = f"r{world.serial}"
        try:
            _check_spec(op.spec)
        except RequestError:
            return []
        changes = msgspec.structs.asdict(op.spec)
        del changes["model"]
        if op.spec.row_tokens > 4096:
            changes |= {"row_length": 4096, "drop_longer": True}  # longer ones pack as well, in gigabytes
        await add_run(world.store, name, **changes)
        try:
            await train_one(name, op.spec)
        finally:
            await world.runs.set_state(name, "finished")
        return [op.spec]

    async def train_one(name: str, spec: RunSpec) -> None:
        for group in range(2):
            turn = Turn(prompt_ids=bytes(4), token_ids=bytes(4), logprobs=bytes(4), raw=bytes([group]))
            if spec.loss.kind == EXAMPLES:
                turn = msgspec.structs.replace(turn, given=Given(example=True))
            given = spec.advantages.baseline == "given" if spec.advantages else False
            for number in range(2):
                submit = api.Submit(run=name, group=f"{group}", reward=float(number), key=f"{group}-{number}")
                if given:
                    submit = msgspec.structs.replace(submit, credits=(Credit(advantages=(1.0 - number,)),))
                await world.ingest.submit(submit, [msgspec.msgpack.encode([turn])])
        await world.boot()
        await world.ingest.flush(api.Flush(run=name))
        await world.store.write(past_the_first_checkpoint)
        request, groups = await world.store.write(world.packer._due)
        assert request is not None and await world.packer._pack(request, groups)
        await world.boot()
        assert (await world.runs.info(name, False)).spec is not None

    check()
    assert len(taken) > 30, "the strategy makes hardly anything that is accepted"


# ---- trajectories -------------------------------------------------------------------------------------------------------


@st.composite
def turns(draw: Any) -> Turn:
    odd = draw(st.integers(0, 9))
    tokens = draw(ODD_IDS if odd == 9 else IDS)
    logprob = ODD_LOGPROB if odd == 8 else LOGPROB
    logprobs = draw(st.lists(logprob, min_size=len(tokens), max_size=len(tokens)))
    good = Turn(
        prompt_ids=array("i", draw(ODD_IDS if odd == 7 else IDS)).tobytes(), token_ids=array("i", tokens).tobytes(),
        logprobs=array("f", logprobs).tobytes(),
    )  # fmt: skip
    changes = draw(mutations(Turn)) if draw(st.integers(0, 3)) == 3 else {}
    if draw(st.integers(0, 3)) == 3:
        changes["sampling"] = msgspec.structs.replace(Sampling(), **draw(mutations(Sampling)))
    return msgspec.structs.replace(good, **changes)


@st.composite
def groups(draw: Any) -> list[tuple[dict[str, Any], list[Turn]]]:
    """Two submits: fields of the operation, and turns."""
    made = []
    for number in range(2):
        changes = {"reward": draw(st.floats(-1.1e30, 1.1e30)) if draw(st.booleans()) else float(number)}
        if draw(st.integers(0, 3)) == 3:
            changes |= draw(mutations(api.Submit))
        made.append((changes, draw(st.lists(turns(), min_size=1, max_size=2))))
    return made


def test_a_trajectory_that_is_accepted_is_packed_or_discarded_by_name(world):
    ends: list[str] = []

    async def begin() -> None:
        await add_run(world.store)
        await commit_next(world.store, world.data)

    world.runner.run(begin())

    @settings(ALWAYS, max_examples=120)
    @given(groups())
    def check(group: list[tuple[dict[str, Any], list[Turn]]]) -> None:
        world.serial += 1
        ends.append(world.runner.run(submit_all(group, f"g{world.serial}")))

    async def submit_all(group: list[tuple[dict[str, Any], list[Turn]]], name: str) -> str:
        stored = 0
        for number, (changes, made) in enumerate(group):
            fields = {"reward": 0.0} | changes | {"run": "r", "group": name, "key": f"{name}-{number}", "refs": ()}
            op = received(api.Submit(**fields))
            if op is None:
                continue
            with contextlib.suppress(RequestError):
                await world.ingest.submit(op, [msgspec.msgpack.encode(made)])
                stored += 1
        await world.boot()
        found = await world.store.read("SELECT id, state, split FROM trajectory_group WHERE name = ?", (name,))
        if not found:
            assert stored == 0
            return "refused"
        if found[0]["state"] == "open":
            await world.store.write(lambda c: seal_group(c, 0, found[0]["id"]))
        request, due = await world.store.write(world.packer._due)
        if request is not None:
            assert await world.packer._pack(request, due), await world.store.read("SELECT * FROM meta")
        (row,) = await world.store.read("SELECT state, split, reason FROM trajectory_group WHERE name = ?", (name,))
        if row["split"] == "eval":
            return "eval"
        assert row["state"] in ("packed", "discarded") and (row["state"] == "packed" or row["reason"])
        assert not await world.store.read("SELECT 1 FROM meta WHERE key = 'packer.blamed' AND value <> '[]'")
        for job in await world.store.read("SELECT id FROM job WHERE kind = 'train' AND state = 'queued'"):
            await world.store.write(lambda c, number=job["id"]: end_job(c, 0, number, True))
        return str(row["state"])

    check()
    assert {"packed", "discarded", "refused"} <= set(ends), set(ends)
    assert ends.count("packed") > 30, "the strategy makes hardly anything that is packed"


# ---- every operation ----------------------------------------------------------------------------------------------------


def test_every_operation_is_answered_by_its_result_or_a_typed_error_and_the_next_boot_lives(world):
    answers: list[api.Answer] = []
    replies: list[api.Reply] = []

    async def begin() -> Requests:
        await add_run(world.store)
        wire = FakeWire(trainer=1)
        return Requests(
            world.store, world.ingest, world.runs, make_dispatch(world.store, world.data, wire), lambda _, reply: replies.append(reply),
            lambda _: None, "inst", 1 << 20,
        )  # fmt: skip

    requests = world.runner.run(begin())
    known = st.sampled_from(("r", "", "no"))

    @settings(ALWAYS, max_examples=150)
    @given(anything(api.Op), known, st.binary(max_size=9) | st.just(b""))
    def check(op: Any, run: str, body: bytes) -> None:
        names = type(op).__struct_fields__
        op = msgspec.structs.replace(
            op, **({"run": run} if "run" in names else {}), **({"timeout_s": 0.0} if "timeout_s" in names else {})
        )
        got = received(op)
        if got is not None and not isinstance(got, api.Collect):  # the collector is no part of this world
            answers.append(world.runner.run(ask(got, body)))

    async def ask(op: api.Op, body: bytes) -> api.Answer:
        replies.clear()
        requests.take(b"peer", api.Request(id=5, op=op), [body] if isinstance(op, api.Submit) else [])
        await until(lambda: replies)
        (reply,) = replies
        if isinstance(reply.answer, api.Error):
            assert "see the daemon's log" not in reply.answer.message, (op, reply.answer)
        await world.boot()
        if isinstance(op, api.Finish) and isinstance(reply.answer, api.Done):
            await world.store.write(lambda c: c.execute("UPDATE run SET state = 'active'"))
        return reply.answer

    check()
    kinds = {type(answer) for answer in answers}
    assert {api.Error, api.Done, api.Rows} <= kinds, kinds
