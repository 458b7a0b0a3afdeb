"""The packer service: sees that a batch is due, has a child pack it, and commits batch and train job together.

Owner of: batch rows until trained, the state `packed` of trajectories. Invariants: files first, rows second; the
child's word is not enough: its files are hashed again here; one transaction makes {blobs, batch, trajectories and
groups packed, train job, event}; the replay bundle belongs to its batch from that transaction on.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec

from artd_schema.codec import UNREADABLE, digest
from artd_schema.crashpoint import reach
from artd_schema.manifest import BatchManifest
from artd_schema.spec import RunSpec

from ..core.decide import Group, batch_to_pack
from ..rundir import DataDir
from ..store import fs
from ..store.blobs import Blobs, add_row
from ..store.store import Store, emit, move
from ..supervise.spawn import death_pipe, guarded
from ..views import active_run, load_run, route_shape
from .child import MANIFEST, REPLAY, REPLAY_MANIFEST, TENSORS, PackFailure, PackRequest, PackResult, WrittenFile

log = logging.getLogger(__name__)
RETRY_S = 5.0


class Blob(NamedTuple):
    """A file of a batch that is a blob now. kind: of the `blob` row."""

    kind: str
    sha: str
    bytes: int


class Packer:
    """One batch at a time, in an exec'ed child, so that packing never holds the event loop. lacks(bytes): why there is no
    room to write so much; "" when there is."""

    def __init__(self, store: Store, blobs: Blobs, data: DataDir, lacks: Callable[[int], str]) -> None:
        self._lacks = lacks
        self._store = store
        self._blobs = blobs
        self._data = data

    async def run(self) -> None:
        """Pack whatever is due, until cancelled."""
        failed = 0
        while True:
            changed = self._store.change()
            request, groups = await self._store.write(self._due)
            if request is None:
                await changed.wait()
            elif self._lacks(0):
                await anyio.sleep(RETRY_S)
            elif await self._pack(request, groups):
                failed = 0
            elif (failed := failed + 1) > 1:  # a first failure may be a child's chance death: again at once
                await anyio.sleep(RETRY_S)

    def _due(self, c: sqlite3.Connection) -> tuple[PackRequest | None, tuple[Group, ...]]:
        row = active_run(c)
        groups = batch_to_pack(load_run(c, row["id"])) if row else ()
        if row is None:
            return None, ()
        if not groups:
            if row["flush"] and row["state"] == "active" and not load_run(c, row["id"]).job:
                c.execute("UPDATE run SET flush = 0 WHERE id = ?", (row["id"],))  # there was nothing to flush
            return None, ()
        spec = msgspec.json.decode(row["spec"], type=RunSpec)
        ids: list[int] = []
        for group in groups:
            members = c.execute("SELECT id FROM trajectory WHERE group_id = ? ORDER BY id", (group.id,))
            ids.extend(member["id"] for member in members)
        step = row["step"] + 1
        request = PackRequest(
            run=row["name"],
            step=step,
            seed=spec.seed + step,
            row_length=spec.row_length,
            scale_rewards=spec.scale_rewards,
            base_digest=row["base_digest"],
            routes=route_shape(row),
            db=str(self._store.path),
            blobs_dir=str(self._blobs.root),
            trajectory_ids=ids,
            # A packer that outlived its daemon must not write into the next one's folder.
            out_dir=str(self._data.tmp / f"pack-s{step}-{os.getpid()}"),
        )
        return request, groups

    async def _pack(self, request: PackRequest, groups: tuple[Group, ...]) -> bool:
        started = self._store.clock.monotonic()
        out = Path(request.out_dir)
        await anyio.to_thread.run_sync(fs.remove_tree, out)
        reach("pack.requested")
        answer = await run_child(request)
        if isinstance(answer, PackFailure):
            log.warning("packing step %d failed: %s", request.step, answer.error)
            return await self._store.write(lambda c: self._failed(c, request, groups, answer))
        try:
            blobs, manifest = await anyio.to_thread.run_sync(self._adopt_all, out, answer)
        except OSError as error:
            if not fs.is_full(error):
                raise
            log.warning("step %d cannot be packed now: %s", request.step, error)
            return False
        await anyio.to_thread.run_sync(fs.remove_tree, out)
        seconds = self._store.clock.monotonic() - started
        reach("pack.adopted")
        await self._store.write(lambda c: self._commit(c, groups, answer, manifest, blobs, seconds))
        reach("pack.committed")
        return True

    def _adopt_all(self, out: Path, answer: PackResult) -> tuple[dict[str, Blob], BatchManifest]:
        """The batch's blobs by column of the batch row, and what its manifest says: of a large batch many megabytes."""
        files = {
            "tensors": ("batch", TENSORS, answer.tensors),
            "manifest": ("manifest", MANIFEST, answer.manifest),
            "replay": ("replay", REPLAY, answer.replay),
            "replay_manifest": ("manifest", REPLAY_MANIFEST, answer.replay_manifest),
        }
        blobs = {
            column: Blob(kind, *self._adopt(out / name, written))
            for column, (kind, name, written) in files.items()
            if written
        }
        raw = self._blobs.path(blobs["manifest"].sha).read_bytes()
        return blobs, msgspec.json.decode(raw, type=BatchManifest)

    def _adopt(self, path: Path, written: WrittenFile) -> tuple[str, int]:
        sha, size = self._blobs.adopt(path)
        if sha != written.sha256:
            raise OSError(
                f"{path} has sha256 {sha}, the packer wrote {written.sha256}: the disk returns other bytes than it was given"
            )
        return sha, size

    def _commit(
        self,
        c: sqlite3.Connection,
        groups: tuple[Group, ...],
        result: PackResult,
        manifest: BatchManifest,
        blobs: dict[str, Blob],
        seconds: float,
    ) -> None:
        now = self._store.clock.now_ms()
        run = c.execute("SELECT * FROM run WHERE name = ?", (manifest.run,)).fetchone()
        if run["step"] + 1 != manifest.step or run["state"] != "active":
            return  # the run moved on meanwhile; the next look at the rows decides again
        if self._blobs.missing(blob.sha for blob in blobs.values()):
            return  # collected before its row came: packed again
        for blob in blobs.values():
            add_row(c, blob.sha, blob.bytes, blob.kind, now)
        batch = _insert_batch(c, now, run["id"], manifest, result, {name: blob.sha for name, blob in blobs.items()})
        reasons = {drop.trajectory: drop.reason for drop in manifest.drops}
        for packed in manifest.trajectories:
            if packed.rows:
                move(c, "trajectory", packed.id, "packed", start="queued", batch_id=batch)
            elif c.execute("SELECT 1 FROM trajectory WHERE id = ? AND state = 'queued'", (packed.id,)).fetchone():
                move(c, "trajectory", packed.id, "discarded", start="queued", reason=reasons.get(packed.id, "dropped"))
            # Else it was dropped before, from a batch that was cancelled; its reward still counts for its group.
        kept = {packed.group for packed in manifest.trajectories if packed.rows}
        for group in groups:
            if group.id in kept:
                move(c, "trajectory_group", group.id, "packed", start="sealed")
            else:
                move(
                    c, "trajectory_group", group.id, "discarded", start="sealed", reason="no trajectory could be packed"
                )
        spent = msgspec.json.encode({"pack": seconds})
        c.execute(
            "INSERT INTO job (run_id, kind, step, epoch, batch_id, parent_id, state, seconds, created)"
            " VALUES (?, 'train', ?, ?, ?, ?, 'queued', ?, ?)",
            (run["id"], manifest.step, run["next_epoch"], batch, run["checkpoint_id"], spent, now),
        )
        c.execute("UPDATE run SET next_epoch = next_epoch + 1, flush = 0 WHERE id = ?", (run["id"],))
        emit(
            c, now, manifest.run, "batch.packed", batch, step=manifest.step, rows=result.rows, fill=result.fill,
            trajectories=len(manifest.trajectories), logical_tokens=result.logical_tokens,
            physical_tokens=result.physical_tokens, trainable_tokens=result.trainable_tokens, seconds=seconds,
            **({"covered": result.covered, "unshared_tokens": result.unshared_tokens} if result.replay else {}),
        )  # fmt: skip

    def _failed(
        self, c: sqlite3.Connection, request: PackRequest, groups: tuple[Group, ...], answer: PackFailure
    ) -> bool:
        """Discard what can never be packed; True when trying again at once makes sense."""
        now = self._store.clock.now_ms()
        emit(
            c, now, request.run, "batch.failed", request.step, error=answer.error, trajectory=answer.trajectory,
            position=answer.position,
        )  # fmt: skip
        if answer.trajectory:
            row = c.execute("SELECT group_id FROM trajectory WHERE id = ?", (answer.trajectory,)).fetchone()
            bad = [row["group_id"]] if row else []
        else:
            bad = [group.id for group in groups] if answer.drops else []
        for group in bad:
            move(c, "trajectory_group", group, "discarded", start="sealed", reason=answer.error)
            c.execute("UPDATE trajectory SET state = 'discarded', reason = ? WHERE group_id = ?", (answer.error, group))
        if bad:
            own = [(drop.reason, drop.trajectory) for drop in answer.drops]
            c.executemany("UPDATE trajectory SET reason = ? WHERE id = ? AND state = 'discarded'", own)
        return bool(bad)


