"""check: what the daemon's services made is clean, and every promise that is broken is named, with its row."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from artd.check.report import LISTED, Outcome, Report, Violation
from artd.check.run import INVARIANTS, check
from artd.recover import identify
from artd.runs.rollback import rollback
from artd.store.migrate import SchemaMismatch
from artd_schema.wire.client_api import Rollback
from tests.fakes.rows import BASE, data_dir, open_store
from tests.fakes.world import World, copy, template

TRAINED = "(SELECT min(id) FROM trajectory WHERE state = 'trained' AND run_id = 2)"
PACKED = "(SELECT min(id) FROM trajectory WHERE state = 'packed')"
QUEUED = "(SELECT min(id) FROM trajectory WHERE state = 'queued' AND split = 'train')"
RUNNING = "(SELECT id FROM job WHERE state = 'running')"
DONE = "(SELECT max(id) FROM job WHERE state = 'succeeded')"
NEWEST = "(SELECT max(id) FROM checkpoint)"
LIVE = "(SELECT id FROM push WHERE state = 'live')"
BLOB = "(SELECT min(id) FROM trajectory WHERE blob IS NOT NULL)"
BATCH = "(SELECT max(id) FROM batch WHERE state = 'trained')"


@dataclass(frozen=True)
class Plant:
    """name: of the check that must find it; what: how its violation's row begins; sql or act: the damage; deep: only a deep
    look finds it."""

    name: str
    what: str
    sql: str = ""
    act: Callable[[Path], object] = lambda root: None
    deep: bool = False


def blob(root: Path, kind: str) -> Path:
    with closing(sqlite3.connect(root / "artd.db")) as c:
        (sha,) = c.execute("SELECT sha FROM blob WHERE kind = ? ORDER BY created DESC, sha LIMIT 1", (kind,)).fetchone()
    return root / "blobs" / sha[:2] / sha


def folder(root: Path) -> Path:
    return max((root / "checkpoints" / "r").iterdir())


def flip(path: Path) -> None:
    """Another byte, the same size."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def page(root: Path) -> None:
    """Damage the first page of a table in the middle of the file."""
    with closing(sqlite3.connect(root / "artd.db")) as c:
        (number,) = c.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'attempt'").fetchone()
        (size,) = c.execute("PRAGMA page_size").fetchone()
        c.execute("PRAGMA journal_mode = DELETE")
    with (root / "artd.db").open("r+b") as file:
        file.seek((number - 1) * size)
        file.write(b"\xff" * 100)


def stale_index(root: Path) -> None:
    """An index that misses a row: only a deep look compares it with its table."""
    with closing(sqlite3.connect(root / "artd.db", isolation_level=None)) as c:
        c.execute("PRAGMA writable_schema = ON")
        (sql,) = c.execute("SELECT sql FROM sqlite_schema WHERE name = 'trajectory_group_id'").fetchone()
        c.execute("UPDATE sqlite_schema SET sql = sql || ' WHERE id < 0' WHERE name = 'trajectory_group_id'")
        c.execute("PRAGMA schema_version = 1000")
        c.execute("REINDEX trajectory_group_id")
        c.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 'trajectory_group_id'", (sql,))
        c.execute("PRAGMA schema_version = 1001")


