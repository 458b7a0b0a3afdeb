"""The packer service: sees that a batch is due, has a child pack it, and commits batch and train job together.

Invariants: files first, rows second; the
child's word is not enough: its files are hashed again here; a failure is settled by `failures`; one transaction makes {blobs, batch, trajectories and
groups packed, train job, event}; the replay bundle belongs to its batch from that transaction on.
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
from artd.store.views import active_runs, load_run, route_shape, stored_spec
from artd.tables.batches import insert_batch
from artd.tables.groups import mark_discarded, mark_packed
from artd.tables.jobs import insert_train_job
from artd.tables.runs import end_flush, note_packed
from artd.tables.trajectories import drop_trajectory, pack_trajectory
from artd_schema.crashpoint import reach
from artd_schema.data.manifest import BatchManifest

from . import failures
from .child import MANIFEST, REPLAY, REPLAY_MANIFEST, TENSORS, PackFailure, PackRequest, PackResult, WrittenFile
from .process import STALL_S, run_child

log = logging.getLogger(__name__)
RETRY_S = 5.0
EQUAL = 3
"""Failures of the packing code itself, of one batch by one exception, after which the guilty group is looked for."""
_serial = itertools.count()


class Blob(NamedTuple):
    """A file of a batch that is a blob now. kind: of the `blob` row."""

    kind: str
    sha: str
    bytes: int


class Equal:
    """Counts failures of the same batch by the same error."""

    def __init__(self) -> None:
        self._last: tuple[object, ...] = ()
        self._count = 0

    def seen(self, *what: object) -> int:
        """How often this came in a row, now included."""
        self._count = self._count + 1 if what == self._last else 1
        self._last = what
        return self._count


class Failing:
    """What the packer remembers of a run whose batch fails: how often in a row, and when it tries again (anyio's clock)."""

    def __init__(self) -> None:
        self.equal = Equal()
        self.times = 0
        self.due = 0.0

    def again(self) -> None:
        """Count a failure, and put the next try off."""
        self.times += 1
        self.due = anyio.current_time() + failures.delay_s(self.times)


class Packer:
    """Packs one batch at a time, of any run, in an exec'ed child, so that packing never holds the event loop.

    `lacks(bytes)` returns why there is no room to write so much, "" when there is. The packer ends a child that does nothing for
    `stall_s` seconds. A run whose batch fails waits for its next try; the other runs do not wait for it.
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
        """Pack whatever is due, until cancelled."""
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
        """Wait for a change, or for the next try of a run that fails."""
        with anyio.CancelScope(deadline=min((failing.due for failing in self._failing.values()), default=math.inf)):
            await changed.wait()

    def _due(
        self, c: sqlite3.Connection, waiting: Collection[str] = ()
    ) -> tuple[PackRequest | None, tuple[Group, ...]]:
        """Return the request for the first run with a batch to pack, and the groups of that batch. `waiting` names the runs that
        wait for their next try."""
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
            db=str(self._store.path),
            blobs_dir=str(self._blobs.root),
            trajectory_ids=ids,
            # A packer that outlived its daemon, or does not die, must not write into the next one's folder.
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
        except OSError as error:  # fsync is none of these: its errors end the daemon
            return await self._failed(request, groups, PackFailure(error=f"{type(error).__name__}: {error}"))
        await anyio.to_thread.run_sync(fs.remove_tree, out)
        seconds = self._store.clock.monotonic() - started
        reach("pack.adopted")
        await self._store.write(lambda c: self._commit(c, groups, answer, manifest, blobs, seconds))
        reach("pack.committed")
        return True

    async def _failed(self, request: PackRequest, groups: tuple[Group, ...], answer: PackFailure) -> bool:
        """True when trying again at once makes sense."""
        log.warning("packing step %d failed: %s", request.step, answer.error)
        ids = [group.id for group in groups]
        times = self._failing.setdefault(request.run, Failing()).equal.seen(
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
        """The group on which the packing code fails also without the others, while it packs another one; None when there is none,
        or it could not be tried."""
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
                return None  # only together
        for other in groups:
            # Tried after the search: code that fails on every group, now or since a moment ago, is no group's fault.
            if other != suspects[0] and _works(await self._try(request, [other])):
                return suspects[0]
        return None

    async def _try(self, request: PackRequest, groups: list[int]) -> PackResult | PackFailure:
        """Pack some of the groups, for nothing."""
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
        if run["step"] + 1 != manifest.step or run["state"] != "active" or not _all_sealed(c, groups):
            return  # the run moved on meanwhile, or a group was discarded; the next look at the rows decides again
        failures.clear(c, run["id"])
        if self._blobs.missing(blob.sha for blob in blobs.values()):
            return  # collected before its row came: packed again
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
            # Else it was dropped before, from a batch that was cancelled; its reward still counts for its group.
        kept = {packed.group for packed in manifest.trajectories if packed.rows}
        for group in groups:
            if group.id in kept:
                mark_packed(c, group.id)
            else:
                mark_discarded(c, group.id, "no trajectory could be packed", start="sealed")
        spent, measured = msgspec.json.encode({"pack": seconds}), msgspec.json.encode(manifest.metrics)
        insert_train_job(c, now, run, manifest.step, batch, measured, spent)
        note_packed(c, run["id"])
        emit(
            c, now, manifest.run, "batch.packed", batch, step=manifest.step, rows=result.rows, fill=result.fill,
            trajectories=len(manifest.trajectories), logical_tokens=result.logical_tokens,
            physical_tokens=result.physical_tokens, trainable_tokens=result.trainable_tokens, seconds=seconds,
            **({"covered": result.covered, "unshared_tokens": result.unshared_tokens} if result.replay else {}),
        )  # fmt: skip


def _note_idle(c: sqlite3.Connection, row: sqlite3.Row) -> None:
    """Note that a run has no batch to pack: nothing of it fails now, and a flush has nothing left to do."""
    failures.clear(c, row["id"])
    if row["flush"] and row["state"] == "active" and not load_run(c, row["id"]).job:
        end_flush(c, row["id"])


def _works(answer: PackResult | PackFailure) -> bool:
    """Whether the packing code itself came to its end."""
    return isinstance(answer, PackResult) or answer.kind == "data"


def _all_sealed(c: sqlite3.Connection, groups: Sequence[Group]) -> bool:
    state = "SELECT 1 FROM trajectory_group WHERE id = ? AND state = 'sealed'"
    return all(c.execute(state, (group.id,)).fetchone() for group in groups)


def _reasons(manifest: BatchManifest) -> dict[int, str]:
    """Of each trajectory that is not packed, or not as a whole, why: in full for the first of its sequences."""
    found: dict[int, list[str]] = {}
    for drop in manifest.drops:
        found.setdefault(drop.trajectory, []).append(drop.reason)
    return {
        trajectory: first + (f"; and {len(rest)} more" if rest else "") for trajectory, (first, *rest) in found.items()
    }


def _insert_batch(
    c: sqlite3.Connection, now: int, run: int, manifest: BatchManifest, result: PackResult, shas: dict[str, str]
) -> int | None:
    """The batch row. shas: blobs by column."""
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
