"""The power goes off: on every disk that may then be found, all that was acknowledged is there, and the daemon goes on."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest

from artd.store.migrate import backup_path
from artd_schema.packages import digest_files, read_tree
from artd_schema.paths import boot_id
from tests.daemon.rig import Rig, fill, rig
from tests.fixtures.schema.next import NOW, released

from .history import migration, schema_of, violations
from .powerloss import NOTHING, SURVIVALS, Survival
from .recording import KEEP, NEWER, RESERVE_MIB, Recording, Told, record, reserved
from .shim import SKIPPED, Op, Record

pytestmark = pytest.mark.timeout(300)
SEED = 20261121


class Cut(NamedTuple):
    """The power goes off after operation `at`."""

    at: int
    survival: Survival
    seed: int


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Iterator[tuple[Recording, Rig]]:
    """One loop of three boots, kill -9 between them, for all tests of this file."""
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


def but_code(name: str) -> bool:
    """What rows name."""
    return name != "data/code"


def only_code(name: str) -> bool:
    return f"{name}/".startswith("data/code/") or name == "data"


def everything(name: str) -> bool:
    return True


def images(
    recording: Recording, chosen: list[Cut], folder: Path, wanted: Callable[[str], bool] = but_code
) -> Iterator[tuple[Cut, Path]]:
    """Each crash image in turn, in `folder/image`. wanted: which of its paths are there."""
    disk, records = copy.deepcopy(recording.start), iter(recording.records)
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
        if cut.at > recording.newer:
            broken += migration(image, told, recording.newer)
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
    assert made.one("SELECT count(*) FROM checkpoint WHERE state = 'retired'") and made.one("SELECT step FROM run") == 5
    trashed = {name_of(one.path2) for one in found.records if one.op is Op.RENAME and "/.trash/" in one.path2}
    put = [one.sequence for one in found.records if one.op is Op.RENAME and name_of(one.path2) in trashed]
    assert trashed and len(put) >= 3, "a file was put, collected and put again"
    assert any(one.op is Op.UNLINK and "/.trash/" in one.path for one in found.records)
    assert schema_of(made.data / "artd.db") == NOW + 1 and schema_of(backup_path(made.data / "artd.db", NOW)) == NOW
    assert any("__pycache__" in one.path for one in found.records), "workers wrote byte code"


def test_fifty_crash_images_keep_every_promise(recording, tmp_path):
    found, _ = recording
    assert_kept(found, cuts(found, 50), tmp_path)


def migrating(recording: Recording) -> range:
    """Operations from the start of the newer daemon to the COMMIT of its migration."""
    made = next(one.sequence for one in recording.records if name_of(one.path2) == f"artd-schema-{NOW:04}.db")
    return range(recording.newer + 1, next(one.sequence for one in recording.records[made:] if is_commit(one)) + 1)


def test_a_migration_is_whole_or_not_begun_and_its_copy_is_there_first(recording, tmp_path):
    found, _ = recording
    last = [Cut(migrating(found)[-1], survival, 0.0) for survival in SURVIVALS[:3]]
    assert_kept(found, sorted([*drawn(migrating(found), 8), *last]), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_migration_is_whole_or_not_begun_at_each_operation(recording, tmp_path):
    found, _ = recording
    every = [Cut(at, survival, at) for at in migrating(found) for survival in (NOTHING, SURVIVALS[at % len(SURVIVALS)])]
    assert_kept(found, every, tmp_path)


def drawn(among: Sequence[int], count: int) -> list[Cut]:
    rng = random.Random(SEED)
    return sorted(Cut(rng.choice(among), rng.choice(SURVIVALS), rng.random()) for _ in range(count))


def assert_code_is_whole(recording: Recording, count: int, folder: Path) -> None:
    """From the rename that gave the copy its name on; byte code in it counts for nothing."""
    of_code = [one for one in recording.records if "/data/code" in one.path]
    named = next(
        n for n, one in enumerate(of_code) if one.op is Op.RENAME and one.path2.rpartition("/")[0].endswith("/code")
    )
    after = [one.sequence for one in of_code[named:]]
    at_once = [Cut(after[0], survival, 0.0) for survival in SURVIVALS]
    copies = 0
    for cut, image in images(recording, sorted([*at_once, *drawn(after, count)]), folder, only_code):
        for found in (image / "data" / "code").glob("[!.]*"):
            assert digest_files(read_tree(found)) == found.name, cut
            copies += 1
    assert copies > count


def test_a_copy_of_the_workers_code_is_whole_or_not_there(recording, tmp_path):
    assert_code_is_whole(recording[0], 3, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_copy_of_the_workers_code_is_whole_or_not_there_at_many_cuts(recording, tmp_path):
    assert_code_is_whole(recording[0], 100, tmp_path)


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


def machine_starts_again(image: Path, made: Rig) -> None:
    """Sources are as old as they were, so that their byte code is taken for theirs; the boot that wrote it is an earlier one."""
    for source in image.glob("data/code/[!.]*/**/*.py"):
        shutil.copystat(made.data / source.relative_to(image / "data"), source)
    for marker in image.glob("data/code/*/.boot"):
        marker.write_bytes(marker.read_bytes().replace(boot_id().encode(), b"an earlier one"))


async def goes_on(image: Path, made: Rig, fresh: Rig, newer: bool, told: list[Told]) -> None:
    """The daemon starts on a crash image, makes good what the crash left, and finishes the next step; what was told before the
    crash is still so. newer: that of the next release."""
    machine_starts_again(image, made)
    fresh.data, fresh.model = image / "data", made.model
    fresh.script.write(http=1)
    with released() if newer else nullcontext():
        fresh.start(under=NEWER if newer else ())
        fresh.until(lambda: (fresh.data / "reserve").stat().st_size == RESERVE_MIB << 20, "the reserve")
        async with fresh.run(keep_checkpoints=KEEP) as (_, run):
            step = run.step + 1
            if step:
                await fill(run, 100 + step)
            assert (await run.wait(step, timeout=90)).step == step
        fresh.stop()
    assert not list(violations(image, told))


def boots(recording: Recording, count: int, seed: int) -> list[Cut]:
    """Cuts over the whole of both boots, each with another way of losing things."""
    rng, length = random.Random(seed), len(recording.records)
    places = [rng.randint(length * part // count + 1, length * (part + 1) // count) for part in range(count)]
    return [Cut(at, SURVIVALS[number % len(SURVIVALS)], rng.random()) for number, at in enumerate(places)]


async def assert_boots(recording: tuple[Recording, Rig], chosen: list[Cut]) -> None:
    found, made = recording
    for cut in chosen:
        with rig() as fresh:
            reserved(fresh)
            for _, image in images(found, [cut], fresh.root, everything):
                told = [promise for promise in found.told if promise.sequence <= cut.at]
                await goes_on(image, made, fresh, cut.at > found.newer, told)


@pytest.mark.asyncio
async def test_the_daemon_goes_on_from_a_crash_image(recording):
    await assert_boots(recording, boots(recording[0], 2, SEED))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.asyncio
async def test_the_daemon_goes_on_from_many_crash_images(recording):
    await assert_boots(recording, boots(recording[0], 36, SEED + 1))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.asyncio
async def test_byte_code_that_the_power_loss_tore_is_not_trusted(recording):
    await assert_boots(recording, [Cut(recording[0].newer, Survival(1, 1, torn=True), 0.0)])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.asyncio
async def test_a_newer_daemon_goes_on_from_crash_images_of_its_migration(recording):
    await assert_boots(recording, drawn(migrating(recording[0]), 12))
