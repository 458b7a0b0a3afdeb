"""At boot: leftovers of older boots are ended, whatever made them; nothing else is ever signalled."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from artd.supervise import procfs
from artd.supervise.procfs import Identity
from artd.supervise.reap import REAP_S, Reaped, Recorded, find, reap
from tests.awake import SOON_S, Awake, until
from tests.process import helpers

pytestmark = pytest.mark.asyncio
DEAD_OWNER = "1:1"
"""PID:TICKS of a process that does not exist: pid 1 started at another tick."""


def recorded(stat: procfs.Stat) -> Recorded:
    return Recorded("trainer", procfs.boot_id(), stat.pid, stat.ticks, stat.session)


def living(stat: procfs.Stat) -> bool:
    return procfs.alive(Identity(procfs.boot_id(), stat.pid, stat.ticks))


async def sweep(instance: str, *rows: Recorded, owner: Identity | None = None) -> Reaped:
    return await reap(instance, 2, rows, owner)


async def test_leftovers_of_a_killed_daemon_and_guardian(instance: str, tmp_path: Path) -> None:
    with helpers.spawner(instance, tmp_path / "log", helpers.SETSID) as daemon:
        assert daemon.stdout is not None
        guardian = int(daemon.stdout.readline().split()[0])
        helpers.until(lambda: len(helpers.tagged(instance)) == 3)
        daemon.send_signal(signal.SIGSTOP)  # it would notice the guardian's death, and do its work
        os.kill(guardian, signal.SIGKILL)
        daemon.kill()
        daemon.wait()
        helpers.until(lambda: len(helpers.tagged(instance)) == 1)
        found = await sweep(instance)
    assert [left.name for left in found.ended] == ["trainer"]
    assert found.broken == ()
    assert not helpers.tagged(instance)


async def test_tag_of_an_older_boot_is_ended_and_only_that(instance: str) -> None:
    others = [
        helpers.tags(instance, boot=2, owner=DEAD_OWNER),  # this boot
        helpers.tags("f" * 32, boot=1, owner=DEAD_OWNER),  # another instance
        helpers.tags(instance, boot=1, owner=":".join(map(str, procfs.identity()[1:]))),  # its owner lives
        {"ARTD_INSTANCE": instance, "PATH": "/bin"},  # no boot: not a managed child
        {},
    ]
    with helpers.process(helpers.tags(instance, boot=1, owner=DEAD_OWNER)) as old:
        kept = [helpers.process(env) for env in others]
        spared = [each.__enter__() for each in kept]
        try:
            found = await sweep(instance)
            assert [left.pid for left in found.ended] == [old.pid]
            assert not living(old)
            assert all(living(stat) for stat in spared)
        finally:
            for each in kept:
                each.__exit__(None, None, None)


async def test_recorded_process_without_tag_and_its_descendants(instance: str) -> None:
    script = ("/bin/sh", "-c", "setsid sleep 600 & sleep 600 & wait")
    with helpers.process({"PATH": "/bin:/usr/bin"}, script) as old:
        helpers.until(lambda: len(procfs.descendants([old.pid], procfs.all_stats())) == 2)
        below = procfs.descendants([old.pid], procfs.all_stats())
        found = await sweep(instance, recorded(old))
        assert {left.pid for left in found.ended} == {old.pid, *(stat.pid for stat in below)}
        assert not any(map(living, [old, *below]))


async def test_a_reused_pid_is_a_stranger(instance: str) -> None:
    with helpers.process({}) as other:
        row = recorded(other)
        for wrong in (replace(row, ticks=row.ticks - 1), replace(row, boot_id="another boot of the machine")):
            assert await sweep(instance, wrong) == Reaped()
        assert living(other)


async def test_a_reused_session_number_is_a_stranger(instance: str) -> None:
    with helpers.process({}) as other:
        gone = Recorded("trainer", procfs.boot_id(), other.pid, other.ticks - 5, other.session)
        elsewhere = replace(recorded(other), pid=2, ticks=0, session=other.session)
        assert await sweep(instance, gone, elsewhere) == Reaped()
        assert living(other)


async def test_a_session_that_the_recorded_process_does_not_lead_is_a_strangers(instance: str) -> None:
    with helpers.process({}) as old, helpers.process({}) as other:
        found = await sweep(instance, replace(recorded(old), session=other.session))
        assert [left.pid for left in found.ended] == [old.pid]
        assert living(other)


async def test_copied_data_folder_spares_the_living_originals_workers(instance: str) -> None:
    with helpers.process({}) as owner, helpers.process(helpers.tags(instance, boot=1)) as worker:
        alive = Identity(procfs.boot_id(), owner.pid, owner.ticks)
        assert await sweep(instance, recorded(worker), owner=alive) == Reaped()
        assert living(worker)
        # A copy older than the original's last start names an owner that is dead: the worker's own tag still tells.
        assert await sweep(instance, recorded(worker), owner=replace_ticks(alive)) != Reaped()
    tag = f"{os.getpid()}:{procfs.identity().ticks}"
    with helpers.process(helpers.tags(instance, boot=1, owner=tag)) as worker:
        assert await sweep(instance, recorded(worker), owner=Identity(procfs.boot_id(), 1, 1)) == Reaped()
        assert living(worker)


def replace_ticks(who: Identity) -> Identity:
    return who._replace(ticks=who.ticks - 1)


async def test_stopped_leftovers_die(instance: str) -> None:
    with helpers.process(helpers.tags(instance, owner=DEAD_OWNER)) as old:
        os.kill(old.pid, signal.SIGSTOP)
        assert len((await sweep(instance)).ended) == 1
        assert not living(old)


async def test_leftovers_whose_first_thread_has_ended_die(instance: str) -> None:
    environment = helpers.tags(instance, owner=DEAD_OWNER)
    with helpers.process(environment, helpers.python(helpers.LEADERLESS)) as old:
        helpers.until(lambda: (now := procfs.read_stat(old.pid)) is not None and now.state == "Z")
        assert living(old)
        assert [left.pid for left in (await sweep(instance)).ended] == [old.pid]
        assert not living(old)


async def test_what_does_not_die_is_reported_in_time(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with helpers.process(helpers.tags(instance, owner=DEAD_OWNER)) as old:
        with monkeypatch.context() as patch:
            patch.setattr(procfs, "strike", lambda *_: None)
            with Awake() as took:
                found = await reap(instance, 2, (), None, within_s=0.2)
            assert took.seconds < REAP_S
        assert [str(left) for left in found.broken] == [f"worker trainer: broken(pid {old.pid}, state S)"]
        assert found.ended == ()


async def test_never_itself_nor_its_ancestors(instance: str) -> None:
    me = procfs.identity()
    row = Recorded("trainer", me.boot_id, me.pid, me.ticks, os.getsid(0))
    assert me.pid not in {left.pid for left in find(instance, 2, [row])}
    parent = procfs.identity(os.getppid())
    row = Recorded("trainer", parent.boot_id, parent.pid, parent.ticks, 0)
    assert not {me.pid, parent.pid} & {left.pid for left in find(instance, 2, [row])}


async def test_guardians_that_are_ending_by_themselves_are_awaited(instance: str, tmp_path: Path) -> None:
    with helpers.spawner(instance, tmp_path / "log", helpers.SETSID) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        helpers.until(lambda: len(helpers.tagged(instance)) == 3)
        daemon.kill()
        daemon.wait()
        found = await asyncio.wait_for(sweep(instance), SOON_S)
    assert found.broken == ()
    assert not helpers.tagged(instance)


async def test_a_signal_reaches_exactly_the_process_that_was_meant() -> None:
    with helpers.process({}) as other:
        assert not procfs.signal_exact(other.pid, other.ticks - 1, signal.SIGKILL), "a stranger under that number"
        assert living(other)
        assert procfs.signal_exact(other.pid, other.ticks, signal.SIGKILL)
        await until(lambda: not living(other))
    assert not procfs.signal_exact(other.pid, other.ticks, signal.SIGKILL)
