"""The client's connection: whatever happens to daemon, socket or caller, each request ends once and rightly."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time

import msgspec
import pytest
import zmq

import artd_client
from artd_client import Client, turn
from artd_client import connection as connection_module
from artd_client.link import Link
from artd_schema import PROTOCOL
from artd_schema.codec import Codec
from artd_schema.data.trajectory import Turn
from artd_schema.wire import client_api as api
from tests.awake import until
from tests.fake_daemon import RUN, ClientDaemon, usual

ONE = turn([1, 2], [3], [-0.5])


@pytest.mark.asyncio
async def test_a_request_is_greeted_sent_and_answered(daemon):
    async with Client(daemon.data) as art:
        assert (art.daemon.instance, art.daemon.max_message) == ("i", 1 << 20)
        run = await art.run("r")
        answer = await run.submit("g", 0.5, turns=[ONE], metrics={"a": 1.0}, metadata={"b": [1]}, split="eval")
    assert answer.trajectory == 1 and len(daemon.hellos) == 1
    _, _, op, bulk = daemon.seen[-1]
    assert (op.run, op.group, op.reward, op.split, op.metrics, op.metadata) == (
        "r", "g", 0.5, "eval", {"a": 1.0}, {"b": [1]},
    )  # fmt: skip
    assert msgspec.msgpack.decode(bulk[0], type=list[Turn]) == [ONE]


@pytest.mark.asyncio
@pytest.mark.parametrize("same_socket", [True, False])
async def test_a_restarted_daemon_gets_the_unanswered_again_with_the_same_key(tmp_path, same_socket):
    data = tmp_path / "data"
    deaf = ClientDaemon(data, lambda op: None if isinstance(op, api.Submit) else usual(op))
    with ClientDaemon(data) as second, deaf as first:
        second.die()
        first.announce()
        async with Client(data) as art:
            run = await art.run("r")
            waiting = [asyncio.create_task(run.submit(f"g{i}", 1.0, turns=[ONE])) for i in range(20)]
            await until(lambda: len(first.ops(api.Submit)) == 20)
            first.die()
            if same_socket:
                first.handle = usual
                first.start()
            else:
                second.start()
            answers = await asyncio.gather(*waiting)
            assert [answer.trajectory for answer in answers] == [1] * 20
    seen = [entry for fake in (first, second) for entry in fake.seen if isinstance(entry[2], api.Submit)]
    old, new = seen[:20], seen[20:]
    assert [(n, op.key, bulk) for _, n, op, bulk in old] == [(n, op.key, bulk) for _, n, op, bulk in new]
    assert all(op.key for _, _, op, _ in old) and len({op.key for _, _, op, _ in old}) == 20
    if same_socket:
        assert not {entry[0] for entry in old} & {entry[0] for entry in new}, "the identity was used again"


@pytest.mark.asyncio
async def test_requests_made_while_the_daemon_is_away_wait_for_it(daemon):
    async with Client(daemon.data) as art:
        run = await art.run("r")
        daemon.die()
        waiting = asyncio.create_task(run.submit("g", 1.0, turns=[ONE]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        daemon.start()
        assert (await waiting).trajectory == 1
    assert len(daemon.ops(api.Submit)) == 1


@pytest.mark.asyncio
async def test_an_order_is_repeated_under_its_request_id(daemon):
    """The daemon tells by it that the order is the same one; another call draws another id."""
    daemon.handle = lambda op: None
    async with Client(daemon.data) as art:
        calls = [asyncio.create_task(art.retry(2)) for _ in range(2)]
        await until(lambda: len(daemon.seen) == 2)
        daemon.die()
        daemon.handle = usual
        daemon.start()
        await asyncio.gather(*calls)
    ids = [op.request for op in daemon.ops(api.RetryJob)]
    assert sorted(ids[:2]) == sorted(ids[2:]) and len(set(ids)) == 2 and all(ids)


@pytest.mark.asyncio
async def test_a_daemon_that_goes_has_shut_down(daemon):
    daemon.handle = lambda op: None
    async with Client(daemon.data) as art:
        stop = asyncio.create_task(art.shutdown())
        await until(lambda: daemon.ops(api.Shutdown))
        daemon.die()
        await stop  # gone is what was asked for
        daemon.handle = usual
        daemon.start()
        assert await art.runs() == []
    assert [type(op).__name__ for _, _, op, _ in daemon.seen] == ["Shutdown", "List"]


@pytest.mark.asyncio
async def test_silence_is_noticed_by_hellos_and_ends_in_a_new_connection(daemon, monkeypatch):
    monkeypatch.setattr(connection_module, "QUIET_S", 0.15)
    monkeypatch.setattr(connection_module, "DEAD_S", 0.6)
    monkeypatch.setattr(connection_module, "TICK_S", 0.05)

    def handle(op):
        if isinstance(op, api.Submit) and not hung.is_set():
            hung.set()
            return None
        return usual(op)

    def greet(hello):
        """Hangs, with the socket open; only a new connection is answered."""
        return None if hung.is_set() and daemon.hellos[-1] == daemon.hellos[0] else greeting(hello)

    hung, greeting = threading.Event(), daemon.greeting
    daemon.greeting, daemon.handle = greet, handle
    async with Client(daemon.data) as art:
        run = await art.run("r")
        assert (await run.submit("g", 1.0, turns=[ONE])).trajectory == 1
    submits = [entry for entry in daemon.seen if isinstance(entry[2], api.Submit)]
    assert len(submits) == 2 and submits[0][0] != submits[1][0] and submits[0][1] == submits[1][1]
    assert len(daemon.hellos) >= 4 and len(set(daemon.hellos)) == 2


@pytest.mark.asyncio
async def test_a_daemon_that_answers_hellos_is_not_given_up(daemon, monkeypatch):
    monkeypatch.setattr(connection_module, "QUIET_S", 0.1)
    monkeypatch.setattr(connection_module, "DEAD_S", 2.0)  # of a busy machine's silence
    monkeypatch.setattr(connection_module, "TICK_S", 0.05)
    daemon.handle = lambda op: None
    async with Client(daemon.data) as art:
        waiting = asyncio.create_task(art.rows("jobs"))
        await asyncio.sleep(2.5)  # longer than one that answers nothing is given
        await until(lambda: len(daemon.hellos) >= 5)
        assert len(set(daemon.hellos)) == 1 and not waiting.done()
        waiting.cancel()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("code", "kind"),
    [("invalid", "Invalid"), ("not_found", "NotFound"), ("conflict", "Conflict"), ("busy", "Busy"),
     ("too_large", "TooLarge"), ("failed", "Failed"), ("of a later version", "Failed")],
)  # fmt: skip
async def test_errors_are_typed(daemon, code, kind):
    daemon.handle = lambda op: api.Error(code=code, message="what, where, next", field="f", retry_after_s=2.5)
    async with Client(daemon.data, timeout=2.0) as art:  # less than retry_after_s: there is nothing to wait for
        with pytest.raises(getattr(artd_client, kind), match="what, where, next") as caught:
            await art.run("r", model="/m")
    assert type(caught.value).__name__ == kind and caught.value.field == "f"
    assert getattr(caught.value, "retry_after", 2.5) == 2.5


@pytest.mark.asyncio
async def test_a_daemon_that_dies_is_no_warning_for_each_call(daemon, caplog):
    """What is asked between the end of a connection and the next one is sent by that one."""
    async with Client(daemon.data, timeout=30.0) as art:
        run = await art.run("r")
        link = art._connection._link
        link.close()
        calls = [asyncio.create_task(run.submit("g", 1.0, turns=[ONE])) for _ in range(5)]
        await asyncio.sleep(0.05)
        link._on_gone()
        assert [answer.trajectory for answer in await asyncio.gather(*calls)] == [1] * 5
    assert "sending failed" not in caplog.text


@pytest.mark.asyncio
async def test_a_busy_daemon_is_asked_again_within_the_time_out(daemon):
    """The same request under the same number, when the daemon said; its caller hears of nothing."""
    busy = [api.Error(code="busy", message="full", retry_after_s=0.3)] * 2
    daemon.handle = lambda op: busy.pop() if busy and isinstance(op, api.Submit) else usual(op)
    async with Client(daemon.data, timeout=30.0) as art:
        run = await art.run("r")
        began = time.monotonic()
        assert (await run.submit("g", 1.0, turns=[ONE])).trajectory == 1
    assert time.monotonic() - began >= 0.6
    submits = [number for _, number, op, _ in daemon.seen if isinstance(op, api.Submit)]
    assert len(submits) == 3 and len(set(submits)) == 1


@pytest.mark.asyncio
async def test_large_messages_wait_for_the_window_and_small_ones_pass_them(daemon):
    greeting = daemon.greeting
    daemon.greeting = lambda hello: msgspec.structs.replace(greeting(hello), window=250_000)
    daemon.handle = lambda op: usual(op) if isinstance(op, api.CreateRun | api.Seal) else None
    large = msgspec.structs.replace(ONE, raw=b"x" * 100_000)
    async with Client(daemon.data) as art:
        run = await art.run("r")
        calls = [asyncio.create_task(run.submit("g", 1.0, turns=[large])) for _ in range(6)]
        await until(lambda: len(daemon.ops(api.Submit)) == 2)
        await run.seal("g")
        assert len(daemon.ops(api.Submit)) == 2
        calls[0].cancel()  # its place is free, whether or not the daemon is at it still
        await until(lambda: len(daemon.ops(api.Submit)) == 3)
        daemon.handle = usual
        for peer, number, op, _ in list(daemon.seen):
            if isinstance(op, api.Submit):
                daemon.send_late(peer, number, usual(op))
        await asyncio.gather(*calls[1:])
    assert len(daemon.ops(api.Submit)) == 6


@pytest.mark.asyncio
async def test_a_refused_large_message_waits_for_the_window_once_over_a_restart(daemon, monkeypatch):
    greeting, windows, asked = daemon.greeting, [350_000, 250_000], []
    daemon.greeting = lambda hello: msgspec.structs.replace(greeting(hello), window=windows[0])
    busy = api.Error(code="busy", message="full", retry_after_s=0.5)
    daemon.handle = lambda op: usual(op) if isinstance(op, api.CreateRun) else busy if op == daemon_last(3) else None

    def daemon_last(number):
        submits = daemon.ops(api.Submit)
        return submits[-1] if len(submits) == number else None

    large = msgspec.structs.replace(ONE, raw=b"x" * 100_000)
    async with Client(daemon.data, timeout=30.0) as art:
        connection, run = art._connection, await art.run("r")
        again = connection._again
        monkeypatch.setattr(connection, "_again", lambda number: (again(number), asked.append(number)))
        calls = [asyncio.create_task(run.submit("g", 1.0, turns=[large])) for _ in range(3)]
        await until(
            lambda: len(daemon.ops(api.Submit)) == 3 and any(call.refused for call in connection._calls.values())
        )
        daemon.die()
        del windows[0], daemon.seen[:]
        daemon.start()
        await until(lambda: len(daemon.ops(api.Submit)) == 2 and asked)
        for number in range(3):  # one after the other, each when the daemon has it
            await until(lambda number=number: len(daemon.ops(api.Submit)) > number)
            peer, request, op, _ = daemon.seen[number]
            daemon.send_late(peer, request, usual(op))
            await calls[number]
        assert connection._under_way == 0 and not connection._held
        await asyncio.sleep(0.05)
    assert len(daemon.ops(api.Submit)) == 3


def test_every_code_has_a_class_of_its_own():
    kinds = {type(connection_module.from_answer(api.Error(code=code, message=""))) for code in api.CODES}
    assert len(kinds) == len(api.CODES)


@pytest.mark.asyncio
async def test_a_message_over_the_limit_is_refused_before_it_is_sent(tmp_path):
    with ClientDaemon(tmp_path / "data", max_message=1000) as daemon:
        async with Client(daemon.data) as art:
            run = await art.run("r")
            with pytest.raises(artd_client.TooLarge, match=r"1000") as caught:
                await run.submit("g", 1.0, turns=[turn(range(300), [1], [-1.0])])
            assert caught.value.limit == 1000 and 1200 < caught.value.size < 1600
            assert str(caught.value.size) in str(caught.value)
            await run.submit("g", 1.0, turns=[ONE])
        assert len(daemon.ops(api.Submit)) == 1


@pytest.mark.asyncio
async def test_a_lower_limit_after_a_restart_ends_the_waiting_request(tmp_path):
    with ClientDaemon(tmp_path / "data", lambda op: None if isinstance(op, api.Submit) else usual(op)) as daemon:
        async with Client(daemon.data) as art:
            run = await art.run("r")
            waiting = asyncio.create_task(run.submit("g", 1.0, turns=[turn(range(300), [1], [-1.0])]))
            await until(lambda: daemon.ops(api.Submit))
            daemon.die()
            daemon.greeting = lambda hello: api.Welcome(protocol=PROTOCOL, instance="i", version="0", max_message=1000)
            daemon.start()
            with pytest.raises(artd_client.TooLarge):
                await waiting
        assert len(daemon.ops(api.Submit)) == 1


@pytest.mark.asyncio
async def test_second_and_late_answers_are_ignored(daemon):
    daemon.handle = lambda op: [api.Rows(rows=[{"id": op.limit}]), api.Rows(rows=[{"id": -1}])]
    async with Client(daemon.data) as art:
        rows = [await art.rows("jobs", limit=n) for n in range(1, 20)]
        assert rows == [[{"id": n}] for n in range(1, 20)]
        for peer, number, _, _ in list(daemon.seen):
            daemon.send_late(peer, number, api.Done())
        daemon.send_late(daemon.seen[0][0], 10**9, api.Done())
        assert await art.rows("jobs", limit=77) == [{"id": 77}]


@pytest.mark.asyncio
async def test_two_answers_that_arrive_together_are_one(daemon):
    daemon.handle = lambda op: None
    async with Client(daemon.data) as art:
        asking = asyncio.create_task(art.runs())
        await until(lambda: daemon.seen)
        frames = Codec(api.Reply).encode(api.Reply(id=daemon.seen[0][1], answer=api.Rows(rows=[{"id": 1}])))
        refusal = api.Reply(id=daemon.seen[0][1], answer=api.Error(code="draining", message="stopping"))
        for reply in (frames, frames, Codec(api.Reply).encode(refusal)):
            art._connection._take(reply)
        assert await asking == [{"id": 1}]


@pytest.mark.asyncio
async def test_cancelled_requests_leave_nothing_and_lose_nothing(daemon):
    def handle(op):
        return api.Rows(rows=[{"id": op.limit}])

    daemon.handle = handle
    rng = random.Random(3)
    async with Client(daemon.data) as art:

        async def ask(number):
            assert await art.rows("jobs", limit=number) == [{"id": number}]
            return number

        tasks = [asyncio.create_task(ask(n)) for n in range(1, 400)]
        doomed = set(rng.sample(range(len(tasks)), 150))
        for index in sorted(doomed):
            if rng.random() < 0.5:
                await asyncio.sleep(0)
            tasks[index].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for index, result in enumerate(results):
            assert result == index + 1 or (index in doomed and isinstance(result, asyncio.CancelledError))
        assert not art._connection._calls
        assert await ask(5) == 5


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "greeting",
    [
        lambda hello: api.Error(code="invalid", message=f"client speaks protocol {hello.protocol}, this daemon 9"),
        lambda hello: api.Welcome(protocol=9, instance="i", version="0", max_message=1),
        lambda hello: api.Done(),
        lambda hello: b"A1",
    ],
)
async def test_a_daemon_of_another_protocol_is_refused(daemon, greeting):
    daemon.greeting = greeting
    with pytest.raises(artd_client.WrongProtocol, match="same artd"):
        async with Client(daemon.data):
            pass
    assert len(daemon.hellos) == 1


@pytest.mark.asyncio
async def test_an_upgrade_under_a_running_client_ends_its_requests(daemon):
    async with Client(daemon.data) as art:
        daemon.die()
        waiting = asyncio.create_task(art.runs())
        await asyncio.sleep(0.05)
        daemon.greeting = lambda hello: api.Error(code="invalid", message="protocol 9")
        daemon.start()
        with pytest.raises(artd_client.WrongProtocol, match="protocol 9"):
            await waiting
        with pytest.raises(artd_client.WrongProtocol):
            await art.runs()


@pytest.mark.asyncio
async def test_no_daemon_names_the_command(tmp_path, monkeypatch):
    data = tmp_path / "da ta"
    with pytest.raises(artd_client.DaemonNotRunning, match="artd start --detach --data-dir") as caught:
        await Client(data).__aenter__()
    assert caught.value.command == f"artd start --detach --data-dir '{data}'"
    monkeypatch.setenv("ARTD_DATA_DIR", str(data))
    with pytest.raises(artd_client.DaemonNotRunning) as caught:
        await Client().__aenter__()
    assert caught.value.command == "artd start --detach"
    with ClientDaemon(data) as dead:
        dead.announce(ticks=1)  # the pid lives, but is not that process
        with pytest.raises(artd_client.DaemonNotRunning, match="no daemon runs on"):
            await Client(data).__aenter__()


@pytest.mark.asyncio
async def test_a_starting_daemon_is_waited_for(daemon):
    daemon.announce(state="starting", socket="")
    opening = asyncio.create_task(Client(daemon.data).__aenter__())
    await asyncio.sleep(0.2)
    assert not opening.done()
    daemon.announce()
    art = await opening
    await art.close()
    daemon.announce(state="starting", socket="")
    with pytest.raises(artd_client.DaemonNotRunning, match="starting"):
        await Client(daemon.data, timeout=0.3).__aenter__()


@pytest.mark.asyncio
async def test_time_outs_say_whether_there_was_a_daemon(daemon, monkeypatch):
    monkeypatch.setattr(connection_module, "TICK_S", 0.05)
    daemon.handle = lambda op: None
    async with Client(daemon.data, timeout=0.3) as art:
        with pytest.raises(artd_client.TimedOut, match="did not answer in time"):
            await art.runs()
        daemon.die()
        with pytest.raises(artd_client.DaemonNotRunning, match="no daemon answers on"):
            await art.runs()
        (daemon.data / "daemon.json").unlink()
        await asyncio.sleep(0.2)
        with pytest.raises(artd_client.DaemonNotRunning, match="no daemon runs on"):
            await art.runs()


@pytest.mark.asyncio
async def test_a_time_out_is_a_time(daemon, monkeypatch):
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(artd_client.Invalid, match="as long as it takes"):
            Client(daemon.data, timeout=seconds)
    step = api.StepInfo(run="r", step=1, checkpoint="c", metrics={}, seconds={})
    async with Client(daemon.data, timeout=float("inf")) as art:
        run = await art.run("r")
        daemon.handle = lambda op: step
        assert await run.wait(1) == await run.wait(1, timeout=float("inf")) == step
        daemon.handle = lambda op: api.Pending(step=0, phase="collect")
        for seconds in (-1.0, 0.0, float("nan")):
            with pytest.raises(artd_client.TimedOut, match="phase collect"):
                await asyncio.wait_for(run.wait(1, timeout=seconds), 5)


@pytest.mark.asyncio
async def test_a_wait_tells_once_of_a_broken_worker_and_goes_on(daemon, monkeypatch, caplog):
    answers = [
        api.Pending(step=0, phase="train", problem=p)
        for p in ("", "engine is broken: no GPU", "engine is broken: no GPU")
    ]
    answers += [api.StepInfo(run="r", step=1, checkpoint="c", metrics={}, seconds={})]
    async with Client(daemon.data) as art:
        run = await art.run("r")
        daemon.handle = lambda op: answers.pop(0)
        assert (await run.wait(1)).step == 1
        (said,) = [one.message for one in caplog.records if one.name == "artd_client.run"]
        assert said == "step 1 of run 'r' waits: engine is broken: no GPU; see `artctl status`"
        daemon.handle = lambda op: api.Pending(step=0, phase="train", problem="engine is broken: no GPU")
        with pytest.raises(artd_client.TimedOut, match="phase train; engine is broken: no GPU; see"):
            await run.wait(1, timeout=0)


@pytest.mark.asyncio
async def test_closing_ends_what_waits(daemon):
    daemon.handle = lambda op: None
    art = Client(daemon.data)
    with pytest.raises(artd_client.Closed):
        await art.runs()
    async with art:
        with pytest.raises(artd_client.Closed, match="open already"):
            await art.__aenter__()
        waiting = asyncio.create_task(art.runs())
        await until(lambda: daemon.seen)
    with pytest.raises(artd_client.Closed):
        await waiting
    with pytest.raises(artd_client.Closed):
        await art.runs()
    await art.close()
    daemon.handle = usual
    async with art:
        assert await art.runs() == []


@pytest.mark.asyncio
async def test_an_answer_of_the_wrong_kind_is_an_error(daemon):
    daemon.handle = lambda op: RUN
    async with Client(daemon.data) as art:
        with pytest.raises(artd_client.WrongProtocol, match="List was answered by RunInfo"):
            await art.runs()


@pytest.mark.asyncio
async def test_a_message_that_cannot_be_read_ends_the_connection_with_an_error(daemon):
    daemon.handle = lambda op: b"A1"
    async with Client(daemon.data) as art:
        with pytest.raises(artd_client.WrongProtocol, match="cannot read"):
            await art.runs()


@pytest.mark.asyncio
async def test_what_arrives_while_something_is_sent_is_read_at_once(tmp_path):
    """A socket's descriptor tells of changes only, and a send eats the news of what has arrived."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        endpoint = f"ipc://{folder}/s"
        router = context.socket(zmq.ROUTER)
        router.bind(endpoint)
        came: list[list[bytes]] = []
        link = Link(context, endpoint, came.append, lambda: None)
        link.send([b"first"])
        peer, _ = router.recv_multipart()
        await asyncio.sleep(0.05)
        router.send_multipart([peer, b"answer"])
        time.sleep(0.2)  # the answer arrives while the loop is elsewhere
        link.send([b"second"])
        await until(lambda: came)
        assert came == [[b"answer"]]
        link.close()
        router.close(0)