def _insert_batch(
    c: sqlite3.Connection, now: int, run: int, manifest: BatchManifest, result: PackResult, shas: dict[str, str]
) -> int | None:
    """The batch row. shas: blobs by column."""
    columns = {
        "run_id": run,
        "step": manifest.step,
        "state": "packed",
        **shas,
        "covered": result.covered if result.replay else None,
        "trajectories": len(manifest.trajectories),
        "tokens": result.physical_tokens,
        "fill": result.fill,
        "created": now,
    }
    names = ", ".join(columns)
    return c.execute(f"INSERT INTO batch ({names}) VALUES (:{', :'.join(columns)})", columns).lastrowid


async def run_child(request: PackRequest) -> PackResult | PackFailure:
    """Exec `python -m artd.packing.child` for one batch, under a guardian: it does not outlive the daemon."""
    try:
        with (
            death_pipe() as death,
            tempfile.TemporaryFile() as question,
        ):  # a pipe would break when the child dies early
            question.write(msgspec.json.encode(request))
            question.seek(0)
            command = guarded(death, [sys.executable, "-m", "artd.packing.child"])
            done = await anyio.run_process(
                command, stdin=question, check=False, start_new_session=True, pass_fds=(death,)
            )
    except OSError as error:  # no more processes, memory or descriptors: as with a worker, another time
        return PackFailure(error=f"no packer could be started: {error}")
    try:
        return msgspec.json.decode(done.stdout, type=PackResult | PackFailure)
    except UNREADABLE:
        tail = done.stderr.decode(errors="replace").strip()[-2000:]
        return PackFailure(error=f"the packer ended with status {done.returncode}: {tail or digest(done.stdout)}")
