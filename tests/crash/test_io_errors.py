"""A disk that fails: whatever call it is, what was acknowledged is there, the rows are whole, and the loop goes on."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count, cycle
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar
from unittest import mock

import msgspec
import pytest

from tests.daemon.rig import Rig, rig, turn

from .history import violations
from .io_errors import Ended, Life
from .recording import LARGE, Told
from .shim import Failure, Shim

OPS = ("write", "fsync", "rename", "unlink")
FIRST = {
    "write": (1, 2, 3, 5, 8, 13, 34, 55, 89, 144), "fsync": (1, 7, 9, 10, 12, 15, 19, 24, 30, 37),
    "rename": (1, 2, 3, 4, 5, 6, 7), "unlink": (1, 2, 3, 4, 5, 6, 7),
}  # fmt: skip
"""Of `make test`, with those of a worker 40 in all: closer together at the beginning, as the first ones are the boot's."""
FULL, BROKEN, QUOTA = errno.ENOSPC, errno.EIO, errno.EDQUOT
SPACE = "Next: free space, then artd start"


class Case(NamedTuple):
    failure: Failure
    worker: bool

    def __str__(self) -> str:
        return f"{'worker' if self.worker else 'daemon'} {self.failure}"


class Lives:
    """A process under the shim in which one life after another is lived, each on a copy of a folder with one step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told = folder / "told"
        (folder / "root").mkdir(parents=True)
        self.shim = Shim(folder, folder / "root")
        env = os.environ | self.shim.environment(record=False)
        command = [sys.executable, "-m", "tests.crash.io_errors"]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._template = folder / "root" / "template"
        assert self._live(self._template, steps=2).code == 0

    def close(self) -> None:
        self._process.communicate()

    def kill(self) -> None:
        self._process.kill()

    def _live(self, image: Path, failure: str = "", worker: bool = False, steps: int = 1) -> Ended:
        life = Life(str(image / "data"), str(self._told), failure, worker, steps)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(msgspec.json.encode(life) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Ended)

    def prove(self, case: Case) -> bool:
        """Whether the failure came to pass; the promises are kept at once, and after a life on a disk that is well again."""
        image = self._folder / "root" / "image"
        shutil.copytree(self._template, image)
        before = self._told.read_bytes()
        ended = self._live(image, str(case.failure), case.worker)
        hit = bool(self.shim.failed)
        try:
            assert hit or ended.code == 0, f"{case}: {ended}"
            if hit:
                _assert_end(case, ended, self.shim.victim)
                self._assert_kept(case, image, ended)
                after = self._live(image)
                assert after.code == 0, f"{case}: the next life: {after}"
                self._assert_kept(case, image, ended)
        finally:
            shutil.rmtree(image)
            self._told.write_bytes(before)
        return hit

    def _assert_kept(self, case: Case, image: Path, ended: Ended) -> None:
        told = [Told(0, *msgspec.json.decode(line)) for line in self._told.read_bytes().splitlines()]
        broken = list(violations(image, told))
        assert not broken, f"{case}: {ended}:\n" + "\n".join(broken)


def _assert_end(case: Case, ended: Ended, victim: str) -> None:
    """Lived on, or ended as the daemon ends, with a line that says what to do. victim: the path of the call that failed."""
    what = f"{case}, {victim}: {ended}"
    assert ended.code in (0, 1, 70), what
    assert ended.code == 0 or "Next: " in ended.said, what
    if case.failure.error in (FULL, QUOTA):
        assert "quarantined" not in ended.answers and set(ended.answers) <= {"busy"}, what
        lives_on = not ended.booted or ended.code == 0 or case.failure.op == "fsync"
        assert lives_on or _stopped_without_room(case, ended), f"a full disk ended the daemon: {what}"
    elif case.failure.op == "fsync" and not case.worker and not victim.endswith("/data") and "/tmp/pack-" not in victim:
        # SQLite passes over an error of its fsync of the folder (`recover` makes up for it); the packer is a child.
        assert ended.code == 70 and not ended.answers, f"after a failed fsync somebody was answered: {what}"


def _stopped_without_room(case: Case, ended: Ended) -> bool:
    """What was queued when the life was over never found room: no daemon waits for that for ever."""
    return case.failure.stays and ended.stopping and ended.code == 70 and SPACE in ended.said


@contextmanager
def lives(folder: Path, number: int = 2) -> Iterator[list[Lives]]:
    """Several at once, one for each core."""
    with ExitStack() as stack, ThreadPoolExecutor(number) as pool:
        made = list(pool.map(Lives, [folder / str(part) for part in range(number)]))
        for one in made:
            stack.callback(one.close)
        yield made


def hit(one: Lives, case: Case) -> bool:
    """Whether the failure came to pass. Beside busy neighbours a life may make far fewer calls than the next one does, for what
    waits is written together: one that missed is lived again."""
    return one.prove(case) or one.prove(case)


T = TypeVar("T")


def each(folder: Path, work: Callable[[Lives, T], int], items: Sequence[T]) -> int:
    """Sum of `work` over all items, each done in whichever process is free."""
    with lives(folder) as made, ThreadPoolExecutor(len(made)) as pool:
        free: SimpleQueue[Lives] = SimpleQueue()
        for one in made:
            free.put(one)

        def run(item: T) -> int:
            one = free.get()
            try:
                return work(one, item)
            finally:
                free.put(one)

        try:
            return sum(pool.map(run, items))
        except BaseException:
            for one in made:  # else the pool waits for what may be standing still
                one.kill()
            raise


@pytest.mark.timeout(300)  # 15 s of CPU; beside busy neighbours much more
def test_the_first_failures_of_every_kind(tmp_path):
    ways = [(BROKEN, False), (FULL, True), (BROKEN, True), (FULL, False)]
    cases = [
        Case(Failure(op, number, *way), False)
        for op in OPS
        for number, way in zip(FIRST[op], cycle(ways), strict=False)
    ]
    cases += [
        Case(Failure(op, number, *way), True)
        for op in ("write", "fsync") for number, way in zip((1, 2, 3), ways, strict=False)
    ]  # fmt: skip
    assert len(cases) == 40
    assert each(tmp_path, hit, cases) >= 34


def test_a_quota_that_is_used_up_is_a_full_disk(tmp_path):
    """SQLite calls it an I/O error, in whatever call it meets it."""
    cases = [Case(Failure("write", number, QUOTA, stays=True), False) for number in (3, 13, 34, 55)]
    cases.append(Case(Failure("write", 2, QUOTA), True))
    assert each(tmp_path, hit, cases) >= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_call_fails_once_and_for_good(tmp_path):
    kinds = {False: (*OPS, "create", "truncate"), True: ("write", "fsync", "create")}
    ways = [
        (op, error, stays, worker)
        for worker, ops in kinds.items() for op in ops
        for error in (BROKEN, FULL) for stays in (False, True) if (op, error) != ("truncate", FULL)
    ]  # fmt: skip

    def until_unhit(one: Lives, way: tuple[str, int, bool, bool]) -> int:
        op, error, stays, worker = way
        for number in count(1):
            if not hit(one, Case(Failure(op, number, error, stays), worker)):
                return number - 1
        raise AssertionError

    assert each(tmp_path, until_unhit, ways) >= 500


# ---- the whole daemon -----------------------------------------------------------------------------------------------


@pytest.fixture(name="rig")
def a_rig() -> Iterator[Rig]:
    with rig() as made:
        yield made


@contextmanager
def failing(folder: Path, made: Rig, failure: Failure) -> Iterator[Shim]:
    """Processes that are started inside have a disk that fails when `fail_next` says so."""
    shim = Shim(folder, made.root)
    with mock.patch.dict(os.environ, shim.environment(failure, record=False)):
        yield shim


@pytest.mark.asyncio
@pytest.mark.parametrize(("part", "large"), [("artd.db-wal", False), ("/blobs/", True)])
async def test_a_failed_fsync_ends_the_daemon_unanswered_and_the_next_boot_decides(rig, tmp_path, part, large):
    with failing(tmp_path, rig, Failure("fsync", 0, BROKEN, kind="daemon", part=part)) as shim:
        rig.start()
        async with rig.run() as (_, run):
            await run.wait(0, timeout=60)
            body = msgspec.structs.replace(turn(1), raw=LARGE if large else b"")
            shim.fail_next()
            answer = asyncio.ensure_future(run.submit("g", 0.0, turns=[body], key="first"))
            assert await asyncio.to_thread(rig.died) == 70
            assert shim.failed == 1 and part in shim.victim
            assert not answer.done(), "nobody is answered"
            rig.assert_nothing_lives()
            rig.start()  # and the shim lets everything pass from now on
            kept = await answer  # the client asks again by itself; the same key counts once
            await run.submit("g", 1.0, turns=[turn(2)], key="second")
            await run.wait(1, timeout=60)
            assert kept.trajectory == 1
    assert "what is durable is unknown" in (rig.root / "daemon.log").read_text()
    rig.check(2)


@pytest.mark.asyncio
async def test_a_stop_on_a_disk_that_stays_full_ends_and_the_next_boot_has_what_was_acknowledged(rig, tmp_path):
    with failing(tmp_path, rig, Failure("write", 0, FULL, stays=True, kind="daemon", part="artd.db-wal")) as shim:
        rig.start()
        async with rig.run() as (_, run):
            await run.wait(0, timeout=60)
            await run.submit("g", 0.0, turns=[turn(1)], key="first")
        shim.fail_next()
        rig.terminate()
        assert await asyncio.to_thread(rig.died) == 70
        assert shim.failed > 1
        rig.assert_nothing_lives()
    said = (rig.root / "daemon.log").read_text()
    assert SPACE in said and "Traceback" not in said
    rig.start()  # there is room again
    async with rig.run() as (_, run):
        await run.submit("g", 1.0, turns=[turn(2)], key="second")
        await run.wait(1, timeout=60)
    rig.check(2)


@pytest.mark.asyncio
async def test_a_daemon_that_starts_on_a_full_disk_is_reached_when_there_is_room(rig, tmp_path):
    """Killed, and started again where neither its own file nor the gateway's can be made: nobody has to restart it."""
    rig.start()
    rig.kill()
    (rig.data / "gateway.json").unlink()
    with failing(tmp_path, rig, Failure("create", 0, FULL, stays=True, kind="daemon", part=".json")) as shim:
        shim.fail_next()
        rig.start(wait=False)
        rig.until(lambda: "cannot write gateway.json before the disk has room" in rig.log(), "the gateway")
        assert shim.failed >= 2 and rig.state() in ("none", "")
        shim.heal()
        rig.until(lambda: rig.state() == "ready", "the daemon to be reachable")
        rig.until(lambda: (rig.data / "gateway.json").exists(), "the gateway's file")
        async with rig.run() as (_, run):
            await run.wait(0, timeout=60)
    assert rig.stop() == 0
