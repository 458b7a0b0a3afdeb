"""requests: exactly one reply to each request, errors by their code, and nothing a client sends ends the daemon."""

from __future__ import annotations

import asyncio
import json
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from artd.api.orders import NO_NOTE, ORDERS
from artd.api.requests import HANDLERS, NOTED, Requests
from artd.core.states import IllegalTransition
from artd.runs.lifecycle import Runs
from artd.store.writer import StoreFull
from artd_schema import PROTOCOL
from artd_schema.codec import Codec, WireError
from artd_schema.data.trajectory import ExchangeRef
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from tests.awake import SOON_S, until
from tests.fakes.rows import (
    EVERY_STEP,
    TRAINER,
    FakeWire,
    add_run,
    add_worker,
    body,
    count,
    data_dir,
    make_ingest,
    one,
    open_store,
    submit,
    turn,
)
from tests.fakes.steps import claim, commit_next, make_dispatch, pack

pytestmark = pytest.mark.asyncio


class Desk:
    """A Requests service whose replies are recorded."""

    def __init__(self, store, tmp_path):
        self.store, self.data = store, data_dir(tmp_path)
        self.wire = FakeWire(trainer=1)
        self.dispatch = make_dispatch(store, self.data, self.wire)
        self.ingest = make_ingest(store, self.data)
        self.replies: list[tuple[bytes, api.Reply]] = []
        self.stops: list[float] = []
        self.requests = Requests(
            store, self.ingest, Runs(store, lambda _: None, EVERY_STEP), self.dispatch, lambda *r: self.replies.append(r),
            self.stops.append, "inst", 1 << 20,
        )  # fmt: skip

    async def ask(self, op, bulk=(), number=5):
        self.replies.clear()
        self.requests.take(b"peer", api.Request(id=number, op=op), list(bulk))
        await until(lambda: self.replies)
        ((peer, reply),) = self.replies
        assert (peer, reply.id) == (b"peer", number)
        return reply.answer

    async def refused(self, code, text, op, bulk=(), field=None):
        answer = await self.ask(op, bulk)
        assert isinstance(answer, api.Error), answer
        assert answer.code == code and code in api.CODES and text in answer.message, answer
        if field is not None:
            assert answer.field == field
        return answer


async def quarantined(desk):
    """A run whose train job is quarantined; the job's id."""
    await add_run(desk.store)
    await commit_next(desk.store, desk.data)
    for key, reward in (("a", 0.0), ("b", 1.0)):
        await submit(desk.ingest, key=key, reward=reward)
    assert await pack(desk.store, desk.data)
    order = await claim(desk.store, desk.data, desk.dispatch)
    await desk.dispatch.take_failed(
        TRAINER, w.Failed(job=order.job, fence=order.fence, failure="permanent", error="NaN")
    )
    return order.job


