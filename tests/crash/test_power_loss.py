"""The power goes off: on every disk that may then be found, all that was acknowledged is there, and the daemon goes on."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.daemon.rig import Rig, fill, rig

from .history import violations
from .powerloss import NOTHING, SURVIVALS, Survival
from .recording import KEEP, Recording, record
from .shim import SKIPPED, Op, Record

SEED = 20261121


class Cut(NamedTuple):
    """The power goes off after operation `at`."""

    at: int
    survival: Survival
    seed: int


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Iterator[tuple[Recording, Rig]]:
    """One loop of two boots, kill -9 between them, for all tests of this file."""
    with rig() as made:
        yield record(made, tmp_path_factory.mktemp("shim")), made


def decisive(recording: Recording) -> list[int]:
    """Operations after which something is promised: a word to somebody, and each COMMIT with files around it."""
    commits = [record.sequence for record in recording.records if is_commit(record)]
    files = [record.sequence for record in recording.records if not is_database(record)]
    near = {cut for before, cut, after in zip(commits, commits[1:], commits[2:], strict=False)
            if any(before < number < after for number in files)}  # fmt: skip
    return sorted(near | {told.sequence for told in recording.told} | {recording.records[-1].sequence})


def name_of(path: str) -> str:
    return path.rpartition("/")[2]


def is_database(record: Record) -> bool:
    return "artd.db" in record.path


def is_commit(record: Record) -> bool:
    return record.op is Op.FSYNC and record.path.endswith("/data/artd.db-wal")


def cuts(recording: Recording, count: int, seed: int = SEED) -> list[Cut]:
    """Half of them where a promise has just been made, with nothing more than what is durable; the others anywhere."""
    rng = random.Random(seed)
    at = decisive(recording)
    chosen = [Cut(number, NOTHING, rng.random()) for number in rng.sample(at, min(len(at), count // 2))]
    while len(chosen) < count:
        chosen.append(Cut(rng.randint(1, len(recording.records)), rng.choice(SURVIVALS), rng.random()))
    return sorted(chosen)


def images(recording: Recording, chosen: list[Cut], folder: Path, code: bool = False) -> Iterator[tuple[Cut, Path]]:
    """Each crash image in turn, in `folder/image`. code: with the workers' code, which no row names."""
    disk, records = copy.deepcopy(recording.start), iter(recording.records)
    wanted = (lambda name: True) if code else (lambda name: name != "data/code")
    for cut in chosen:
        while disk.sequence < cut.at:
            disk.play(next(records))
        image = folder / "image"
        disk.write_image(image, cut.survival, random.Random(cut.seed), wanted)
        yield cut, image
        shutil.rmtree(image)


def assert_kept(recording: Recording, chosen: list[Cut], folder: Path) -> None:
    for cut, image in images(recording, chosen, folder):
        told = [promise for promise in recording.told if promise.sequence <= cut.at]
        broken = list(violations(image, told))
        assert not broken, f"{cut}, after {recording.records[cut.at - 1].op.name}:\n" + "\n".join(broken)


def test_the_recording_is_what_was_written(recording):
    """Nothing changed the folder unseen; the loop did everything that the other tests rest on."""
    found, made = recording
    disk = copy.deepcopy(found.start)
    for one in found.records:
        disk.play(one)

    def wanted(path: str) -> bool:
        # The rig itself reads the database, and SQLite then leaves an empty WAL.
        return not any(part in f"{path}/" for part in SKIPPED) and not path.endswith((".sock", "-wal"))

    disk.assert_like(made.root, wanted)
    kinds = {"run", "trajectory", "response", "step", "backup", "trained", "committed", "served"}
    assert {told.kind for told in found.told} == kinds
    assert made.one("SELECT count(*) FROM checkpoint WHERE state = 'retired'") and made.one("SELECT step FROM run") == 4
    trashed = {name_of(one.path2) for one in found.records if one.op is Op.RENAME and "/.trash/" in one.path2}
    put = [one.sequence for one in found.records if one.op is Op.RENAME and name_of(one.path2) in trashed]
    assert trashed and len(put) >= 3, "a file was put, collected and put again"
    assert any(one.op is Op.UNLINK and "/.trash/" in one.path for one in found.records)


def test_fifty_crash_images_keep_every_promise(recording, tmp_path):
    found, _ = recording
    assert_kept(found, cuts(found, 50), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_crash_images_and_every_promise_as_it_is_made(recording, tmp_path):
    found, _ = recording
    every = [Cut(number, NOTHING, 0.0) for number in decisive(found)]
    assert_kept(found, sorted([*every, *cuts(found, 1000, SEED + 1)]), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", ["result.verified", "result.published", "writer.committed", "push.claimed"])
def test_killed_elsewhere_then_the_power_goes_off(tmp_path, point):
    with rig() as made:
        found = record(made, tmp_path, point)
        every = [Cut(number, NOTHING, 0.0) for number in decisive(found)]
        assert_kept(found, sorted([*every, *cuts(found, 100)]), tmp_path)


async def goes_on(image: Path, made: Rig, fresh: Rig) -> None:
    """The daemon starts on a crash image, makes good what the crash left, and finishes the next step."""
    fresh.data, fresh.model = image / "data", made.model
    fresh.script.write(http=1)
    fresh.start()
    async with fresh.run(keep_checkpoints=KEEP) as (_, run):
        step = run.step + 1
        if step:
            await fill(run, 100 + step)
        assert (await run.wait(step, timeout=30)).step == step
    fresh.stop()
    assert not list(violations(image, []))


def boots(recording: Recording, count: int, seed: int) -> list[Cut]:
    """Cuts over the whole of both boots, each with another way of losing things."""
    rng, length = random.Random(seed), len(recording.records)
    places = [rng.randint(length * part // count + 1, length * (part + 1) // count) for part in range(count)]
    return [Cut(at, SURVIVALS[number % len(SURVIVALS)], rng.random()) for number, at in enumerate(places)]


async def assert_boots(recording: tuple[Recording, Rig], count: int, seed: int = SEED) -> None:
    found, made = recording
    for cut in boots(found, count, seed):
        with rig() as fresh:
            for _, image in images(found, [cut], fresh.root, code=True):
                await goes_on(image, made, fresh)


@pytest.mark.asyncio
async def test_the_daemon_goes_on_from_a_crash_image(recording):
    await assert_boots(recording, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.asyncio
async def test_the_daemon_goes_on_from_many_crash_images(recording):
    await assert_boots(recording, 36, SEED + 1)
