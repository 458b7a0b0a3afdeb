"""What becomes of a batch that cannot be packed: a failed read costs nobody anything, and the packing code costs the guilty group."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from artd.api.group_orders import discard_group
from artd.errors import Conflict, NotFound
from artd.packing import child, failures, forest, process, service
from artd.packing.service import Packer
from artd.runs.lifecycle import Runs
from artd.store.blobs import Blobs
from artd_schema.wire import client_api as api
from tests.awake import Awake
from tests.fakes.rows import EVERY_STEP, add_run, count, data_dir, make_ingest, one, open_store, submit
from tests.fakes.steps import commit_next, pack_here, room

pytestmark = pytest.mark.asyncio
GROUPS = 4


class Place:
    """A run with sealed groups g0 .. g3 of large bodies, and a packer."""

    def __init__(self, store, root, monkeypatch):
        self.store, self.data = store, data_dir(root)
        self.packer = Packer(store, Blobs(self.data.blobs), self.data, room)
        monkeypatch.setattr(service, "run_child", pack_here)
        monkeypatch.setattr(child, "READ_AGAIN_S", (0.0, 0.0))

    async def fill(self, groups=GROUPS):
        await add_run(self.store, groups_per_step=groups)
        await commit_next(self.store, self.data)
        ingest = make_ingest(self.store, self.data, max_inline=1)
        for group in range(groups):
            for number in range(2):
                await submit(ingest, group=f"g{group}", key=f"g{group}-{number}", reward=float(number))

    async def pack(self):
        request, groups = await self.store.write(self.packer._due)
        return request is not None and await self.packer._pack(request, groups)

    async def states(self):
        return [row["state"] for row in await self.store.read("SELECT state FROM trajectory_group ORDER BY id")]

    async def file(self, key):
        return Blobs(self.data.blobs).path(await one(self.store, "SELECT blob FROM trajectory WHERE key = ?", key))

    async def packing(self):
        """What the run's row says of a batch that cannot be packed."""
        (row,) = await self.store.read("SELECT packing FROM run")
        return row["packing"] and msgspec.json.decode(row["packing"])

    async def meta(self, key):
        found = await self.store.read("SELECT value FROM meta WHERE key = ?", (key,))
        return msgspec.json.decode(found[0]["value"]) if found and found[0]["value"] else None


async def test_a_file_that_is_away_for_a_moment_costs_nobody_anything(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill()
        file = await place.file("g1-0")
        file.rename(tmp_path / "away")
        for tries in (1, 2, 3):
            assert not await place.pack()
            assert (await place.packing())["tries"] == tries
        answer = await Runs(store, lambda _: None, EVERY_STEP).wait(api.WaitStep(run="r", step=1, timeout_s=0))
        assert isinstance(answer, api.Pending)
        assert "step 1 cannot be packed: FileNotFoundError" in answer.problem
        assert await count(store, "event", "kind = 'batch.failed'") == 1, "each error is told once, not each try"
        assert await place.states() == ["sealed"] * GROUPS
        (tmp_path / "away").rename(file)
        assert await place.pack() and await place.states() == ["packed"] * GROUPS
        assert await place.packing() is None


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ESTALE])
async def test_one_read_that_fails_is_tried_again(tmp_path, monkeypatch, number):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill()
        file, real, failed = await place.file("g2-1"), Path.read_bytes, []

        def read_bytes(self):
            if self == file and not failed:
                failed.append(1)
                raise OSError(number, os.strerror(number), str(self))
            return real(self)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        assert not await place.pack() and failed
        assert await place.states() == ["sealed"] * GROUPS
        assert await place.pack() and await place.states() == ["packed"] * GROUPS