async def test_hello(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        answer = await desk.ask(api.Hello(protocol=PROTOCOL, client="t"))
        assert isinstance(answer, api.Welcome) and (answer.instance, answer.max_message) == ("inst", 1 << 20)
        await desk.refused("invalid", "protocol 99", api.Hello(protocol=99, client="t"))


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
async def test_a_time_that_no_clock_can_wait_for_is_refused_before_it_is_waited_for(seconds):
    """A timer of NaN would never be due and never be later than another: the event loop would turn round it."""
    wire = Codec[api.Request](api.Request)
    for op, name in (
        (api.WaitStep(run="r", step=1, timeout_s=seconds), "timeout_s"),
        (api.Events(timeout_s=seconds), "timeout_s"),
        (api.Shutdown(drain_s=seconds), "drain_s"),
    ):
        with pytest.raises(WireError, match=rf"op\.{name}"):
            wire.decode(wire.encode(api.Request(id=1, op=op)))


async def test_errors_have_codes_and_fields(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        sub = api.Submit(run="r", group="g", reward=1.0)
        await desk.refused("not_found", "no run 'r'", sub, [body()], "run")
        await desk.refused("not_found", "no run", api.CreateRun(name="r"))
        for op in (api.Seal(run="r", group="g"), api.Flush(run="r"), api.Pause(run="r"), api.Resume(run="r"),
                   api.Finish(run="r"), api.WaitStep(run="r", step=1)):  # fmt: skip
            await desk.refused("not_found", "no run 'r'", op)
        for op in (api.CancelJob(job=9), api.RetryJob(job=9), api.DiscardJob(job=9)):
            await desk.refused("not_found", "no job 9", op, field="job")
        await add_run(store)
        await desk.refused("invalid", "list[Turn]", sub, [b"\xc1"], "turns")
        await desk.refused("invalid", "list[Turn]", sub, [b"\xc1"], "turns")  # the run is known now: the fast way
        await desk.refused(
            "not_found", "no response", msgspec.structs.replace(sub, refs=(ExchangeRef("x"),)), (), "refs[0]"
        )
        assert isinstance(await desk.ask(msgspec.structs.replace(sub, key="k"), [body()]), api.Submitted)
        await desk.refused(
            "conflict", "other content", msgspec.structs.replace(sub, key="k", reward=0.0), [body()], "key"
        )
        await desk.refused("conflict", "run 'r' is active", create_other(tmp_path), field="name")


def create_other(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 5}))
    (model / "m.safetensors").write_bytes(b"x")
    return api.CreateRun(name="other", spec=RunSpec(model=str(model)))


