"""`artd check` on a large database: `python -m tests.bench.check [--json] [--trajectories N] [--jobs N]`.

The database is filled by SQL with rows that keep every promise (a run of N train jobs on N trajectories of 4 KiB, with
their batches, manifests, checkpoints, pushes and events), the files beside it are written as the daemon writes them. The
command runs as a process of its own, warm page cache. Goal: 5 s without SQLite's own quick_check, which stands beside it.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import msgspec

from artd.datadir.layout import DataDir
from artd.store.migrate import migrate
from artd_schema.codec import digest, to_json
from artd_schema.data.base import BaseModel
from artd_schema.data.manifest import BatchManifest, PackedTrajectory
from artd_schema.data.trajectory import Turn
from artd_schema.run.spec import RunSpec
from artd_schema.wire import worker as w
from tests.bench.report import Report, parser
from tests.fakes.staging import stage

ROUNDS = 3
GOAL_S = 5.0
BODY = 4096
KEEP = 3
GROUP = 5
BASE = BaseModel("b" * 64, 256, ())
SPEC = RunSpec(model="/models/toy", group_size=GROUP, keep_checkpoints=KEEP)


class World:
    """A data folder being filled. members: trajectories of a batch."""

    def __init__(self, root: Path, trajectories: int, jobs: int, spec: RunSpec = SPEC, base: BaseModel = BASE) -> None:
        self.spec, self.base = spec, base
        self.data = DataDir(root, root)
        self.jobs = jobs
        self.members = trajectories // jobs
        for folder in (self.data.blobs, self.data.checkpoints, self.data.tmp):
            folder.mkdir(parents=True)
        self.c = sqlite3.connect(root / "artd.db", isolation_level=None)
        self.c.execute("PRAGMA journal_mode = WAL")
        migrate(self.c)
        self.parent = ""

    def fill(self) -> None:
        self.c.execute("BEGIN")
        for key, value in (("instance", "i" * 32), ("boot", "1"), ("push_fence", str(self.jobs + 1))):
            self._row("meta", key=key, value=value)
        self._row(
            "run", id=1, name="r", spec=to_json(self.spec), base_digest=self.base.digest, base_manifest=to_json(self.base),
            vocab_size=256, state="active", step=self.jobs, next_epoch=self.jobs + 1, created=0,
        )  # fmt: skip
        for name, kind in (("trainer-1", "trainer"), ("engine-1-0", "engine")):
            self._row("process", name=name, kind=kind, run_id=1, state="stopped", boot=1, spawn=1, since=0)
        for step in range(self.jobs + 1):
            self._step(step)
        self.c.execute("UPDATE run SET checkpoint_id = ?", (self.jobs + 1,))
        self.c.execute("COMMIT")
        self.c.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.c.close()

    def _step(self, step: int) -> None:
        manifest = self._batch(step) if step else ""
        number = step + 1
        self._row(
            "job", id=number, run_id=1, kind="train" if step else "init", step=step, epoch=step, batch_id=step or None,
            parent_id=step or None, state="succeeded", fence=1, spawn=1, metrics=b'{"loss": 0.5}', created=0, started=0, ended=0,
        )  # fmt: skip
        self._row(
            "attempt", job_id=number, fence=1, worker="trainer-1", spawn=1, started=0, ended=0, outcome="succeeded"
        )
        folder = self.data.checkpoint("r", 0, step, number, 1)
        kept = step > self.jobs - KEEP
        sha, size = self._checkpoint(step, folder, manifest) if kept else (digest(folder.encode()), 100)
        self._row(
            "checkpoint", id=number, run_id=1, step=step, epoch=step, lineage=0, parent_id=step or None, job_id=number, sha=sha,
            dir=folder, bytes=size, state="committed" if kept else "retired", created=0,
        )  # fmt: skip
        live = step == self.jobs
        self._row(
            "push", id=number, run_id=1, engine="engine-1-0", checkpoint_id=number, mode="merged", source="live",
            state="live" if live else "superseded", fence=number, max_abs=0.0, mean_abs=0.0, created=0, started=0,
            ended=None if live else 0,
        )  # fmt: skip
        self._row(
            "serving", id=number, engine="engine-1-0", spawn=1, run_id=1, checkpoint_id=number, name=f"r@{step}",
            state="live" if live else "gone", created=0,
        )  # fmt: skip
        self._row("metric", run_id=1, lineage=0, step=step, name="loss", value=0.5)
        self._row("event", at=0, run="r", kind="step.committed", ref=str(step), data=json.dumps({"sha": sha}).encode())
        self.parent = sha

    def _checkpoint(self, step: int, folder: str, manifest: str) -> tuple[str, int]:
        order = w.Run(job=step + 1, fence=1, kind="train", step=step, epoch=step, lineage=0, dir="", instance="i" * 32,
                      batch_sha=manifest)  # fmt: skip
        target = self.data.root / folder
        sha = stage(target, order, self.base.digest, parent=self.parent)
        return sha, sum(path.stat().st_size for path in target.iterdir() if path.name != "manifest.json")

    def _batch(self, step: int) -> str:
        """Trajectories, groups and batch of a step; the sha of its manifest."""
        first = (step - 1) * self.members + 1
        packed = [self._trajectory(step, number) for number in range(first, first + self.members)]
        manifest = BatchManifest(
            packer="bench", run="r", step=step, seed=0, base_digest=self.base.digest, row_length=1024, rows=1, tensors={},
            token_digest="", trajectories=tuple(packed), groups=(), logical_tokens=1000, physical_tokens=1000,
            trainable_tokens=500, scale_rewards=True,
        )  # fmt: skip
        tensors = self._blob(b"tensors of step %d" % step, "batch")
        sha = self._blob(to_json(manifest), "manifest")
        self._row(
            "batch", id=step, run_id=1, step=step, state="trained", tensors=tensors, manifest=sha, trajectories=len(packed),
            tokens=1000, fill=1000 / 1024, created=0,
        )  # fmt: skip
        return sha

    def _trajectory(self, step: int, number: int) -> PackedTrajectory:
        body = msgspec.msgpack.encode([_turn(number)])
        group, member = divmod(number - 1, GROUP)
        if member == 0:
            self._row(
                "trajectory_group", id=group + 1, run_id=1, name=f"g{group}", split="train", state="trained", size=GROUP,
                deadline=0, created=0,
            )  # fmt: skip
        sha, key = digest(body), str(number)
        self._row(
            "trajectory", id=number, run_id=1, group_id=group + 1, key=key, content=sha, digest=sha, reward=float(member),
            split="train", state="trained", body=body, metrics=b'{"metrics":{},"metadata":{}}', tokens=TOKENS,
            epoch_min=step - 1, epoch_max=step - 1, batch_id=step, created=0,
        )  # fmt: skip
        told = b'{"group":"g","reward":1.0,"split":"train"}'
        self._row("event", at=0, run="r", kind="trajectory.submitted", ref=key, data=told)
        return PackedTrajectory(id=number, digest=sha, group=group + 1, reward=float(member), advantage=0.0, rows=(0,))

    def _blob(self, content: bytes, kind: str) -> str:
        sha = digest(content)
        path = Path(self.data.blob(sha))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        self._row("blob", sha=sha, bytes=len(content), kind=kind, created=0)
        return sha

    def _row(self, table: str, **values: object) -> None:
        marks = ", ".join(f":{name}" for name in values)
        self.c.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", values)


TOKENS = BODY // 24
_IDS = array("i", itertools.islice(itertools.cycle(range(256)), TOKENS)).tobytes()
_LOGPROBS = array("f", [-0.5] * TOKENS).tobytes()


def _turn(number: int) -> Turn:
    raw = b"x" * (BODY - 3 * 4 * TOKENS - 90)
    return Turn(prompt_ids=_IDS, token_ids=_IDS, logprobs=_LOGPROBS, response_id=f"resp-{number:012d}", raw=raw)


def measure(data: Path, *options: str) -> tuple[float, dict[str, float]]:
    """(seconds of the process, seconds by part)."""
    command = [sys.executable, "-m", "artd.cli.main", "check", "--json", "--data-dir", str(data), *options]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    wall = time.perf_counter() - started
    found = json.loads(done.stdout)
    broken = [check for check in found["checks"] if check["count"]]
    assert done.returncode == 0 and found["clean"], broken[:3]
    return wall, found["seconds"]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--trajectories", type=int, default=100_000)
    options.add_argument("--jobs", type=int, default=10_000)
    args = options.parse_args()
    report = Report(
        f"artd check, {args.trajectories} trajectories of {BODY} bytes, {args.jobs} jobs, median of {ROUNDS}"
    )
    with tempfile.TemporaryDirectory(prefix="artd-bench.") as folder:
        data = Path(folder) / "data"
        World(data, args.trajectories, args.jobs).fill()
        rounds = [measure(data) for _ in range(ROUNDS)]
        rest = [wall - parts["quick_check"] for wall, parts in rounds]
        report.add("check without quick_check", statistics.median(rest), "s", GOAL_S, "<=")
        for part in rounds[0][1]:
            report.add(f"  {part}", statistics.median(parts[part] for _, parts in rounds), "s")
        wall, parts = measure(data, "--deep")
        report.add("check --deep", wall, "s")
        for part, seconds in parts.items():
            report.add(f"  --deep {part}", seconds, "s")
        report.add("database", (data / "artd.db").stat().st_size / 2**20, "MiB")
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