async def test_bytes_that_are_wrong_once_are_read_again(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill()
        file, real, reads = await place.file("g2-1"), Path.read_bytes, []

        def read_bytes(self):
            reads.append(self)
            found = real(self)
            return found[:-1] if self == file and reads.count(file) < 3 else found

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        assert await place.pack() and await place.states() == ["packed"] * GROUPS
        assert reads.count(file) == 3


async def test_bytes_that_stay_wrong_pause_the_run_and_discard_nothing(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill()
        runs, file = Runs(store, lambda _: None, EVERY_STEP), await place.file("g1-1")
        good = file.read_bytes()
        for _ in range(2):
            file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
            await place.pack()
            (run,) = await store.read("SELECT state, reason FROM run")
            assert run["state"] == "paused" and "group 'g1' cannot be packed: trajectory 4: the file" in run["reason"]
            assert await place.states() == ["sealed"] * GROUPS
            assert not await place.pack(), "nothing is due"
            await runs.set_state("r", "active")
        file.write_bytes(good)
        assert await place.pack() and await place.states() == ["packed"] * GROUPS


async def test_a_group_that_is_damaged_may_be_discarded_and_the_run_goes_on(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill()
        (await place.file("g1-1")).write_bytes(b"\x90")
        await place.pack()
        await store.write(lambda c: discard_group(c, 0, "r", "g1"))
        assert await one(store, "SELECT state FROM run") == "active"
        assert await count(store, "trajectory", "state = 'discarded' AND reason LIKE 'an operator%'") == 2
        assert await place.states() == ["sealed", "discarded", "sealed", "sealed"]


# ---- the packing code itself --------------------------------------------------------------------------------------------


def fails_on(monkeypatch, *keys, together=False):
    """The packing code fails on trajectories with these keys in their turns' raw response."""
    real, seen = forest.assemble, set()

    def assemble(turns, shape):
        turns = list(turns)
        key = turns[0].raw.decode()
        seen.add(key)
        if (together and seen.issuperset(keys)) or (not together and key in keys):
            raise ZeroDivisionError("division by zero")
        return real(turns, shape)

    monkeypatch.setattr(forest, "assemble", assemble)
    run = child.run

    def fresh(request):
        seen.clear()
        return run(request)

    monkeypatch.setattr(child, "run", fresh)


@pytest.mark.parametrize("guilty", range(GROUPS))
async def test_after_three_equal_exceptions_the_guilty_group_is_discarded_and_told(tmp_path, monkeypatch, guilty):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill()
        fails_on(monkeypatch, f"g{guilty}-1")
        for _ in range(2):
            assert not await place.pack()
            assert await place.states() == ["sealed"] * GROUPS
        assert await place.pack()
        wanted = ["sealed"] * GROUPS
        wanted[guilty] = "discarded"
        assert await place.states() == wanted
        assert await count(store, "trajectory", "state = 'discarded'") == 2
        reason = await one(store, "SELECT reason FROM trajectory_group WHERE state = 'discarded'")
        assert reason.startswith("the packer fails on it: ZeroDivisionError: division by zero (test_pack_failures.py:")
        (told,) = await place.meta("packer.blamed")
        assert (told["run"], told["group"]) == ("r", f"g{guilty}") and await place.packing() is None
        assert await count(store, "event", "kind = 'group.discarded'") == 1
        await store.write(lambda c: discard_group(c, 0, "r", f"g{guilty}"))
        assert await place.meta("packer.blamed") == []
        assert not list(place.data.tmp.iterdir())


async def test_two_guilty_groups_are_both_found(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill(3)
        fails_on(monkeypatch, "g0-0", "g2-0")
        for _ in range(3):
            await place.pack()
        assert await place.states() == ["discarded", "sealed", "sealed"]
        await store.write(lambda c: c.execute("UPDATE run SET flush = 1"))
        for _ in range(3):
            await place.pack()
        assert await place.states() == ["discarded", "sealed", "discarded"]
        await store.write(lambda c: c.execute("UPDATE run SET flush = 1"))
        assert await place.pack() and await place.states() == ["discarded", "packed", "discarded"]


async def test_where_no_group_is_guilty_alone_none_is_discarded(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill()
        fails_on(monkeypatch, "g0-0", "g3-0", together=True)
        for _ in range(5):
            assert not await place.pack()
        assert await place.states() == ["sealed"] * GROUPS and (await place.packing())["tries"] == 5


async def test_code_that_packs_no_group_costs_none(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill()
        with monkeypatch.context() as broken:
            fails_on(broken, *(f"g{group}-0" for group in range(GROUPS)))
            for tries in range(1, 8):
                assert not await place.pack()
                assert (await place.packing())["tries"] == tries
        assert await place.states() == ["sealed"] * GROUPS
        assert await place.pack() and await place.states() == ["packed"] * GROUPS, "with code that works again"


async def test_a_batch_of_one_group_has_no_control_and_pauses_the_run(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill(1)
        fails_on(monkeypatch, "g0-0")
        runs = Runs(store, lambda _: None, EVERY_STEP)
        for _ in range(2):
            for _ in range(3):
                assert await one(store, "SELECT state FROM run") == "active"
                await place.pack()
            (run,) = await store.read("SELECT state, reason FROM run")
            assert run["state"] == "paused" and "group 'g0' cannot be packed: ZeroDivisionError" in run["reason"]
            assert await place.states() == ["sealed"] and not await place.pack(), "nothing is due"
            await runs.set_state("r", "active")
        for _ in range(3):
            await place.pack()
        await store.write(lambda c: discard_group(c, 0, "r", "g0"))
        assert await one(store, "SELECT state FROM run") == "active" and await place.states() == ["discarded"]


async def test_an_error_that_changes_is_not_three_equal_ones(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill(1)
        answers = iter(["code", "io", "code", "code"])

        async def by(request, stall_s):
            return child.PackFailure(error="x", kind=next(answers))

        monkeypatch.setattr(service, "run_child", by)
        for _ in range(4):
            assert not await place.pack()
        assert await place.states() == ["sealed"]


# ---- discard-group --------------------------------------------------------------------------------------------------------


async def test_a_group_is_discarded_in_every_state_that_it_may_leave(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill(2)
        ingest = make_ingest(store, place.data)
        await submit(ingest, group="open", key="o")

        async def discard(name, run="r"):
            await store.write(lambda c: discard_group(c, 0, run, name))

        await discard("open")
        await discard("open")
        with pytest.raises(Conflict, match="group 'open' is discarded"):
            await submit(ingest, group="open", key="o2")
        for name, run in (("none", "r"), ("g0", "other")):
            with pytest.raises(NotFound, match=f"run '{run}' has no group '{name}'"):
                await discard(name, run)
        assert await place.pack()
        job = await one(store, "SELECT id FROM job WHERE kind = 'train'")
        with pytest.raises(Conflict, match=f"in the batch of job {job}: artctl discard {job}"):
            await discard("g0")
        await commit_next(store, place.data)
        with pytest.raises(Conflict, match="trained already"):
            await discard("g0")


async def test_a_group_that_is_discarded_while_it_is_packed_is_not_trained(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        place = Place(store, tmp_path, monkeypatch)
        await place.fill(2)

        async def by(request, stall_s):
            answer = child.attempt(request)
            await store.write(lambda c: discard_group(c, 0, "r", "g1"))
            return answer

        monkeypatch.setattr(service, "run_child", by)
        await place.pack()
        assert await place.states() == ["sealed", "discarded"] and await count(store, "batch") == 0


# ---- the child's process ------------------------------------------------------------------------------------------------


def request(data):
    return child.PackRequest(
        run="r", step=1, seed=0, row_length=64, scale_rewards=False, base_digest="", db="", blobs_dir="", trajectory_ids=[],
        out_dir=str(data.tmp / "pack"),
    )  # fmt: skip


def command(monkeypatch, code):
    """Let the child be this program."""
    real = process.guard_command
    monkeypatch.setattr(process, "guard_command", lambda death, _: real(death, [sys.executable, "-c", code]))


def gone(path):
    pid = int(path.read_text())
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_a_child_that_stands_still_is_ended(tmp_path, monkeypatch):
    mark = tmp_path / "pid"
    stopped = (
        f"import os, signal; open({str(mark)!r}, 'w').write(str(os.getpid())); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    command(monkeypatch, stopped)
    with Awake() as passed:
        answer = await process.run_child(request(data_dir(tmp_path)), 0.6)
    assert isinstance(answer, child.PackFailure)
    assert answer.kind == "stalled" and "did nothing for 1 s and was ended" in answer.error
    assert passed.seconds < 10 and gone(mark)


async def test_a_child_that_turns_for_ever_is_ended_at_its_deadline(tmp_path, monkeypatch):
    mark = tmp_path / "pid"
    command(monkeypatch, f"import os; open({str(mark)!r}, 'w').write(str(os.getpid()))\nwhile True: pass")
    monkeypatch.setattr(process, "DEADLINE_S", 1.5)
    answer = await process.run_child(request(data_dir(tmp_path)), 0.7)
    assert isinstance(answer, child.PackFailure)
    assert answer.kind == "stalled" and "did not end within 2 s and was ended" in answer.error and gone(mark)


@pytest.mark.parametrize("absent", ["io", "children"])
async def test_a_busy_child_is_left_alone_where_the_kernel_counts_less(tmp_path, monkeypatch, absent):
    def kept(file, *given, **named):
        if str(file).startswith("/proc/") and str(file).endswith(f"/{absent}"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        return open(file, *given, **named)

    monkeypatch.setattr(process, "open", kept, raising=False)
    command(monkeypatch, "import time\nwhile time.process_time() < 2: pass\nprint('done')")
    answer = await process.run_child(request(data_dir(tmp_path)), 1.5)
    assert isinstance(answer, child.PackFailure) and "ended with status 0" in answer.error


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, "io"), (signal.SIGSEGV, "code"), (signal.SIGBUS, "io")])
async def test_a_child_that_is_killed_is_to_blame_where_its_own_code_did_it(tmp_path, monkeypatch, number, kind):
    command(
        monkeypatch,
        f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), {int(number)})",
    )
    answer = await process.run_child(request(data_dir(tmp_path)), 5.0)
    assert isinstance(answer, child.PackFailure)
    assert answer.kind == kind and f"status {128 + number}" in answer.error


async def test_waiting_grows_and_has_an_end():
    assert [failures.delay_s(number) for number in (1, 2, 7, 1000)] == [0.0, 5.0, 60.0, 60.0]