async def test_nothing_a_client_sends_ends_the_daemon(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        await add_run(store)
        await desk.ask(api.Submit(run="r", group="g", reward=1.0, key="first"), [body()])
        odd: list[dict[str, Any]] = [
            {"metadata": {"x": msgspec.msgpack.Ext(5, b"data")}},
            {"metadata": {"x": {(1, 2): 3}}},
            {"metadata": {"x": 2**64 - 1}},
            {"metadata": {"x": float("nan")}},
            {"metrics": {"x": float("inf")}},
            {"group": "\0"},
            {"key": "\0"},
        ]
        for number, changes in enumerate(odd):
            op = msgspec.structs.replace(api.Submit(run="r", group="h", reward=1.0, key=f"k{number}"), **changes)
            wire = msgspec.msgpack.decode(msgspec.msgpack.encode(api.Request(id=1, op=op)), type=api.Request)
            for bulk in ([body(turn())], [body(turn(raw=b"x" * 70_000))]):
                answer = await desk.ask(wire.op, bulk)
                assert isinstance(answer, api.Submitted | api.Error), changes
        op = api.Submit(run="r", group="h", reward=1.0, metadata=odd[0]["metadata"])
        await desk.refused("invalid", "cannot be written as JSON", op, [body()], "metadata")
        for op in (api.CancelJob(job=2**63), api.RetryJob(job=-1), api.DiscardJob(job=-1),
                   api.Rollback(run="r", step=-(2**63), lineage=2**62), api.List(what="runs", after=-(2**62), limit=-5),
                   api.List(what="jobs", states=("'; DROP TABLE job",)), api.Events(after=2**62, timeout_s=0.0),
                   api.Events(timeout_s=-1.0, limit=0), api.WaitStep(run="r", step=2**62, timeout_s=-1.0)):  # fmt: skip
            assert await desk.ask(op) is not None
        assert isinstance(await desk.ask(api.Hello(protocol=PROTOCOL, client="still here")), api.Welcome)


async def test_a_full_disk_is_busy_and_says_when_to_come_again(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        await add_run(store)
        await desk.ingest.facts("r")

        def full(*_):
            raise StoreFull("the disk is full: free space")

        monkeypatch.setattr("artd.rollouts.insert.insert_many", full)
        sub = api.Submit(run="r", group="g", reward=1.0)
        answer = await desk.refused("busy", "disk is full", sub, [body()])
        assert answer.retry_after_s > 0
        await desk.refused("busy", "disk is full", sub, [body(turn(raw=b"x" * 70_000))])


async def test_what_nobody_foresaw_is_failed_with_its_type(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)

        async def surprise(parts, op):
            raise ZeroDivisionError("oh")

        async def illegal(parts, op):
            raise IllegalTransition("job 1 is gone")

        monkeypatch.setitem(HANDLERS, api.List, surprise)
        await desk.refused("failed", "ZeroDivisionError: oh", api.List(what="runs"))
        monkeypatch.setitem(HANDLERS, api.List, illegal)
        await desk.refused("conflict", "job 1 is gone", api.List(what="runs"))


async def test_a_surprise_in_the_fast_way_is_answered_too(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)

        def surprise(*_):
            raise ZeroDivisionError("oh")

        monkeypatch.setattr(desk.ingest, "submit_now", surprise)
        await desk.refused("failed", "ZeroDivisionError: oh", api.Submit(run="r", group="g", reward=1.0), [body()])


async def test_draining_takes_no_more_work_but_can_be_looked_at(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        await add_run(store)
        await desk.ingest.facts("r")
        desk.requests.draining = True
        for op in (api.Submit(run="r", group="g", reward=1.0), api.Flush(run="r"), api.Resume(run="r")):
            await desk.refused("draining", "stopping", op, [body()])
        assert isinstance(await desk.ask(api.List(what="runs")), api.Rows)
        assert await count(store, "trajectory") == 0


async def test_shutdown_is_answered_and_passed_on(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        assert await desk.ask(api.Shutdown(drain_s=3.0)) == api.Done() and desk.stops == [3.0]


async def test_events_wait_for_the_first(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        asking = asyncio.ensure_future(desk.ask(api.Events(timeout_s=30.0)))
        await asyncio.sleep(0.05)
        assert not asking.done()
        await add_run(store)
        answer = await asyncio.wait_for(asking, SOON_S)
        assert [row["kind"] for row in answer.rows] == ["run.created"]


async def test_retry_puts_the_same_job_on_the_same_batch(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        job = await quarantined(desk)
        assert await one(store, "SELECT state FROM run") == "paused"
        assert await desk.ask(api.RetryJob(job=job)) == api.Done()
        (row,) = await store.read("SELECT * FROM job WHERE id = ?", (job,))
        assert (row["state"], row["attempts"], row["deaths"]) == ("queued", 0, 0)
        assert await one(store, "SELECT state FROM run") == "active" and await count(store, "batch") == 1
        await desk.refused("conflict", "only a quarantined job", api.RetryJob(job=job))


async def test_cancel_frees_the_trajectories_and_pauses_the_run(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        job = await quarantined(desk)
        assert await desk.ask(api.CancelJob(job=job)) == api.Done()
        assert await one(store, "SELECT state FROM job WHERE id = ?", job) == "cancelled"
        assert await one(store, "SELECT state FROM batch") == "abandoned"
        assert await count(store, "trajectory", "state = 'queued'") == 2
        assert await one(store, "SELECT state FROM run") == "paused"
        assert await desk.ask(api.CancelJob(job=job)) == api.Done()  # a client that repeats itself
        await desk.refused("conflict", "cancelled already", api.DiscardJob(job=job))
        await desk.refused("conflict", "only a quarantined", api.RetryJob(job=job))


async def test_cancel_of_a_running_job_tells_the_trainer(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        job = await quarantined(desk)
        await desk.ask(api.RetryJob(job=job))
        await add_worker(store, "trainer")
        await desk.dispatch._claim_next(1)
        assert await desk.ask(api.CancelJob(job=job)) == api.Done()
        assert desk.wire.of(w.Cancel) == [w.Cancel(job=job, fence=2)]
        assert await one(store, "SELECT cancel FROM job WHERE id = ?", job) == 1
        await desk.dispatch.take_failed(TRAINER, w.Failed(job=job, fence=2, failure="interrupted", error="cancelled"))
        assert await one(store, "SELECT state FROM job WHERE id = ?", job) == "cancelled"


async def test_the_first_checkpoint_cannot_be_cancelled(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        await add_run(store)
        for op in (api.CancelJob(job=1), api.DiscardJob(job=1)):
            await desk.refused("conflict", "finish the run instead", op)


async def test_a_request_that_cannot_be_decoded_is_answered_by_its_number(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        codec: Codec[api.Request] = Codec(api.Request)

        def send(header):
            frames = codec.encode(header)
            with pytest.raises(WireError) as caught:
                codec.decode(frames)
            desk.replies.clear()
            desk.requests.refuse(b"peer", frames, caught.value)
            return desk.replies

        spec = {"model": "/m", "lora": {"rank": 0}}
        ((peer, reply),) = send({"id": 7, "op": {"t": "createrun", "name": "r", "spec": spec}})
        assert (peer, reply.id, reply.answer.code, reply.answer.field) == (b"peer", 7, "invalid", "spec.lora.rank")
        assert ">= 1" in reply.answer.message
        ((_, reply),) = send({"id": 8, "op": {"t": "createrun", "name": "r", "spec": {"model": "/m", "lr": 1}}})
        assert "lr" in reply.answer.message and reply.answer.field == "spec"
        ((_, reply),) = send({"id": 9, "op": {"t": "teleport"}})
        assert "teleport" in reply.answer.message
        assert send({"op": {"t": "teleport"}}) == [] and send([1, 2]) == []


async def test_events_say_who_gave_an_order(tmp_path):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        await add_run(store)
        await desk.ask(api.Hello(protocol=PROTOCOL, client="python-77"))
        await desk.ask(api.Pause(run="r", reason="rewards are wrong"))
        await desk.refused("not_found", "no job 9", api.CancelJob(job=9))
        desk.requests._who = lambda peer: "key laptop"
        await desk.ask(api.Resume(run="r"))
        await until(lambda: not desk.requests._tasks)
        rows = await store.read("SELECT run, data FROM event WHERE kind = 'client.ordered' ORDER BY id")
        assert [(row["run"], json.loads(row["data"])) for row in rows] == [
            ("r", {"order": "pause", "client": "python-77"}), ("r", {"order": "resume", "client": "key laptop"}),
        ]  # fmt: skip


async def test_workers_are_revived_only_for_a_run_that_goes_on(tmp_path):
    async with open_store(tmp_path) as store:
        desk, revived = Desk(store, tmp_path), []
        desk.requests.parts.revive = lambda: revived.append(1)
        await desk.refused("not_found", "no run 'r'", api.Resume(run="r"))
        assert not revived
        await add_run(store)
        await desk.ask(api.Pause(run="r"))
        await desk.ask(api.Resume(run="r"))
        assert revived == [1]


@pytest.mark.parametrize("large", [False, True])
async def test_the_header_is_among_the_bytes_under_way(tmp_path, large):
    async with open_store(tmp_path) as store:
        desk = Desk(store, tmp_path)
        await add_run(store)
        await desk.ingest.facts("r")
        metadata = {"text": "x" * (100_000 if large else 10)}
        request = api.Request(id=5, op=api.Submit(run="r", group="g", reward=1.0, metadata=metadata))
        header, turns = len(Codec(api.Request).encode(request)[1]), body()
        desk.requests.take(b"peer", request, [turns], header)
        assert desk.requests._under_way.bytes == header + len(turns)
        assert len(desk.requests._tasks) == large, "large metadata is not encoded in the event loop"
        await until(lambda: desk.replies and not desk.requests._tasks)
        assert desk.requests._under_way.bytes == 0 and isinstance(desk.replies[0][1].answer, api.Submitted)


async def test_every_message_is_answered_by_one_function_and_every_order_has_its_type() -> None:
    assert {*HANDLERS, api.Hello, api.Submit} == set(get_args(api.Op))
    for kind, handler in HANDLERS.items():
        wanted = get_type_hints(handler)["op"]
        assert kind in (get_args(wanted) or (wanted,)), kind
    assert set(NO_NOTE) <= ORDERS.keys()
    assert {kind for kind in get_args(api.Op) if issubclass(kind, api.Order)} <= NOTED
