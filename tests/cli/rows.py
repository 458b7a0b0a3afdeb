"""A data folder with known rows for the command line: the schema's SQL is executed and rows are inserted, without a daemon."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from artd.store.migrate import migrate
from artd_schema.wire.worker_names import engine_name, parse_worker, trainer_name

T0 = 1_767_323_045_678
"""2026-01-02T03:04:05.678Z: the time that tests freeze."""
SPEC = {"model": "/models/toy", "rollout_weights_mode": "merged", "groups_per_step": 4, "engine": {"dtype": "float32"}}
ADAPTER = {
    "adapter_config.json": b'{"r": 2, "lora_alpha": 4}',
    "adapter_model.safetensors": b"not really tensors",
    "weights.json": b'{"mode": "merged", "tensors": []}',
}


class Made:
    """A database being filled; every method inserts one row with sensible values and returns its id."""

    def __init__(self, data: Path) -> None:
        data.mkdir(parents=True, exist_ok=True)
        self.data = data
        self.connection = sqlite3.connect(data / "artd.db", isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        migrate(self.connection)

    def row(self, table: str, **values: Any) -> int:
        names = ", ".join(f'"{name}"' for name in values)
        marks = ", ".join("?" * len(values))
        packed = [json.dumps(v).encode() if isinstance(v, dict) else v for v in values.values()]
        return self.connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", packed).lastrowid or 0

    def run(self, name: str = "toy", state: str = "active", step: int = 2, **values: Any) -> int:
        given = {
            "spec": SPEC,
            "base_digest": "b" * 64,
            "base_manifest": b"{}",
            "vocab_size": 16,
            "created": T0 - 7_200_000,
        }
        return self.row("run", name=name, state=state, step=step, **(given | values))

    def group(self, run: int, name: str, state: str, size: int = 2, split: str = "train", reason: str = "") -> int:
        times = {"deadline": T0 + 1000, "created": T0 - 60_000}
        return self.row(
            "trajectory_group", run_id=run, name=name, state=state, size=size, split=split, reason=reason, **times
        )

    def trajectory(self, run: int, group: int, key: str, **values: Any) -> int:
        given = {
            "content": "c" * 64, "digest": "d" * 64, "reward": 0.5, "split": "train", "state": "queued", "tokens": 12,
            "created": T0 - 50_000,
        }  # fmt: skip
        body = values.pop("body", b"\x90")
        number = self.row("trajectory", run_id=run, group_id=group, key=key, **(given | values))
        told = {"metrics": {"turns": 1.0}, "metadata": {}}
        self.row("trajectory_data", trajectory_id=number, metrics=told, body=body)
        return number

    def blob(self, sha: str) -> str:
        self.row("blob", sha=sha, bytes=10, kind="batch", created=T0)
        return sha

    def batch(self, run: int, step: int, state: str) -> int:
        sha = self.blob(f"{step:064d}")
        sizes = {"trajectories": 8, "tokens": 100, "fill": 0.98, "created": T0 - 40_000}
        return self.row("batch", run_id=run, step=step, state=state, tensors=sha, manifest=sha, **sizes)

    def job(self, run: int, kind: str, step: int, state: str, **values: Any) -> int:
        given = {"epoch": step, "fence": 1, "created": T0 - 40_000, "started": T0 - 30_000}
        if state in ("succeeded", "cancelled"):
            given["ended"] = T0 - 20_000
        if state == "running":
            given |= {"worker": trainer_name(run), "spawn": 1}
        return self.row("job", run_id=run, kind=kind, step=step, state=state, **(given | values))

    def checkpoint(self, run: int, step: int, job: int, state: str = "committed", **values: Any) -> int:
        relative = f"checkpoints/toy/l0-s{step:06d}-j{job}-f1"
        sha = write_checkpoint(self.data / relative)
        given = {"epoch": step, "lineage": 0, "bytes": 5_000_000, "created": T0 - 20_000, "sha": sha, "dir": relative}
        return self.row("checkpoint", run_id=run, step=step, job_id=job, state=state, **(given | values))

    def push(self, run: int, checkpoint: int, state: str, **values: Any) -> int:
        given = {
            "engine": engine_name(run),
            "mode": "merged",
            "source": "live",
            "transfer": "gloo",
            "fence": 1,
            "created": T0 - 19_000,
        }
        return self.row("push", run_id=run, checkpoint_id=checkpoint, state=state, **(given | values))

    def worker(self, name: str, state: str, **values: Any) -> int:
        worker = parse_worker(name)
        given = {"kind": worker.kind, "run_id": worker.run or None, "replica": worker.replica}
        given |= {"boot": 1, "boot_id": "gone", "spawn": 1, "pid": 99, "ticks": 1, "since": T0 - 90_000}
        return self.row("process", name=name, state=state, **(given | values))

    def event(self, kind: str, ref: str = "", run: str = "toy", age_ms: int = 1000, **data: Any) -> int:
        return self.row("event", at=T0 - age_ms, run=run, kind=kind, ref=ref, data=data)


def write_checkpoint(folder: Path) -> str:
    """A folder with an adapter and a manifest that tells of it; returns the manifest's sha256."""
    folder.mkdir(parents=True)
    files = []
    for name, content in ADAPTER.items():
        (folder / name).write_bytes(content)
        files.append({"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    manifest = json.dumps({"files": files}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    return hashlib.sha256(manifest).hexdigest()


def busy(data: Path) -> Made:
    """A run at step 2 that trains step 3 while step 2 is served: the picture that the golden files show."""
    made = Made(data)
    made.row("meta", key="clean", value="0")
    old = made.run("old", "finished", 1, created=T0 - 90_000_000)
    run = made.run()
    for number, state in enumerate(("trained", "trained", "packed", "sealed", "open")):
        made.group(run, f"g{number}", state)
    made.group(run, "flat", "discarded", reason="zero_variance")
    made.group(run, "held", "open", split="eval", size=3)
    done, packed = made.batch(run, 2, "trained"), made.batch(run, 3, "packed")
    made.trajectory(run, 1, "a", state="trained", batch_id=done, epoch_min=1, epoch_max=1, reward=1.0)
    made.trajectory(run, 3, "b", state="packed", batch_id=packed, epoch_min=1, epoch_max=2)
    made.trajectory(run, 6, "c", state="discarded", reason="zero_variance")
    made.trajectory(run, 7, "d", split="eval")
    made.job(old, "init", 0, "succeeded")
    init = made.job(run, "init", 0, "succeeded", seconds={"write": 0.5})
    train = made.job(run, "train", 2, "succeeded", batch_id=done, metrics={"loss": 0.25}, seconds={"train": 9.0})
    now = made.job(run, "train", 3, "running", batch_id=packed, fence=2, attempts=1)
    times = {"started": T0 - 38_000, "ended": T0 - 35_000, "outcome": "transient", "error": "the disk was slow"}
    made.row("attempt", job_id=now, fence=1, worker=trainer_name(run), spawn=1, **times)
    made.row("attempt", job_id=now, fence=2, worker=trainer_name(run), spawn=1, started=T0 - 30_000)
    first = made.checkpoint(run, 0, init, "retired")
    second = made.checkpoint(run, 2, train, parent_id=first)
    made.push(run, first, "superseded", ended=T0 - 20_000)
    seconds = {"pause": 0.1, "transfer": 1.5, "verify": 0.2}
    made.push(run, second, "live", seconds=seconds, max_abs=2e-6, mean_abs=1e-7, ended=T0 - 17_000)
    times = {"created": T0 - 60_000, "touched": T0 - 50_000}
    made.row("rollout", run_id=run, name="t1", state="submitted", trajectory_id=1, **times)
    open_one = made.row("rollout", run_id=run, name="t2", state="open", **times)
    made.row("rollout", run_id=run, name="t3", state="expired", **times)
    for name, delivery in (("x", "superseded"), ("y", "delivered")):
        of = {"rollout_id": open_one, "delivery": delivery, "created": T0 - 50_000}
        made.row("exchange", run_id=run, response_id=name, choice=0, model="toy@2", split="train", turn=b"x", **of)
    made.row(
        "serving",
        engine=engine_name(run),
        spawn=1,
        run_id=run,
        checkpoint_id=second,
        name="toy",
        state="live",
        created=T0 - 17_000,
    )
    made.worker(trainer_name(run), "busy", restarts=1)
    made.worker(engine_name(run), "ready")
    made.worker("gateway", "ready")
    made.event("run.created", "toy", age_ms=7_200_000, model="/models/toy")
    made.event("trajectory.submitted", "4", age_ms=50_000)
    made.event("step.committed", "2", age_ms=20_000, sha="5" * 64, metrics={"loss": 0.25})
    made.event("push.live", "2", age_ms=17_000, seconds=seconds)
    return made
