"""The supervisor with real processes: restarts, breaker, orders, time-outs, and what is told in which order."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from artd.supervise import procfs
from artd.supervise.backoff import Policy
from artd.supervise.postmortem import Status
from artd.supervise.reap import Leftover
from artd.supervise.spawn import Child, Undead
from artd.supervise.spec import Info, Launch, Spec
from artd.supervise.states import State
from artd.supervise.supervisor import Supervisor, UnknownWorker
from tests.awake import SOON_S, until
from tests.process import helpers

pytestmark = pytest.mark.asyncio
FAST = Policy(base_s=0.02, cap_s=0.1, stable_s=120.0, deaths=5, window_s=600.0)
DIE = "print('the last line'); raise SystemExit(3)"
LOST = (
    "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1)\n"
    "def somewhere(): print('up', flush=True); time.sleep(600)\n"
    "somewhere()"
)


@dataclass
class Record:
    """A listener that keeps everything; `fail` makes the next call of that name raise."""

    spawns: int = 0
    states: list[tuple[str, Info]] = field(default_factory=list)
    exits: list[tuple[int, Status, bool, str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    fail: str = ""

    def _call(self, name: str, text: str) -> None:
        if self.fail == name:
            raise RuntimeError(f"{name} failed")
        self.order.append(text)

    async def next_spawn(self, name: str) -> int:
        await asyncio.sleep(0)
        self.spawns += 1
        self._call("next_spawn", f"spawn {self.spawns}")
        return self.spawns

    async def on_exit(self, name: str, spawn: int, status: Status, ordered: bool, tail: str) -> None:
        await asyncio.sleep(0)
        self._call("on_exit", f"exit {spawn}")
        self.exits.append((spawn, status, ordered, tail))

    async def on_state(self, name: str, state: State, info: Info) -> None:
        await asyncio.sleep(0)
        self._call("on_state", state)
        self.states.append((state, info))


@dataclass
class Rig:
    supervisor: Supervisor
    record: Record
    instance: str
    folder: Path

    def add(
        self, program: str, timeout_s: float = 30.0, name: str = "trainer", start: bool = True,
        leftovers: tuple[Leftover, ...] = (),
    ) -> None:  # fmt: skip
        def launch(spawn: int) -> Launch:
            env = helpers.tags(self.instance, spawn=spawn, worker=name)
            return Launch(
                argv=helpers.python(program), env=env, log=self.folder / f"{name}.log", tmpdir=self.folder / f"t{spawn}"
            )

        spec = Spec(name=name, kind="trainer", launch=launch, start_timeout_s=timeout_s, leftovers=leftovers)
        self.supervisor.add(spec, start=start)

    async def until(self, state: State, name: str = "trainer") -> Info:
        await until(lambda: self.supervisor.state(name) == state)
        return self.supervisor.info(name)

    async def running(self, program: str = helpers.SLEEP, processes: int = 2) -> Info:
        """A worker that is ready."""
        self.add(program)
        await until(lambda: len(helpers.tagged(self.instance)) == processes)
        assert await self.supervisor.ready("trainer", self.record.spawns)
        return self.supervisor.info("trainer")


Make = Callable[..., Any]


@pytest.fixture
def rig(instance: str, tmp_path: Path) -> Make:
    @asynccontextmanager
    async def make(policy: Policy = FAST, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Rig]:
        async with anyio.create_task_group() as group:
            record = Record()
            yield Rig(Supervisor(group, record, policy, clock, lambda: 0.5), record, instance, tmp_path)
            group.cancel_scope.cancel()

    return make


async def test_from_start_to_stop(rig: Make) -> None:
    async with rig() as each:
        info = await each.running()
        assert (info.pid, info.ticks, info.session) == (info.pid, procfs.identity(info.pid).ticks, info.pid)
        assert info.boot_id == procfs.boot_id()
        assert await each.supervisor.ready("trainer", 1), "a second word tells nothing new"
        assert (each.folder / "t1").is_dir()
        await each.supervisor.stop("trainer", SOON_S)
        assert each.record.order == [*["starting", "spawn 1", "starting", "ready", "draining", "exit 1", "stopped"]]
        assert not helpers.tagged(each.instance)
        assert not (each.folder / "t1").exists(), "the scratch folder of a dead process is removed"
        ((_, status, ordered, _),) = each.record.exits
        assert (status.code, ordered) == (143, True)
        assert each.record.states[-1][1].pid is None
        pids = [info.pid for state, info in each.record.states if state == "starting"]
        assert pids == [None, each.record.states[2][1].pid], "told before the process and again with it"


async def test_a_death_nobody_ordered_is_respawned_at_once(rig: Make) -> None:
    async with rig(Policy(base_s=600.0)) as each:
        info = await each.running()
        os.kill(procfs.descendants([info.pid], procfs.all_stats())[0].pid, signal.SIGKILL)
        await until(lambda: each.record.spawns == 2)
        ((spawn, status, ordered, _),) = each.record.exits
        assert (spawn, status.code, ordered) == (1, 137, False)
        assert each.record.order[4:][:4] == ["exit 1", "backoff", "starting", "spawn 2"]
        assert each.supervisor.info("trainer").restarts == 1
        assert each.supervisor.info("trainer").error.startswith("killed by SIGKILL")


async def test_breaker_and_operator(rig: Make) -> None:
    async with rig() as each:
        each.add(DIE)
        info = await each.until("broken")
        assert len(each.record.exits) == each.record.spawns == 5
        assert info.error == "ended with exit status 3\nthe last line"
        assert {ordered for _, _, ordered, _ in each.record.exits} == {False}
        await asyncio.sleep(0.2)
        assert each.record.spawns == 5, "a broken worker stays down"
        each.supervisor.start("trainer")
        await asyncio.sleep(0.1)
        assert each.supervisor.state("trainer") == "broken"
        each.supervisor.retry_broken("trainer")
        await until(lambda: each.record.spawns == 10 and each.supervisor.state("trainer") == "broken")
        await each.supervisor.stop("trainer", 1.0)
        assert each.supervisor.state("trainer") == "stopped"


async def test_the_operators_word_counts_for_one_that_is_about_to_die(rig: Make) -> None:
    async with rig(Policy(deaths=1)) as each:
        each.add(helpers.SLEEP)
        for spawn in (1, 2):
            await until(lambda spawn=spawn: each.record.spawns == spawn and each.supervisor.info("trainer").pid > 0)
            if spawn == 1:
                each.supervisor.retry_broken("trainer")
            os.kill(each.supervisor.info("trainer").pid, signal.SIGKILL)
        await each.until("broken")
        assert each.record.spawns == 2, "it counted once"


async def test_backoff_waits_and_a_stop_ends_the_wait(rig: Make) -> None:
    async with rig(Policy(base_s=30.0)) as each:
        each.add(DIE)
        await until(lambda: len(each.record.exits) == 2)
        await each.until("backoff")
        await asyncio.sleep(0.2)
        assert each.record.spawns == 2
        await asyncio.wait_for(each.supervisor.stop("trainer", 1.0), SOON_S)
        assert each.supervisor.state("trainer") == "stopped"
        each.supervisor.start("trainer")
        await until(lambda: each.record.spawns == 3)


async def test_kill_is_ordered_proven_and_followed_by_a_new_process(rig: Make) -> None:
    async with rig(Policy(deaths=1, base_s=30.0)) as each:
        await each.running(helpers.SETSID, 3)
        old = {(stat.pid, stat.ticks) for stat in helpers.tagged(each.instance)}
        await each.supervisor.kill("trainer", 1, "its lease is over")
        assert not old & {(stat.pid, stat.ticks) for stat in helpers.tagged(each.instance)}
        ((_, status, ordered, _),) = each.record.exits
        assert ordered
        assert status.text == "its lease is over; killed by SIGKILL"
        await until(lambda: each.record.spawns == 2)
        assert not await each.supervisor.ready("trainer", 1), "a word of the killed one"
        assert await each.supervisor.ready("trainer", 2)
        await each.supervisor.kill("trainer", 1)
        assert each.supervisor.state("trainer") == "ready", "spawn 1 is dead already: nothing to do"


async def test_one_that_hangs_tells_where_before_it_is_killed(rig: Make) -> None:
    async with rig() as each:
        await each.running(LOST)
        await until(lambda: "up" in (each.folder / "trainer.log").read_text())
        await each.supervisor.kill("trainer", 1, "its job stands still", traced=True)
        ((_, status, ordered, tail),) = each.record.exits
        assert ordered
        assert status.text == "its job stands still; killed by SIGKILL"
        assert "in somewhere" in tail
        await until(lambda: each.record.spawns == 2)


async def test_stop_of_a_deaf_worker_and_a_second_shorter_stop(rig: Make) -> None:
    async with rig() as each:
        await each.running(helpers.DEAF)
        await until(lambda: "deaf" in (each.folder / "trainer.log").read_text())
        first = asyncio.create_task(each.supervisor.stop_all(600.0))
        await each.until("draining")
        await asyncio.wait_for(each.supervisor.stop_all(0.0), SOON_S)
        await asyncio.wait_for(first, SOON_S)
        assert each.record.exits[0][1].code == 137
        assert not helpers.tagged(each.instance)


async def test_one_that_is_wanted_again_while_it_is_stopped(rig: Make) -> None:
    async with rig() as each:
        await each.running()
        stop = asyncio.create_task(each.supervisor.stop("trainer", SOON_S))
        await asyncio.sleep(0)
        each.supervisor.start("trainer")
        await asyncio.wait_for(stop, SOON_S)
        await until(lambda: each.record.spawns == 2)
        assert each.record.order[4:7] == ["draining", "exit 1", "stopped"]
        assert each.record.exits[0][2] is True


async def test_no_ready_in_time(rig: Make) -> None:
    async with rig(Policy(deaths=1)) as each:
        each.add("print('loading', flush=True); import time; time.sleep(600)", timeout_s=3.0)
        info = await each.until("broken")
        assert info.error == "worker 'trainer' was not ready 3 s after its start; killed by SIGKILL\nloading"
        assert each.record.exits[0][2] is False
        assert not helpers.tagged(each.instance)


async def test_causes_are_named(rig: Make) -> None:
    async with rig(Policy(deaths=1)) as each:
        each.add("raise MemoryError('x')", name="memory")
        each.add("raise OSError(28, 'No space left on device')", name="disk")
        await each.until("broken", "memory")
        await each.until("broken", "disk")
        assert "out of memory" in each.supervisor.info("memory").error
        assert "disk full" in each.supervisor.info("disk").error
        assert {status.cause for _, status, _, _ in each.record.exits} == {"out of memory", "disk full"}


async def test_kernel_memory_kill_is_named(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(Policy(deaths=1)) as each:
        info = await each.running()
        before = procfs.oom_kills()
        monkeypatch.setattr(procfs, "oom_kills", lambda: before + 1)
        os.kill(procfs.descendants([info.pid], procfs.all_stats())[0].pid, signal.SIGKILL)
        assert "out of memory" in (await each.until("broken")).error


async def test_no_process_can_be_made(rig: Make, tmp_path: Path) -> None:
    async with rig() as each:
        (tmp_path / "trainer.log").mkdir()
        each.add(helpers.SLEEP)
        info = await each.until("broken")
        assert "could not be started" in info.error and "Is a directory" in info.error
        assert [status.code for _, status, _, _ in each.record.exits] == [None] * 5


async def test_what_it_runs_by_has_gone(rig: Make) -> None:
    """The interpreter, say, that a first start found: that worker is broken, and the daemon goes on."""

    def launch(spawn: int) -> Launch:
        raise FileNotFoundError("runtime megatron is not installed. Next: artd runtime install megatron --cpu")

    async with rig() as each:
        each.supervisor.add(Spec(name="trainer", kind="trainer", launch=launch, start_timeout_s=30.0))
        assert "Next: artd runtime install" in (await each.until("broken")).error
        assert not each.supervisor.info("trainer").pid


async def test_undead_is_broken_until_it_is_gone(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("artd.supervise.worker.LOOK_S", 0.05)
    async with rig() as each:
        await each.running()
        real = Child.kill

        async def kill(self: Child, within_s: float = 5.0) -> int:
            raise Undead(self.name, self.pid, "D")

        with monkeypatch.context() as patch:
            patch.setattr(Child, "kill", kill)
            with pytest.raises(Undead, match="state D"):
                await each.supervisor.kill("trainer", reason="its lease is over")
            info = await each.until("broken")
            assert "broken(pid" in info.error
            assert info.pid is not None, "the row still names it"
            with pytest.raises(Undead):
                await each.supervisor.stop("trainer", 0.1)
            each.supervisor.retry_broken("trainer")
            await asyncio.sleep(0.1)
            assert (each.supervisor.state("trainer"), each.record.spawns, each.record.exits) == ("broken", 1, [])
        assert Child.kill is real
        await until(lambda: each.record.spawns == 2)
        assert [(spawn, ordered) for spawn, _, ordered, _ in each.record.exits] == [(1, True)]


async def test_nothing_is_started_beside_a_leftover_of_an_older_boot(
    rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artd.supervise.worker.LOOK_S", 0.05)
    monkeypatch.setattr(procfs, "strike", lambda *_: None)  # it does not die
    async with rig() as each:
        with helpers.process({}) as old:
            each.add(helpers.SLEEP, leftovers=(Leftover("trainer", old.pid, old.ticks, "T"),))
            info = await each.until("broken")
            assert re.search(rf"broken\(pid {old.pid}, state [RSD]\)", info.error), (
                info.error
            )  # as it is now, not as it was
            assert (info.boot_id, info.pid, info.ticks) == (procfs.boot_id(), old.pid, old.ticks), "the row names it"
            each.supervisor.retry_broken("trainer")
            await asyncio.sleep(0.3)
            assert (each.supervisor.state("trainer"), each.record.spawns) == ("broken", 0)
        await until(lambda: each.record.spawns == 1)  # it is gone: no operator is needed
        assert each.record.exits == []


async def test_words_that_come_too_early_or_too_late(rig: Make) -> None:
    async with rig() as each:
        each.add(helpers.SLEEP, start=False)
        assert not await each.supervisor.ready("trainer", 0)
        each.supervisor.start("trainer")
        await until(lambda: len(helpers.tagged(each.instance)) == 2)
        assert each.supervisor.state("trainer") == "starting"
        assert not await each.supervisor.ready("trainer", 2)
        with pytest.raises(UnknownWorker, match="no worker 'engine'; use one of: trainer"):
            await each.supervisor.ready("engine", 1)
        with pytest.raises(ValueError, match="exists already"):
            each.add(helpers.SLEEP)


@pytest.mark.parametrize("call", ["next_spawn", "on_exit", "on_state"])
async def test_a_failing_listener_ends_the_daemon_and_leaves_nothing(call: str, rig: Make) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with rig() as each:
            each.add(helpers.SLEEP, start=call != "next_spawn")
            if call == "next_spawn":
                each.record.fail = call
                each.supervisor.start("trainer")
                await asyncio.sleep(SOON_S)
            await until(lambda: len(helpers.tagged(each.instance)) == 2)
            each.record.fail = call
            await each.supervisor.kill("trainer")
    assert caught.group_contains(RuntimeError, match=f"{call} failed")
    assert not helpers.tagged(each.instance)


async def test_cancelled_group_leaves_nothing(rig: Make) -> None:
    async with rig() as each:
        await each.running(helpers.SETSID, 3)
    assert not helpers.tagged(each.instance)


async def test_orders_that_meet(rig: Make) -> None:
    """Orders of every kind at once end in one settled state, with nobody left waiting."""
    async with rig() as each:
        await each.running()
        calls: list[Awaitable[None]] = [
            each.supervisor.kill("trainer"),
            each.supervisor.stop("trainer", 1.0),
            each.supervisor.kill("trainer"),
            each.supervisor.stop("trainer", 0.0),
        ]
        await asyncio.wait_for(asyncio.gather(*calls), SOON_S)
        assert each.supervisor.state("trainer") == "stopped"
        assert len(each.record.exits) == 1
        assert not helpers.tagged(each.instance)


async def test_stop_before_there_is_a_process(rig: Make) -> None:
    async with rig() as each:
        each.add(helpers.SLEEP)
        await until(lambda: each.supervisor.state("trainer") == "starting")
        await asyncio.wait_for(each.supervisor.stop("trainer", 5.0), SOON_S)
        assert each.supervisor.state("trainer") == "stopped"
        assert not helpers.tagged(each.instance)


async def test_a_stopped_worker_can_be_dropped_and_its_name_used_again(rig: Make) -> None:
    async with rig() as each:
        await each.running()
        with pytest.raises(ValueError, match="worker 'trainer' is ready; stop it before you drop it"):
            each.supervisor.drop("trainer")
        before = len(asyncio.all_tasks())
        await each.supervisor.stop("trainer", SOON_S)
        each.supervisor.drop("trainer")
        assert each.supervisor.names() == ()
        await until(lambda: len(asyncio.all_tasks()) < before)
        await each.running()
        assert each.record.spawns == 2
