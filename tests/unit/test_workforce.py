"""workforce: which processes the rows ask for, and what is kept of their ends."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from artd.config import Gpus, Interpreter, Runtimes, Settings
from artd.crew import load_crew
from artd.errors import RequestError
from artd.net.router import WorkerWire
from artd.runs.lifecycle import set_run_state
from artd.runtimes import registry
from artd.supervise.packages import FAMILY, LOSS, Offers, Packages
from artd.supervise.postmortem import Status
from artd.supervise.spawn import Undead
from artd.supervise.spec import Info
from artd.training.run_code import tell_changes
from artd.workforce import Boot, Workforce
from artd_schema import PROTOCOL
from artd_schema.packages import PackageCode, RunCode
from artd_schema.run.engines import ENGINES
from artd_schema.run.spec import LossSpec
from artd_schema.wire import worker as w
from tests.fakes.rows import BASE, ENGINE, FIRST, TRAINER, add_run, count, data_dir, one, open_store, settle

pytestmark = pytest.mark.asyncio
OWN = Interpreter(python="/bin/true")


class FakeSupervisor:
    """Records what is asked of it; `stopping` holds a stop until it is set."""

    def __init__(self):
        self.calls: list[str] = []
        self.workers: list[str] = []
        self.stopped = asyncio.Event()
        self.stopped.set()
        self.states: dict[str, str] = {}
        self.undead: set[str] = set()

    def names(self):
        return tuple(self.workers)

    def add(self, spec, start=True):
        self.workers.append(spec.name)

    def drop(self, name):
        self.workers.remove(name)

    def state(self, name):
        return "broken" if name in self.undead else self.states.get(name, "stopped")

    def start(self, name):
        self.calls.append(f"start {name}")

    async def stop(self, name, grace_s, reason):
        self.calls.append(f"stop {name}")
        await self.stopped.wait()
        if name in self.undead:
            raise Undead(name, 7, "D")


def make(store, tmp_path):
    deaths: list = []

    async def on_death(*args):
        deaths.append(args)

    boot = Boot(instance="i", number=1, code=Path("/code"), endpoint="ipc:///x", token="t")
    settings = Settings(runtimes=Runtimes(trainer=OWN, engine=OWN))
    made = Workforce(
        store=store, wire=WorkerWire(mock.Mock()), data=data_dir(tmp_path), settings=settings, boot=boot,
        announce=lambda url: None, on_death=on_death,
    )  # fmt: skip
    made.supervisor = FakeSupervisor()
    return made, made.supervisor, deaths


async def calls(supervisor, least: int):
    """What was asked since the last look, which is `least` calls or more, however slow the machine is."""
    async with asyncio.timeout(20):
        while len(supervisor.calls) < least:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # whatever is one too many
    found, supervisor.calls = supervisor.calls, []
    return found


async def test_workers_live_as_long_as_their_run(tmp_path):
    async with open_store(tmp_path) as store:
        made, supervisor, _ = make(store, tmp_path)
        task = asyncio.ensure_future(made._follow_rows())
        await add_run(store)
        assert set(await calls(supervisor, 2)) == {f"start {TRAINER}", f"start {ENGINE}"}
        await store.write(lambda c: set_run_state(c, 0, 1, "paused", ""))
        assert f"stop {ENGINE}" not in await calls(supervisor, 0)
        await store.write(lambda c: set_run_state(c, 0, 1, "finished", ""))
        assert sorted(await calls(supervisor, 2)) == [f"stop {ENGINE}", f"stop {TRAINER}"]
        assert supervisor.workers == []
        await settle(task)


async def test_the_next_run_never_gets_the_last_ones_processes(tmp_path):
    async with open_store(tmp_path) as store:
        made, supervisor, _ = make(store, tmp_path)
        await add_run(store)
        task = asyncio.ensure_future(made._follow_rows())
        await calls(supervisor, 2)
        await asyncio.gather(store.write(lambda c: set_run_state(c, 0, 1, "finished", "")), add_run(store, "next"))
        found = await calls(supervisor, 4)
        assert found.index(f"stop {TRAINER}") < found.index("start trainer-2")
        assert found.index(f"stop {ENGINE}") < found.index("start engine-2-0")
        await settle(task)


async def test_an_engine_that_does_not_die_at_the_end_of_its_run_does_not_end_the_daemon(tmp_path):
    async with open_store(tmp_path) as store:
        made, supervisor, _ = make(store, tmp_path)
        await add_run(store)
        task = asyncio.ensure_future(made._follow_rows())
        await calls(supervisor, 2)
        supervisor.undead = {TRAINER}
        await store.write(lambda c: set_run_state(c, 0, 1, "finished", ""))
        assert sorted(await calls(supervisor, 2)) == [f"stop {ENGINE}", f"stop {TRAINER}"] and not task.done()
        await add_run(store, "next")
        assert set(await calls(supervisor, 1)) == {"start engine-2-0"}, "the trainer that does not die may hold its GPU"
        assert f"{TRAINER}, of a finished run, has not ended" in await one(
            store, "SELECT error FROM process WHERE name = 'trainer-2'"
        )
        supervisor.undead = set()
        await store.write(lambda c: c.execute("UPDATE run SET reason = 'x'").rowcount)
        assert "start trainer-2" in await calls(supervisor, 1)
        await settle(task)


async def test_a_runtime_is_not_looked_for_while_its_worker_lives(tmp_path, monkeypatch):
    """Half a millisecond of the event loop each time, and rows change fifty times a second."""
    async with open_store(tmp_path) as store:
        made, supervisor, _ = make(store, tmp_path)
        await add_run(store)
        task = asyncio.ensure_future(made._follow_rows())
        await calls(supervisor, 2)
        supervisor.states = {TRAINER: "ready", ENGINE: "starting"}
        monkeypatch.setattr(made, "_interpreter", mock.Mock(side_effect=AssertionError("looked for")))
        await store.write(lambda c: set_run_state(c, 0, 1, "paused", ""))
        assert await calls(supervisor, 0) == [] and not task.done()
        await settle(task)


async def test_a_process_that_dies_while_its_hello_is_answered_is_not_connected(tmp_path):
    """Else it would count as alive until the next one says Hello: a gateway is asked for a hold that it never gives."""
    async with open_store(tmp_path) as store:
        workforce, supervisor, _ = make(store, tmp_path)
        supervisor.names = lambda: ("gateway",)
        supervisor.info = lambda name: Info(kind="gateway", spawn=3, restarts=0)
        hello = w.Hello(kind="gateway", name="gateway", instance="i", protocol=PROTOCOL, spawn=3, pid=1, build="b")
        answering = asyncio.ensure_future(workforce.hello(b"peer", hello))
        await asyncio.sleep(0)
        await workforce.on_exit("gateway", 3, Status(1, "", "ended with exit status 1"), True, "")
        await answering
        assert workforce.wire.spawn("gateway") is None


async def test_the_last_words_of_a_harness_are_the_error_of_its_row(tmp_path):
    async with open_store(tmp_path) as store:
        made, _, deaths = make(store, tmp_path)
        await add_run(store)
        made.down(ENGINE, 3, w.Down(error="no such device", tail="last words"))
        await made.on_exit(ENGINE, 3, Status(1, "", "ended with exit status 1"), False, "a\nb")
        await made.on_state(
            ENGINE, "backoff", Info(kind="engine", spawn=3, restarts=0, error="ended with exit status 1")
        )
        assert await one(store, "SELECT error FROM process") == "no such device\nlast words"
        assert deaths == [(ENGINE, 3, False, "no such device\nlast words", "a\nb")]
        await made.on_exit(ENGINE, 4, Status(1, "", "ended with exit status 1"), False, "a\nb")
        await made.on_state(
            ENGINE, "backoff", Info(kind="engine", spawn=4, restarts=1, error="ended with exit status 1")
        )
        assert await one(store, "SELECT error FROM process") == "ended with exit status 1\na\nb"
        await made.on_state(ENGINE, "starting", Info(kind="engine", spawn=5, restarts=1))
        assert await one(store, "SELECT error FROM process") == ""


async def test_a_process_of_another_instance_spawn_or_protocol_is_not_taken(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        workforce, supervisor, _ = make(store, tmp_path)
        supervisor.names = lambda: (TRAINER,)
        supervisor.info = lambda name: Info(kind="trainer", spawn=3, restarts=0)
        mine = w.Hello(kind="trainer", name=TRAINER, instance="i", protocol=PROTOCOL, spawn=3, pid=1, build="b")
        for changes in ({"instance": "j"}, {"spawn": 2}, {"protocol": PROTOCOL + 1}, {"name": "other"}):
            await workforce.hello(b"peer", msgspec.structs.replace(mine, **changes))
            (peer, answer), _ = workforce.wire.router.send.call_args
            assert peer == b"peer" and isinstance(answer, w.Reject) and workforce.wire.spawn(TRAINER) is None
        await workforce.hello(b"peer", mine)
        assert workforce.wire.spawn(TRAINER) == 3


async def test_gpus_are_given_out_by_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    async with open_store(tmp_path) as store:
        made, _, _ = make(store, tmp_path)
        assert made._launch(ENGINE, 1).env["CUDA_VISIBLE_DEVICES"] == "7"
        made.settings = msgspec.structs.replace(made.settings, gpus=Gpus(engine=(2, 3)))
        found = {
            kind: made._launch(FIRST[kind], 1).env["CUDA_VISIBLE_DEVICES"] for kind in ("trainer", "engine", "gateway")
        }
        assert found == {"trainer": "7", "engine": "2,3", "gateway": "7"}


async def test_a_runtime_that_has_gone_is_a_start_that_failed(tmp_path, monkeypatch):
    """Supervision knows OSError as a process that cannot be made; anything else would end the daemon."""

    def gone(name):
        raise registry.RuntimeMissing(f"runtime {name} is not installed. Next: artd runtime install {name} --cpu")

    monkeypatch.setattr(registry, "find", gone)
    async with open_store(tmp_path) as store:
        made, _, _ = make(store, tmp_path)
        made.settings = Settings()
        with pytest.raises(OSError, match="Next: artd runtime install vllm"):
            made._launch(ENGINE, 1)


async def test_what_stands_against_a_direct_push_is_an_event(tmp_path):
    async with open_store(tmp_path) as store:
        made, supervisor, _ = make(store, tmp_path)
        supervisor.ready = mock.AsyncMock()
        await made.ready(ENGINE, 1, w.Ready(socket="/s", transfers=("stock",), obstacle="layers.0.mlp: quantised"))
        detail = await one(store, "SELECT data FROM event WHERE kind = 'push.obstacle'")
        assert "layers.0.mlp: quantised" in str(detail)


async def test_a_stop_during_boot_starts_nothing_any_more(tmp_path):
    async with open_store(tmp_path) as store:
        made, _, _ = make(store, tmp_path)
        await made.stop_all(1.0)
        with mock.patch("artd.workforce.Supervisor") as supervisors:
            supervisors.return_value.stop = mock.AsyncMock()
            await asyncio.wait_for(made.run(), 10)
        assert [call.kwargs["start"] for call in supervisors.return_value.add.call_args_list] == [False]
        supervisors.return_value.start.assert_not_called()


async def test_an_engine_runs_in_the_runtime_of_its_kind(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        made, _, _ = make(store, tmp_path)
        made.settings = Settings()
        asked = []
        monkeypatch.setattr(registry, "find", lambda name: asked.append(name) or registry.Runtime(Path("/p")))
        monkeypatch.setitem(ENGINES, "toy", replace(ENGINES["vllm"], runtime="abacus"))
        made.require_runtimes("toy")
        assert asked == ["megatron", "abacus"]
        with pytest.raises(RequestError, match="engine.kind='gone' is not an engine of this artd: use 'vllm' or 'toy'"):
            made.require_runtimes("gone")


def package(name: str, kind: str, digest: str) -> PackageCode:
    return PackageCode(kind=kind, target=f"{name}:x", distribution=name, version="1", digest=digest)


async def test_the_trainer_sees_the_code_of_its_run_alone(tmp_path):
    async with open_store(tmp_path) as store:
        made, _, _ = make(store, tmp_path)
        codes = {name: package(name, name, digest) for name, digest in (("gspo", "1" * 12), ("other", "2" * 12))}
        family = package("toy", "ToyForCausalLM", "3" * 12)
        packages = Packages(Offers(LOSS, codes), Offers(FAMILY, {family.kind: family}))
        made.boot = replace(made.boot, packages=packages)
        base = msgspec.structs.replace(BASE, architecture=family.kind)
        run = await add_run(store, base=base, loss=LossSpec(kind="gspo"))
        made._crews[run] = await load_crew(store, tmp_path, packages, run)
        folders = made._launch(TRAINER, 1).env["PYTHONPATH"].split(os.pathsep)
        assert {Path(folder).name for folder in folders} & {"1" * 12, "2" * 12, "3" * 12} == {"1" * 12, "3" * 12}
        assert "1" * 12 not in made._launch(ENGINE, 1).env["PYTHONPATH"]
        hello = w.Hello(kind="trainer", name=TRAINER, instance="i", protocol=PROTOCOL, spawn=1, pid=1, build="b")
        said = await store.write(lambda c: made._welcome(c, hello))
        assert (said.trainer.loss, said.trainer.family) == (codes["gspo"], family)


async def test_a_run_that_goes_on_with_other_code_is_told(tmp_path, caplog):
    async with open_store(tmp_path) as store:
        run = await add_run(store)
        (tmp_path / "checkpoint").mkdir()
        before = package("gspo", "gspo", "1" * 12)
        (tmp_path / "checkpoint" / "manifest.json").write_bytes(msgspec.json.encode({"loss": before}))
        await store.write(
            lambda c: c.execute(
                "INSERT INTO checkpoint (run_id, step, epoch, lineage, job_id, sha, dir, bytes, state, created)"
                " SELECT ?, 3, 3, 0, id, 's', 'checkpoint', 1, 'committed', 0 FROM job", (run,),
            )
        )  # fmt: skip
        await tell_changes(store, tmp_path, run, RunCode(before))
        assert await count(store, "event", "kind = 'run.code'") == 0
        await tell_changes(store, tmp_path, run, RunCode(package("gspo", "gspo", "2" * 12)))
        told = msgspec.json.decode(await one(store, "SELECT data FROM event WHERE kind = 'run.code' AND run = 'r'"))
        assert told == {"step": 3, "before": "gspo 1 (111111111111)", "present": "gspo 1 (222222222222)"}
        assert "its loss was gspo 1 (111111111111) up to step 3 and is gspo 1 (222222222222)" in caplog.text