PLANTS = [
    Plant("sqlite.quick_check", "artd.db", act=page),
    Plant("sqlite.integrity_check", "artd.db", act=stale_index, deep=True),
    Plant("sqlite.foreign_keys", "trajectory ", f"UPDATE trajectory SET group_id = 99 WHERE id = {QUEUED}"),
    Plant("schema", "index run_state", "DROP INDEX run_state"),
    Plant("run.spec", "run 2", "UPDATE run SET spec = x'7b7d' WHERE id = 2"),
    Plant("run.spec", "run 2", "UPDATE run SET spec = x'7b' WHERE id = 2"),
    Plant("run.spec", "run 2", "UPDATE run SET routes = x'7b7d' WHERE id = 2"),
    # work
    Plant("group.size", "trajectory group", "UPDATE trajectory_group SET size = size + 1 WHERE name = 'open'"),
    Plant("group.count", "run ", "UPDATE group_count SET trajectories = trajectories + 1"),
    Plant("group.count", "run ", "DELETE FROM group_count"),
    Plant("group.members", "trajectory ", f"UPDATE trajectory SET split = 'eval' WHERE id = {QUEUED}"),
    Plant("group.state", "trajectory ", "UPDATE trajectory_group SET state = 'open' WHERE state = 'trained' AND run_id = 2"),
    Plant("group.state", "trajectory ", f"UPDATE trajectory SET state = 'queued', batch_id = NULL WHERE id = {TRAINED}"),
    Plant("group.kept", "trajectory group", "UPDATE trajectory SET state = 'discarded', batch_id = NULL WHERE state = 'packed'"),
    Plant("group.kept", "trajectory group", f"UPDATE trajectory SET batch_id = 1 WHERE id = {TRAINED}"),
    Plant("trajectory.batch", "trajectory ", f"UPDATE trajectory SET state = 'trained' WHERE id = {PACKED}"),
    Plant("trajectory.batch", "trajectory ", f"UPDATE trajectory SET batch_id = 1 WHERE id = {QUEUED}"),
    Plant("trajectory.batch", "trajectory ", f"UPDATE trajectory SET batch_id = 1 WHERE id = {TRAINED}"),
    Plant("trajectory.payload", "trajectory ", f"DELETE FROM trajectory_data WHERE trajectory_id = {QUEUED}"),
    Plant("trajectory.payload", "trajectory ", f"UPDATE trajectory_data SET body = NULL WHERE trajectory_id = {QUEUED}"),
    Plant("trajectory.payload", "trajectory ", f"UPDATE trajectory_data SET body = x'90' WHERE trajectory_id = {BLOB}"),
    Plant("trajectory.payload", "trajectory ", f"UPDATE trajectory SET payload = 'expired' WHERE id = {TRAINED}"),
    Plant("trajectory.epochs", "trajectory ", f"UPDATE trajectory SET epoch_min = epoch_max + 1 WHERE id = {TRAINED}"),
    Plant("trajectory.epochs", "trajectory ", f"UPDATE trajectory SET epoch_min = NULL WHERE id = {TRAINED}"),
    Plant("trajectory.served", "trajectory ", "UPDATE trajectory SET epoch_max = 99 WHERE id = (SELECT max(trajectory_id) FROM exchange)"),
    Plant("trajectory.blob", "trajectory ", f"UPDATE trajectory SET digest = 'x' WHERE id = {BLOB}"),
    Plant("trajectory.blob", "trajectory ", "UPDATE blob SET kind = 'batch' WHERE kind = 'trajectory'"),
    Plant("trajectory.metadata", "trajectory ", f"UPDATE trajectory_data SET metadata = (SELECT max(sha) FROM blob) WHERE trajectory_id = {QUEUED}"),
    Plant("exchange.use", "exchange ", "UPDATE exchange SET trajectory_id = 1 WHERE trajectory_id IS NOT NULL"),
    Plant("exchange.use", "exchange ", "UPDATE exchange SET split = 'eval' WHERE trajectory_id IS NOT NULL"),
    Plant("exchange.rollout", "exchange ", "UPDATE rollout SET run_id = 1"),
    Plant("exchange.count", "exchange count", "UPDATE exchange_count SET bytes = bytes + 1"),
    Plant("batch.job", "batch ", f"UPDATE batch SET state = 'packed' WHERE id = {BATCH}"),
    Plant("batch.job", "batch ", f"UPDATE batch SET step = step + 10 WHERE id = {BATCH}"),
    Plant("batch.job", "batch ", "UPDATE job SET batch_id = 1 WHERE kind = 'train'"),
    Plant("batch.blobs", "batch ", f"UPDATE batch SET tensors = manifest WHERE id = {BATCH}"),
    Plant("batch.replay", "batch ", f"UPDATE batch SET replay = NULL, replay_manifest = NULL, covered = NULL WHERE id = {BATCH}"),
    Plant("batch.replay", "batch ", f"UPDATE batch SET covered = tokens + 1 WHERE id = {BATCH}"),
    # steps
    Plant("run.step", "run 2", "UPDATE run SET step = step - 1 WHERE id = 2"),
    Plant("run.step", "run 2", "UPDATE checkpoint SET lineage = 1 WHERE run_id = 2"),
    Plant("run.step", "run 2", "UPDATE run SET checkpoint_id = 1 WHERE id = 2"),
    Plant("run.step", "run 2", f"UPDATE checkpoint SET abandoned = 1 WHERE id = {NEWEST}"),
    Plant("run.pause", "run 2", "UPDATE run SET state = 'paused' WHERE id = 2"),
    Plant("run.pause", "run 2", "INSERT INTO pause (run_id, cause, reason, created) VALUES (2, 'operator', '', 1)"),
    Plant("checkpoint.chain", "checkpoint ", "UPDATE checkpoint SET abandoned = 1 WHERE run_id = 2 AND step = 1"),
    Plant("run.epochs", "run 2", "UPDATE run SET next_epoch = next_epoch - 1 WHERE id = 2"),
    Plant("run.epochs", "run 2", f"UPDATE job SET epoch = 1 WHERE id = {RUNNING}"),
    Plant("job.order", "run 2", f"UPDATE job SET step = step + 1 WHERE id = {RUNNING}"),
    Plant("job.order", "run 2", "UPDATE job SET state = 'queued', ended = NULL WHERE state = 'cancelled'"),
    Plant("job.checkpoint", "job ", f"DELETE FROM checkpoint WHERE id = {NEWEST}"),
    Plant("job.checkpoint", "job ", f"UPDATE job SET state = 'queued', ended = NULL WHERE id = {DONE}"),
    Plant("job.result", "checkpoint ", f"UPDATE checkpoint SET epoch = epoch + 50 WHERE id = {NEWEST}"),
    Plant("job.result", "checkpoint ", f"UPDATE checkpoint SET parent_id = 1 WHERE id = {NEWEST}"),
    Plant("job.parent", "job ", f"UPDATE job SET parent_id = 1 WHERE id = {RUNNING}"),
    Plant("job.parent", "job ", "UPDATE job SET parent_id = 1 WHERE kind = 'init' AND run_id = 2"),
    Plant("job.parent", "job ", f"UPDATE job SET parent_id = (SELECT parent_id FROM checkpoint WHERE id = {NEWEST}) WHERE id = {RUNNING}"),
    Plant("job.cancel", "job ", f"UPDATE job SET cancel = 1 WHERE id = {DONE}"),
    Plant("job.cancel", "job ", "UPDATE job SET cancel = 0 WHERE state = 'cancelled'"),
    Plant("job.worker", "job ", f"UPDATE job SET spawn = 7 WHERE id = {RUNNING}"),
    Plant("attempt.open", "job ", f"UPDATE attempt SET ended = 1, outcome = 'died' WHERE job_id = {RUNNING}"),
    Plant("attempt.open", "job ", f"UPDATE attempt SET ended = NULL WHERE job_id = {DONE}"),
    Plant("attempt.outcome", "job ", f"UPDATE attempt SET outcome = NULL WHERE job_id = {DONE}"),
    Plant("attempt.outcome", "job ", f"UPDATE attempt SET outcome = 'succeeded' WHERE job_id = {RUNNING} AND fence = 1"),
    Plant("attempt.outcome", "job ", f"DELETE FROM attempt WHERE job_id = {DONE}"),
    Plant("attempt.fence", "job ", f"UPDATE job SET fence = 1 WHERE id = {RUNNING}"),
    Plant("checkpoint.parent", "checkpoint ", f"UPDATE checkpoint SET step = step + 1 WHERE id = {NEWEST}"),
    Plant("checkpoint.parent", "checkpoint ", "UPDATE checkpoint SET parent_id = 1 WHERE run_id = 2 AND step = 0"),
    Plant("checkpoint.dir", "checkpoint ", f"UPDATE checkpoint SET dir = dir || '0' WHERE id = {NEWEST}"),
    Plant("checkpoint.dir", "checkpoint ", "UPDATE checkpoint SET dir = (SELECT dir FROM checkpoint WHERE id = 4)"),
    Plant("checkpoint.needed", "checkpoint ", f"UPDATE checkpoint SET state = 'retired' WHERE id = {NEWEST}"),
    Plant("checkpoint.event", "event ", f"UPDATE checkpoint SET sha = 'other' WHERE id = {NEWEST}"),
    Plant("metric.step", "run 2", "INSERT INTO metric (run_id, lineage, step, name, value) VALUES (2, 1, 2, 'loss', 0.5)"),
    # serving
    Plant("push.checkpoint", "push ", f"UPDATE push SET checkpoint_id = 1 WHERE id = {LIVE}"),
    Plant("push.checkpoint", "push ", f"UPDATE push SET mode = 'lora' WHERE id = {LIVE}"),
    Plant("push.checkpoint", "push ", f"UPDATE checkpoint SET state = 'retired' WHERE id = {NEWEST}"),
    Plant("push.fence", "push ", f"UPDATE push SET source = NULL WHERE id = {LIVE}"),
    Plant("push.fence", "push ", f"UPDATE push SET fence = 1 WHERE id = {LIVE}"),
    Plant("push.fence", "push ", "UPDATE meta SET value = '1' WHERE key = 'push_fence'"),
    Plant("push.ended", "push ", "UPDATE push SET ended = NULL WHERE state = 'superseded'"),
    Plant("push.ended", "push ", f"UPDATE push SET ended = 5 WHERE id = {LIVE}"),
    Plant("push.live", "engine ", f"UPDATE push SET state = 'superseded', ended = 5 WHERE id = {LIVE}"),
    Plant("push.live", "engine ", "UPDATE serving SET state = 'gone'"),
    Plant("serving.checkpoint", "serving ", "UPDATE serving SET name = 'r@1' WHERE state = 'live'"),
    Plant("serving.checkpoint", "serving ", "UPDATE serving SET checkpoint_id = 1 WHERE state = 'live'"),
    Plant("serving.checkpoint", "serving ", f"UPDATE checkpoint SET state = 'retired' WHERE id = {NEWEST}"),
    Plant("serving.left", "serving ", f"UPDATE checkpoint SET abandoned = 1 WHERE id = {NEWEST}"),
    Plant("serving.engine", "serving ", "UPDATE process SET spawn = spawn + 1 WHERE kind = 'engine'"),
    Plant("meta.instance", "instance none", "DELETE FROM meta WHERE key = 'instance'"),
    Plant("json", "row job", f"UPDATE job SET metrics = x'7b' WHERE id = {DONE}"),
    Plant("json", "row trajectory", f"UPDATE trajectory_data SET metrics = x'00' WHERE trajectory_id = {QUEUED}"),
    # files
    Plant("blob.file", "blobs/", act=lambda root: blob(root, "batch").unlink()),
    Plant("blob.file", "blobs/", act=lambda root: blob(root, "replay").write_bytes(b"short")),
    Plant("blob.file", "blobs/", act=lambda root: flip(blob(root, "batch")), deep=True),
    Plant("checkpoint.files", "checkpoints/", act=lambda root: shutil.rmtree(folder(root))),
    Plant("checkpoint.files", "checkpoints/", act=lambda root: (folder(root) / "weights.bin").unlink()),
    Plant("checkpoint.files", "checkpoints/", act=lambda root: (folder(root) / "stray").touch()),
    Plant("checkpoint.files", "checkpoints/", act=lambda root: flip(folder(root) / "manifest.json")),
    Plant("checkpoint.files", "checkpoints/", act=lambda root: flip(folder(root) / "weights.bin"), deep=True),
    Plant("checkpoint.files", "checkpoints/", f"UPDATE checkpoint SET bytes = 1 WHERE id = {NEWEST}"),
    Plant("checkpoint.manifest", "checkpoints/", "UPDATE checkpoint SET sha = 'other' WHERE run_id = 2 AND step = 1"),
    Plant("checkpoint.manifest", "checkpoints/", f"UPDATE checkpoint SET epoch = epoch + 50 WHERE id = {NEWEST}"),
    Plant("checkpoint.manifest", "checkpoints/", f"UPDATE batch SET manifest = tensors WHERE id = {BATCH}"),
    Plant("batch.manifest", "batch ", f"UPDATE trajectory SET batch_id = NULL, state = 'queued' WHERE id = {TRAINED}"),
    Plant("batch.manifest", "batch ", f"UPDATE trajectory SET reward = 9 WHERE id = {TRAINED}"),
    Plant("batch.manifest", "batch ", f"UPDATE trajectory SET digest = 'x' WHERE id = {TRAINED}"),
    Plant("batch.manifest", "batch ", f"UPDATE batch SET tokens = tokens + 1 WHERE id = {BATCH}"),
    Plant("batch.manifest", "batch ", f"UPDATE batch SET fill = 0.5 WHERE id = {BATCH}"),
    Plant("batch.manifest", "batch ", f"UPDATE batch SET trajectories = 9 WHERE id = {BATCH}"),
    Plant("batch.manifest", "batch ", f"UPDATE batch SET covered = covered - 1 WHERE id = {BATCH}"),
    Plant("batch.manifest", "batch ", act=lambda root: flip(blob(root, "manifest"))),
    # contents
    Plant("trajectory.body", "trajectory ", "UPDATE trajectory_data SET body = x'90' WHERE body IS NOT NULL", deep=True),
    Plant("trajectory.body", "trajectory ", f"UPDATE trajectory SET tokens = tokens + 1 WHERE id = {QUEUED}", deep=True),
    Plant("trajectory.body", "trajectory ", act=lambda root: flip(blob(root, "trajectory")), deep=True),
    Plant(
        "trajectory.body", "trajectory ", deep=True, sql="UPDATE exchange SET trajectory_id = (SELECT max(trajectory_id)"
        " FROM exchange) WHERE trajectory_id = (SELECT min(trajectory_id) FROM exchange)",
    ),
    Plant("exchange.turn", "exchange ", "UPDATE exchange SET turn = x'00' WHERE turn IS NOT NULL", deep=True),
    Plant("exchange.turn", "exchange ", act=lambda root: blob(root, "exchange").write_bytes(b"\xc1"), deep=True),
]  # fmt: skip


