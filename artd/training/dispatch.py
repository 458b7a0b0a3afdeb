"""Gives train jobs to trainers: claims and sends them, watches their progress, and commits their results.

Every claim raises the job's fence, and every later effect is conditional on that fence. A job is taken back only when
its worker is proven dead; `lease` kills a silent worker and one whose job stands still. `Committed` is sent only after
COMMIT. A process that is no longer the worker changes nothing, and the daemon removes what it staged.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from artd.core.decide import job_to_claim
from artd.datadir.layout import DataDir
from artd.net.router import WorkerWire
from artd.store import fs
from artd.store.store import Store, emit
from artd.store.views import active_run, active_run_ids, load_worker, queued_jobs
from artd.supervise.lease import Holder
from artd.tables.jobs import end_attempt, insert_attempt, note_waiting, start_job
from artd.tables.processes import mark_busy, mark_free
from artd_schema.crashpoint import reach
from artd_schema.run.spec import Learning
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import trainer_name

from . import commit as result
from .commit import BadResult, Stale

log = logging.getLogger(__name__)
LOST_RUN_S = 5.0


@dataclass
class Claim:
    """The job that a trainer has now.

    `sent` is the monotonic time at which Run was last sent. `seen` says that the trainer knows of the job. `progress`
    is the value in its last heartbeat, -1 before the first. `stalled` says that the job made no progress for too long,
    so the daemon is ending the trainer.
    """

    run: w.Run
    trainer: str
    spawn: int
    sent: float
    seen: bool = False
    progress: int = -1
    stalled: bool = False


class Dispatch:
    """Gives each trainer one job at a time. The death of a trainer's process comes back through `take_back`."""

    def __init__(
        self, store: Store, wire: WorkerWire, data: DataDir, instance: str,
        lacks: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._lacks = lacks
        self._store = store
        self._wire = wire
        self._data = data
        self._instance = instance
        self._claims: dict[str, Claim] = {}  # by trainer
        self._committing: dict[tuple[int, int], anyio.Event] = {}

    async def run(self) -> None:
        """Claim jobs as they become due, until cancelled."""
        while True:
            changed = self._store.change()
            for run in await self._store.write(active_run_ids):
                await self._claim_next(run)
            self._send_again()
            with anyio.move_on_after(1.0):
                await changed.wait()

    async def _claim_next(self, run_id: int) -> None:
        """Send the run's next job to its trainer, if one is due."""
        name = trainer_name(run_id)
        spawn = self._wire.spawn(name)
        if name in self._claims or spawn is None:
            return
        order = await self._store.write(lambda c: self._claim_due(c, run_id))
        if order is None:
            return
        reach("job.claimed")
        if self._wire.spawn(name) != spawn:
            # the process died meanwhile: `take_back` takes the job back, and the next process must not get this order
            return
        self._claims[name] = Claim(order, name, spawn, self._store.clock.monotonic())
        self._wire.send(name, order)

    def _claim_due(self, c: sqlite3.Connection, run_id: int) -> w.Run | None:
        """Claim the run's next job for its trainer. Returns the order to send, None when nothing is due."""
        run = active_run(c, run_id)
        if run is None:
            return None
        now = self._store.clock.now_ms()
        trainer = load_worker(c, trainer_name(run_id))
        live = c.execute(
            "SELECT 1 FROM push WHERE run_id = ? AND state = 'sending' AND source = 'live' LIMIT 1", (run_id,)
        ).fetchone()
        chosen = job_to_claim(queued_jobs(c, run_id), trainer, run["state"], live is not None, now)
        if chosen is None or trainer is None or trainer.spawn != self._wire.spawn(trainer.name):
            return None
        job = c.execute("SELECT * FROM job WHERE id = ?", (chosen.id,)).fetchone()
        if self._must_wait(c, now, run["name"], job):
            return None
        fence = job["fence"] + 1
        start_job(c, now, job["id"], fence, trainer.name, trainer.spawn)
        mark_busy(c, now, trainer.name)
        insert_attempt(c, now, job["id"], fence, trainer.name, trainer.spawn)
        emit(c, now, run["name"], "job.claimed", job["id"], job=job["kind"], step=job["step"], fence=fence)
        return self._order(c, run, job, fence)

    def _must_wait(self, c: sqlite3.Connection, now: int, run: str, job: sqlite3.Row) -> bool:
        """Return whether the disk lacks room for the job's result, and write the reason into the job's row. The result
        is staged beside the last checkpoint and is assumed to be as large."""
        last = c.execute("SELECT bytes FROM checkpoint WHERE id = ?", (job["parent_id"],)).fetchone()
        why = self._lacks(2 * last["bytes"] if last else 0)
        if why != job["waiting"]:
            note_waiting(c, job["id"], why)
            if why:
                emit(c, now, run, "job.waiting", job["id"], why=why)
        return bool(why)

    def _order(self, c: sqlite3.Connection, run: sqlite3.Row, job: sqlite3.Row, fence: int) -> w.Run:
        parent = c.execute("SELECT * FROM checkpoint WHERE id = ?", (job["parent_id"],)).fetchone()
        batch = c.execute("SELECT * FROM batch WHERE id = ?", (job["batch_id"],)).fetchone()
        return w.Run(
            job=job["id"],
            fence=fence,
            kind=job["kind"],
            step=job["step"],
            epoch=job["epoch"],
            lineage=run["lineage"],
            dir=str(self._data.staging(job["id"], fence)),
            instance=self._instance,
            parent=checkpoint_ref(self._data, run["name"], parent) if parent else None,
            batch=self._data.blob(batch["tensors"]) if batch else "",
            manifest=self._data.blob(batch["manifest"]) if batch else "",
            batch_sha=batch["manifest"] if batch else "",
            replay=self._data.blob(batch["replay"]) if batch and batch["replay"] else "",
            replay_manifest=self._data.blob(batch["replay_manifest"]) if batch and batch["replay"] else "",
            learning=msgspec.json.decode(job["learning"], type=Learning) if job["learning"] else None,
        )

    def _send_again(self) -> None:
        now = self._store.clock.monotonic()
        for claim in self._claims.values():
            if not claim.seen and now - claim.sent > LOST_RUN_S:
                claim.sent = now
                self._wire.send(claim.trainer, claim.run)

    # ---- messages of trainers -------------------------------------------------------------------------------------

    def beat(self, name: str, message: w.Beat) -> bool:
        """Return whether the job of the trainer `name` went on since its last heartbeat."""
        claim = self._claims.get(name)
        if claim is None or (message.job, message.fence) != (claim.run.job, claim.run.fence):
            return False
        last, claim.progress, claim.seen = claim.progress, message.progress, True
        return message.progress != last

    def holders(self) -> list[Holder]:
        """Return the trainers whose jobs must make progress. A job whose result the daemon is committing is left out."""
        return [
            Holder(claim.trainer, claim.spawn)
            for claim in self._claims.values()
            if (claim.run.job, claim.run.fence) not in self._committing
        ]

    def mark_stalled(self, name: str, seconds: float) -> str:
        """Mark the job of the trainer `name` as stalled, which costs it an attempt. Returns why the trainer is ended."""
        claim = self._claims[name]
        claim.stalled = True
        run = claim.run
        return f"job {run.job} ({run.kind}, step {run.step}) made no progress for {seconds:.0f} s (limits.stall_s)"

    def take_accepted(self, name: str, message: w.Accepted) -> None:
        claim = self._claims.get(name)
        if claim is not None and claim.run.job == message.job:
            claim.seen = True

    async def take_staged(self, name: str, message: w.Staged) -> None:
        """Verify, publish and commit a result, and only then send Committed. A rejected result is removed. The same
        report is ignored while its result is being committed."""
        identity = (message.job, message.fence)
        if identity in self._committing:
            return
        self._committing[identity] = anyio.Event()
        try:
            answer = await self._finish(name, message)
            # Before the entry in `_committing` goes: removing gigabytes takes seconds, and the report comes again meanwhile.
            if not isinstance(answer, w.Committed):
                await anyio.to_thread.run_sync(fs.remove_tree, self._data.staging(*identity))
        finally:
            self._committing.pop(identity).set()
        self._release(*identity)
        self._wire.send(name, answer)

    async def _finish(self, name: str, message: w.Staged) -> w.Committed | w.Fenced | w.Ack:
        known = await self._store.write(lambda c: self._already(c, message))
        if known is not None:
            return known
        started = self._store.clock.monotonic()
        folder, relative = Path(message.dir), ""
        expected = self._data.staging(message.job, message.fence)
        try:
            if folder != expected:
                raise BadResult(f"the worker staged in {folder}, not in {expected}")
            sha, manifest = await anyio.to_thread.run_sync(result.verify, folder)
            if sha != message.manifest_sha or (manifest.job, manifest.fence) != (message.job, message.fence):
                raise BadResult(f"{folder} is not what the worker reported for job {message.job} fence {message.fence}")
            reach("result.verified")
            relative = await anyio.to_thread.run_sync(result.publish, self._data, folder, manifest)
            reach("result.published")
            seconds = message.seconds | {"commit": self._store.clock.monotonic() - started}

            def write(c: sqlite3.Connection) -> w.CheckpointRef:
                now = self._store.clock.now_ms()
                reference = result.commit(c, now, self._data, relative, sha, manifest, seconds)
                mark_free(c, now, name)
                return reference

            reference = await self._store.write(write)
            reach("result.committed")
        except BadResult as error:
            await self._end(message.job, message.fence, "rejected", str(error))
            await self._drop(relative)
            return w.Ack(job=message.job, fence=message.fence)
        except Stale as error:
            log.info("job %d fence %d: %s", message.job, message.fence, error)
            await self._end(message.job, message.fence, "interrupted", str(error))
            await self._drop(relative)
            return w.Fenced(job=message.job, fence=message.fence)
        except OSError as error:
            if not fs.is_full(error):
                raise
            await self._end(message.job, message.fence, "full", f"its result cannot be kept: {error}")
            await self._drop(relative)
            return w.Fenced(job=message.job, fence=message.fence)
        return w.Committed(job=message.job, fence=message.fence, checkpoint=reference)

    async def _drop(self, published: str) -> None:
        """Remove a result that was published but not committed. Its name contains (job, fence), so no other result has
        it."""
        if published:
            await anyio.to_thread.run_sync(fs.remove_tree, self._data.root / published)

    async def late(self, message: w.Staged | w.Failed | w.Beat) -> w.Committed | w.Fenced | None:
        """Return the answer to a process that is no longer the trainer.

        A process on another machine cannot be killed, only fenced. What it staged meanwhile is removed here: it may
        have been told that it is dead, and nobody else may remove it. Returns None while the end of its job is still
        being recorded: the process will ask again.
        """
        answer = await self._store.write(lambda c: self._already(c, message))
        if isinstance(answer, w.Fenced) and not isinstance(message, w.Beat):
            staging = self._data.staging(message.job, message.fence)
            try:
                await anyio.to_thread.run_sync(fs.remove_tree, staging)
            except OSError as error:  # the process still writes there, although it reported its end
                log.warning("%s stays until the next start: %s", staging, error)
        return answer

    def _already(self, c: sqlite3.Connection, message: w.Staged | w.Failed | w.Beat) -> w.Committed | w.Fenced | None:
        """Return the answer to a message whose (job, fence) is no longer running, None when it is running."""
        job = c.execute("SELECT state, fence FROM job WHERE id = ?", (message.job,)).fetchone()
        if job is not None and (job["state"], job["fence"]) == ("running", message.fence):
            return None
        row = c.execute(
            "SELECT k.*, r.name FROM checkpoint k JOIN run r ON r.id = k.run_id WHERE k.job_id = ? AND k.sha = ?",
            (message.job, message.manifest_sha if isinstance(message, w.Staged) else ""),
        ).fetchone()
        if row is None:
            return w.Fenced(job=message.job, fence=message.fence)
        return w.Committed(
            job=message.job, fence=message.fence, checkpoint=checkpoint_ref(self._data, row["name"], row)
        )

    async def take_failed(self, name: str, message: w.Failed) -> None:
        ended = await self._end(message.job, message.fence, message.failure, message.error, message.trace)
        reach("job.failed")
        self._release(message.job, message.fence)
        log.warning("job %d fence %d failed (%s): %s", message.job, message.fence, message.failure, message.error)
        answer = w.Ack if ended else w.Fenced
        self._wire.send(name, answer(job=message.job, fence=message.fence))

    async def take_back(self, name: str, spawn: int, ordered: bool, error: str, tail: str = "") -> None:
        """Take back the jobs of a trainer's process that is proven dead. A result that is being committed no longer
        needs its process, so that commit ends first. `tail` holds the last lines of the process's log."""
        for committing in list(self._committing.values()):
            await committing.wait()
        claim = self._claims.get(name)
        claim = claim if claim is not None and claim.spawn <= spawn else None
        failure = "died"
        if ordered:
            failure = "transient" if claim is not None and claim.stalled else "killed"

        def write(c: sqlite3.Connection) -> None:
            mine = "SELECT id, fence FROM job WHERE worker = ? AND spawn <= ?"
            for row in c.execute(mine, (name, spawn)).fetchall():
                self._end_in(c, row["id"], row["fence"], failure, error, tail)

        await self._store.write(write)
        if claim is not None:
            self._release(claim.run.job, claim.run.fence)
            staging = self._data.staging(claim.run.job, claim.run.fence)
            await anyio.to_thread.run_sync(fs.remove_tree, staging)

    async def _end(self, job: int, fence: int, failure: str, error: str, evidence: str = "") -> bool:
        return await self._store.write(lambda c: self._end_in(c, job, fence, failure, error, evidence))

    def _end_in(
        self, c: sqlite3.Connection, job_id: int, fence: int, failure: str, error: str, evidence: str = ""
    ) -> bool:
        job = c.execute(
            "SELECT * FROM job WHERE id = ? AND fence = ? AND state = 'running'", (job_id, fence)
        ).fetchone()
        if job is None:
            return False
        now = self._store.clock.now_ms()
        end_attempt(c, now, job, failure, error, evidence)
        mark_free(c, now, job["worker"])
        return True

    def _release(self, job: int, fence: int) -> None:
        self._claims = {
            name: claim for name, claim in self._claims.items() if (claim.run.job, claim.run.fence) != (job, fence)
        }

    def cancel_running(self, job: int) -> None:
        """Tell the trainer that has this job to stop it."""
        for claim in self._claims.values():
            if claim.run.job == job:
                self._wire.send(claim.trainer, w.Cancel(job=job, fence=claim.run.fence))


def checkpoint_ref(data: DataDir, run: str, row: sqlite3.Row) -> w.CheckpointRef:
    return w.CheckpointRef(
        run=run,
        step=row["step"],
        epoch=row["epoch"],
        lineage=row["lineage"],
        sha=row["sha"],
        dir=str(data.root / row["dir"]),
    )
