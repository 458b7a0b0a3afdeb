"""Notices that a batch is due, has a child pack it, and commits batch and train job together.

Files are written before rows. The daemon does not trust the child: it hashes the child's files again. `failures`
handles a failure. One transaction writes the blobs, the batch, its trajectories and groups as packed, the train job and
the event. From then on the replay bundle belongs to its batch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import sqlite3
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec

from artd.core.decide import Group, batch_to_pack
from artd.datadir.layout import DataDir
from artd.store import fs
from artd.store.blobs import Blobs, add_row
from artd.store.store import Store, emit
from artd.store.views import active_runs, learning_of, load_run, route_shape, stored_spec
from artd.tables.batches import insert_batch
from artd.tables.groups import mark_discarded, mark_packed
from artd.tables.jobs import insert_train_job
from artd.tables.runs import end_flush, note_packed
from artd.tables.trajectories import drop_trajectory, pack_trajectory
from artd_schema.codec import to_json
from artd_schema.crashpoint import reach
from artd_schema.data.manifest import BatchManifest

from . import failures
from .child import MANIFEST, REPLAY, REPLAY_MANIFEST, TENSORS, PackFailure, PackRequest, PackResult, WrittenFile
from .process import STALL_S, run_child

log = logging.getLogger(__name__)
RETRY_S = 5.0
EQUAL = 3
"""After this many failures of the packing code on one batch with one exception the packer looks for the guilty group."""
_serial = itertools.count()


class Blob(NamedTuple):
    """A file of a batch in the blob store. `kind` is that of its `blob` row."""

    kind: str
    sha: str
    bytes: int


class Equal:
    """Counts failures of the same batch with the same error."""

    def __init__(self) -> None:
        self._last: tuple[object, ...] = ()
        self._count = 0

    def count(self, *what: object) -> int:
        """Count a failure. Returns how often the same one came in a row, this one included."""
        self._count = self._count + 1 if what == self._last else 1
        self._last = what
        return self._count


class Failing:
    """The packer's memory of a run whose batch fails: how often in a row, and when it tries again (anyio's clock)."""

    def __init__(self) -> None:
        self.equal = Equal()
        self.times = 0
        self.due = 0.0

    def again(self) -> None:
        """Count a failure, and delay the next try."""
        self.times += 1
        self.due = anyio.current_time() + failures.delay_s(self.times)


class Packer:
    """Packs one batch at a time, of any run, in a child process, so that packing never blocks the event loop.

    `lacks(bytes)` returns why there is no room to write so many bytes, "" if there is room. A child that does nothing
    for `stall_s` seconds is killed. A run whose batch fails waits for its next try; the other runs do not wait for it.
    """

    def __init__(
        self, store: Store, blobs: Blobs, data: DataDir, lacks: Callable[[int], str], stall_s: float = STALL_S
    ) -> None:
        self._lacks = lacks
        self._stall_s = stall_s
        self._failing: dict[str, Failing] = {}
        self._store = store
        self._blobs = blobs
        self._data = data

    async def run(self) -> None:
        """Pack every batch that is due, until cancelled."""
        while True:
            changed = self._store.change()
            waiting = {run for run, failing in self._failing.items() if failing.due > anyio.current_time()}
            request, groups = await self._store.write(lambda c: self._due(c, waiting))  # noqa: B023
            if request is None:
                self._failing = {run: self._failing[run] for run in waiting}
                await self._rest(changed)
            elif self._lacks(0):
                await anyio.sleep(RETRY_S)
            elif await self._pack(request, groups):
                self._failing.pop(request.run, None)
            else:
                self._failing.setdefault(request.run, Failing()).again()

    async def _rest(self, changed: asyncio.Event) -> None:
        """Wait for a change, or for the next try of a failing run."""
        with anyio.CancelScope(deadline=min((failing.due for failing in self._failing.values()), default=math.inf)):
            await changed.wait()

    def _due(
        self, c: sqlite3.Connection, waiting: Collection[str] = ()
    ) -> tuple[PackRequest | None, tuple[Group, ...]]:
        """Return the request for the first run with a batch to pack, and the groups of that batch. `waiting` names the
        runs that wait for their next try."""
        for row in active_runs(c):
            groups = batch_to_pack(load_run(c, row["id"]))
            if not groups:
                _note_idle(c, row)
            elif row["name"] not in waiting:
                return self._request(c, row, groups), groups
        return None, ()

    def _request(self, c: sqlite3.Connection, row: sqlite3.Row, groups: tuple[Group, ...]) -> PackRequest:
        spec = stored_spec(row)
        ids: list[int] = []
        for group in groups:
            members = c.execute("SELECT id FROM trajectory WHERE group_id = ? ORDER BY id", (group.id,))
            ids.extend(member["id"] for member in members)
        step = row["step"] + 1
        return PackRequest(
            run=row["name"],
            step=step,
            seed=spec.seed + step,
            row_length=spec.row_tokens,
            scale_rewards=spec.scale_rewards,
            base_digest=row["base_digest"],
            routes=route_shape(row),
            advantages=spec.advantages,
            learning=learning_of(row),
            db=str(self._store.path),
            blobs_dir=str(self._blobs.root),
            trajectory_ids=ids,
            # A child that survives its daemon, or cannot be killed, must not write into the next child's folder.
            out_dir=str(self._data.packing(step, next(_serial))),
        )

    async def _pack(self, request: PackRequest, groups: tuple[Group, ...]) -> bool:
        started = self._store.clock.monotonic()
        out = Path(request.out_dir)
        await anyio.to_thread.run_sync(fs.remove_tree, out)
        reach("pack.requested")
        answer = await run_child(request, self._stall_s)
        if isinstance(answer, PackFailure):
            await anyio.to_thread.run_sync(fs.remove_tree, out)
            return await self._failed(request, groups, answer)
        try:
            blobs, manifest = await anyio.to_thread.run_sync(self._adopt_all, out, answer)
        except OSError as error:  # an error of fsync does not come here: it ends the daemon
            return await self._failed(request, groups, PackFailure(error=f"{type(error).__name__}: {error}"))
        await anyio.to_thread.run_sync(fs.remove_tree, out)
        seconds = self._store.clock.monotonic() - started
        reach("pack.adopted")
        await self._store.write(lambda c: self._commit(c, groups, answer, manifest, blobs, seconds))
        reach("pack.committed")
        return True

    async def _failed(self, request: PackRequest, groups: tuple[Group, ...], answer: PackFailure) -> bool:
        """Handle a failed try. Returns True if another try makes sense at once."""
        log.warning("packing step %d failed: %s", request.step, answer.error)
        ids = [group.id for group in groups]
        times = self._failing.setdefault(request.run, Failing()).equal.count(
            request.step, ids, answer.kind, answer.error
        )
        if answer.kind == "code" and times % EQUAL == 0:
            if len(ids) == 1:
                now = self._store.clock.now_ms()
                return await self._store.write(lambda c: failures.suspect(c, now, request, ids[0], answer))
            guilty = await self._guilty(request, ids)
            if guilty is not None:
                log.error("group %d is discarded: the packer fails on it: %s", guilty, answer.error)
                now = self._store.clock.now_ms()
                return await self._store.write(lambda c: failures.blame(c, now, guilty, answer.error))
        now = self._store.clock.now_ms()
        return await self._store.write(lambda c: failures.settle(c, now, request, ids, answer))

    async def _guilty(self, request: PackRequest, groups: list[int]) -> int | None:
        """Return the group on which the packing code fails even alone, while it packs another group. Returns None if
        there is no such group, or if the search could not try one."""
        suspects = groups
        while len(suspects) > 1:
            half = len(suspects) // 2
            for part in (suspects[:half], suspects[half:]):
                answer = await self._try(request, part)
                if isinstance(answer, PackFailure) and answer.kind == "code":
                    suspects = part
                    break
                if isinstance(answer, PackFailure) and answer.kind != "data":
                    return None
            else:
                return None  # the code fails only on both halves together
        for other in groups:
            # Only after the search: if the code fails on every group by now, the fault is not the group's.
            if other != suspects[0] and _works(await self._try(request, [other])):
                return suspects[0]
        return None

    async def _try(self, request: PackRequest, groups: list[int]) -> PackResult | PackFailure:
        """Pack some of the groups and discard the result, to see whether it works."""
        marks = ",".join("?" * len(groups))
        rows = await self._store.read(
            f"SELECT id FROM trajectory WHERE group_id IN ({marks}) ORDER BY group_id, id", groups
        )
        out = self._data.packing(request.step, next(_serial))
        part = msgspec.structs.replace(request, trajectory_ids=[row["id"] for row in rows], out_dir=str(out))
        answer = await run_child(part, self._stall_s)
        await anyio.to_thread.run_sync(fs.remove_tree, out)
        return answer

    def _adopt_all(self, out: Path, answer: PackResult) -> tuple[dict[str, Blob], BatchManifest]:
        """Move the batch's files into the blob store. Returns the blobs by column of the batch row, and the manifest.
        Takes long for a large batch."""
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
        if run["step"] + 1 != manifest.step or run["state"] != "active" or not _all_sealed(c, groups):
            return  # the run moved on meanwhile, or a group was discarded: the next look at the rows decides again
        learning = learning_of(run)
        if learning != manifest.learning:
            return  # changed meanwhile; the change counts for every batch committed after it, so this one is packed again
        failures.clear(c, run["id"])
        if self._blobs.missing(blob.sha for blob in blobs.values()):
            return  # a blob was garbage-collected before its row was committed: the batch is packed again
        for blob in blobs.values():
            add_row(c, blob.sha, blob.bytes, blob.kind, now)
        batch = _insert_batch(c, now, run["id"], manifest, result, {name: blob.sha for name, blob in blobs.items()})
        reasons = _reasons(manifest)
        for packed in manifest.trajectories:
            reason = reasons.get(packed.id, "" if packed.rows else "dropped")
            if packed.rows:
                if reason:
                    reason = f"trained without a part of it: {reason}"
                pack_trajectory(c, packed.id, batch, reason)
            elif c.execute("SELECT 1 FROM trajectory WHERE id = ? AND state = 'queued'", (packed.id,)).fetchone():
                drop_trajectory(c, packed.id, reason)
            # Otherwise an earlier batch, which was cancelled, dropped it. Its reward still counts for its group.
        kept = {packed.group for packed in manifest.trajectories if packed.rows}
        for group in groups:
            if group.id in kept:
                mark_packed(c, group.id)
            else:
                mark_discarded(c, group.id, "no trajectory could be packed", start="sealed")
        spent, measured = msgspec.json.encode({"pack": seconds}), msgspec.json.encode(manifest.metrics)
        insert_train_job(c, now, run, manifest.step, batch, to_json(learning), measured, spent)
        note_packed(c, run["id"])
        emit(
            c, now, manifest.run, "batch.packed", batch, step=manifest.step, rows=result.rows, fill=result.fill,
            trajectories=len(manifest.trajectories), logical_tokens=result.logical_tokens,
            physical_tokens=result.physical_tokens, trainable_tokens=result.trainable_tokens, seconds=seconds,
            **({"covered": result.covered, "unshared_tokens": result.unshared_tokens} if result.replay else {}),
        )  # fmt: skip


def _note_idle(c: sqlite3.Connection, row: sqlite3.Row) -> None:
    """Note that a run has no batch to pack: its packing no longer fails, and a flush is done."""
    failures.clear(c, row["id"])
    if row["flush"] and row["state"] == "active" and not load_run(c, row["id"]).job:
        end_flush(c, row["id"])


def _works(answer: PackResult | PackFailure) -> bool:
    """Return whether the packing code itself ran to its end."""
    return isinstance(answer, PackResult) or answer.kind == "data"


def _all_sealed(c: sqlite3.Connection, groups: Sequence[Group]) -> bool:
    state = "SELECT 1 FROM trajectory_group WHERE id = ? AND state = 'sealed'"
    return all(c.execute(state, (group.id,)).fetchone() for group in groups)


def _reasons(manifest: BatchManifest) -> dict[int, str]:
    """Return why a trajectory is not packed, or not as a whole: the full reason of its first sequence, and the number
    of further ones."""
    found: dict[int, list[str]] = {}
    for drop in manifest.drops:
        found.setdefault(drop.trajectory, []).append(drop.reason)
    return {
        trajectory: first + (f"; and {len(rest)} more" if rest else "") for trajectory, (first, *rest) in found.items()
    }


def _insert_batch(
    c: sqlite3.Connection, now: int, run: int, manifest: BatchManifest, result: PackResult, shas: dict[str, str]
) -> int | None:
    """Insert the batch's row and return its id. `shas` has the blobs by column."""
    columns = {
        "run_id": run,
        "step": manifest.step,
        **shas,
        "covered": result.covered if result.replay else None,
        "trajectories": len(manifest.trajectories),
        "tokens": result.physical_tokens,
        "fill": result.fill,
        "created": now,
    }
    return insert_batch(c, columns)