@pytest.fixture
def made() -> Path:
    """A world that is only looked at."""
    return template()


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A world that may be broken."""
    return copy(tmp_path / "data")


def damage(root: Path, *statements: str) -> None:
    with closing(sqlite3.connect(root / "artd.db", isolation_level=None)) as c:
        c.execute("PRAGMA ignore_check_constraints = ON")
        for sql in filter(None, statements):
            assert c.execute(sql).rowcount != 0, f"changed nothing: {sql}"


def told(report: Report) -> list[str]:
    return [f"{o.name}: {v.what}: {v.text}" for o in report.broken for v in o.violations]


@pytest.mark.parametrize("deep", [False, True])
def test_what_the_services_made_is_clean(made: Path, deep: bool) -> None:
    report = check(made, deep=deep)
    assert report.clean, told(report)
    assert report.notes == ()
    parts = {"foreign_keys", "rows", "files"}
    assert report.seconds.keys() == parts | ({"integrity_check", "contents"} if deep else {"quick_check"})


def test_looking_changes_nothing(made: Path) -> None:
    def files() -> dict[Path, tuple[int, int]]:
        kept = (p for p in made.rglob("*") if not p.name.endswith(("-shm", "-wal")))
        return {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in kept if p.is_file()}

    before = files()
    check(made, deep=True)
    assert files() == before


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_broken_promise_is_named(world: Path, plant: Plant) -> None:
    damage(world, plant.sql)
    plant.act(world)
    if plant.deep:
        shallow = [o.name for o in check(world).broken]
        assert plant.name not in shallow
    report = check(world, deep=plant.deep)
    found = {outcome.name: outcome for outcome in report.broken}
    assert plant.name in found, told(report)
    violation = found[plant.name].violations[0]
    assert violation.what.startswith(plant.what) and violation.text, violation


def test_every_check_has_a_plant(made: Path) -> None:
    names = {outcome.name for outcome in (*check(made).outcomes, *check(made, deep=True).outcomes)}
    assert {invariant.name for invariant in INVARIANTS} < names
    assert names == {plant.name for plant in PLANTS}


async def serve_adapters(root: Path) -> None:
    """A LoRA run of three steps, the newest two of them served."""
    data = data_dir(root)
    async with open_store(root) as store:
        await store.write(lambda c: identify(c, data, 0))
        world = World(store, data)
        await world.begin("old", BASE, rollout_weights_mode="lora")
        for step in range(1, 3):
            await world.submit(f"s{step}", 0.0, 1.0)
            await world.step()


def test_adapters_of_two_steps_are_served(tmp_path: Path) -> None:
    asyncio.run(serve_adapters(tmp_path))
    assert check(tmp_path, deep=True).clean
    damage(tmp_path, "UPDATE serving SET name = 'old@0' WHERE state = 'live' AND name = 'old@1'")
    assert [outcome.name for outcome in check(tmp_path).broken] == ["serving.checkpoint"]


def test_left_overs_are_notes(world: Path) -> None:
    """What a crash leaves, the next start removes."""
    (world / "blobs" / "ab").mkdir(exist_ok=True)
    (world / "blobs" / "ab" / ("ab" * 32)).write_bytes(b"never committed")
    shutil.copytree(folder(world), world / "checkpoints" / "r" / "l0-s000009-j9-f1")
    (world / "tmp" / "job-9-f1").mkdir()
    damage(world, "UPDATE checkpoint SET state = 'retired' WHERE run_id = 2 AND step = 0",
           "INSERT INTO blob (sha, bytes, kind, created) VALUES ('" + "ab" * 32 + "', 15, 'batch', 0)")  # fmt: skip
    (world / "blobs" / "cdcd").write_bytes(b"odd")
    report = check(world, deep=False)
    assert report.clean, told(report)
    assert {note.name: note.count for note in report.notes} == {
        "blobs without a row": 1, "blobs that nothing refers to": 1, "retired checkpoints": 1,
        "checkpoint folders without a row": 1, "staged": 1,
    }  # fmt: skip


def test_expired_payloads_are_no_violation(world: Path) -> None:
    damage(
        world,
        f"UPDATE trajectory SET payload = 'expired', blob = NULL WHERE id = {TRAINED}",
        f"UPDATE trajectory_data SET body = NULL WHERE trajectory_id = {TRAINED}",
    )
    report = check(world, deep=True)
    assert report.clean, told(report)


async def roll_back(root: Path) -> None:
    """A run of three steps goes back to step 1, and trains step 2 again; after each the folder is looked at."""
    data = data_dir(root)
    async with open_store(root) as store:
        await store.write(lambda c: identify(c, data, 0))
        world = World(store, data)
        await world.begin("old", BASE, keep_checkpoints=1)
        for step in range(1, 4):
            await world.submit(f"s{step}", 0.0, 1.0)
            await world.step()
        op = Rollback(run="old", step=1, lineage=0)
        await store.write(lambda c: rollback(c, 0, op))
        assert check(root, deep=True).clean, told(check(root))
        await world.serve()
        await world.submit("again", 0.0, 1.0)
        await world.step()
        assert check(root, deep=True).clean, told(check(root))
        await world.retire()


def test_a_run_that_was_rolled_back_is_clean(tmp_path: Path) -> None:
    asyncio.run(roll_back(tmp_path))
    assert check(tmp_path, deep=True).clean, told(check(tmp_path))
    with closing(sqlite3.connect(tmp_path / "artd.db")) as c:
        left = c.execute("SELECT step, lineage, state FROM checkpoint WHERE abandoned ORDER BY step").fetchall()
        metrics = c.execute("SELECT lineage, step FROM metric WHERE name = 'loss' ORDER BY 1, 2").fetchall()
    assert left == [(2, 0, "retired"), (3, 0, "retired")] and metrics == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)]
    damage(tmp_path, "UPDATE run SET lineage = 0")
    assert {"run.step", "checkpoint.chain"} <= {outcome.name for outcome in check(tmp_path).broken}


def test_a_file_that_goes_while_a_daemon_runs_is_looked_for_again(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention: the row changes first, then the files go; between two looks, here."""
    from artd.check import files

    real = files.found_blobs

    def late(data):
        monkeypatch.setattr(files, "found_blobs", real)
        damage(world, "UPDATE checkpoint SET state = 'retired' WHERE run_id = 2 AND step = 0")
        shutil.rmtree(min((world / "checkpoints" / "r").iterdir()))
        return real(data)

    monkeypatch.setattr(files, "found_blobs", late)
    report = check(world, live=True)
    assert report.clean, told(report)
    blob(world, "batch").unlink()
    assert [outcome.name for outcome in check(world, live=True).broken] == ["blob.file"]


def test_another_versions_database_is_refused(world: Path) -> None:
    damage(world, "UPDATE meta SET value = 'other' WHERE key = 'schema_draft'")
    with pytest.raises(SchemaMismatch, match="another unreleased draft"):
        check(world)
    damage(world, "PRAGMA user_version = 0")
    with pytest.raises(SchemaMismatch, match="no schema of artd"):
        check(world)


def test_no_database_at_all(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.DatabaseError):
        check(tmp_path)
    (tmp_path / "artd.db").write_bytes(b"not a database, but as long as one would be" * 200)
    with pytest.raises(sqlite3.DatabaseError):
        check(tmp_path)


def test_many_violations_are_counted_and_a_few_kept() -> None:
    outcome = Outcome.of("x", "y", (Violation(str(n), "") for n in range(250)))
    assert (outcome.count, len(outcome.violations)) == (250, LISTED)
