"""Trajectories come in: by value, or by reference to the gateway's ledger; groups seal.

Owner of: trajectory_group, trajectory (until packed), exchange; the rows of trajectories are written by `intake`, those by
reference are put together by `references`.
Invariants: an answer leaves after its COMMIT; a dedup key is taken for ever; a group seals once, and one without variance
is discarded then; large bodies are decoded, checked and hashed in threads, never in the event loop or the writer.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
from asyncio import Future
from collections.abc import Callable

import anyio
import anyio.to_thread
import msgspec

from artd_schema import client_api as api
from artd_schema import worker as w
from artd_schema.codec import UNREADABLE, digest, to_json
from artd_schema.crashpoint import reach
from artd_schema.spec import RunSpec
from artd_schema.trajectory import Turn

from . import references
from .core.fields import InvalidField
from .core.validate import check_turns, epoch_range
from .errors import Busy, Invalid, NotFound, RequestError
from .intake import Answer, Intake, Parcel, RunFacts, seal_group
from .store.blobs import Blobs, add_row
from .store.store import Store, emit
from .views import route_shape

_turns = msgspec.msgpack.Decoder(list[Turn])
LOOK_S = 5.0  # a clock that is set back makes a deadline look far away
DUE = "SELECT id FROM trajectory_group WHERE state = 'open' AND deadline <= ?"


class Ingest:
    """submit, seal, flush for clients; exchanges for the gateway; `run` seals groups at their deadline.

    max_inline: bytes of a body, or of a turn of the ledger, kept in its row; admit: raises Busy when nothing more may be taken;
    jumped: whether the clock did, and stored deadlines do not count yet.
    """

    def __init__(
        self, store: Store, blobs: Blobs, max_inline: int, admit: Callable[[], None] = lambda: None,
        jumped: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._store = store
        self._admit = admit
        self._jumped = jumped
        self._blobs = blobs
        self._max_inline = max_inline
        self._intake = Intake(store)
        self._runs: dict[str, RunFacts] = {}

    async def facts(self, name: str) -> RunFacts:
        """Errors: NotFound."""
        if name not in self._runs:
            rows = await self._store.read("SELECT id, spec, vocab_size, routes FROM run WHERE name = ?", (name,))
            if not rows:
                raise NotFound(f"there is no run {name!r}; create it with Client.run({name!r}, model=...)", field="run")
            spec = msgspec.json.decode(rows[0]["spec"], type=RunSpec)
            self._runs[name] = RunFacts(rows[0]["id"], spec, rows[0]["vocab_size"], route_shape(rows[0]))
        return self._runs[name]

    # ---- trajectories -------------------------------------------------------------------------------------------------

    def submit_now(self, op: api.Submit, bulk: list[bytes], answer: Answer) -> bool:
        """The fast way for a small trajectory by value of a known run; False when it needs `submit`. Errors:
        RequestError at once; `answer` gets what comes later."""
        run = self._runs.get(op.run)
        if run is None or op.refs or len(bulk) != 1 or len(bulk[0]) > self._max_inline:
            return False
        self._admit()
        self._intake.put(self._check(op, run, bulk[0]), answer)
        return True

    async def submit(self, op: api.Submit, bulk: list[bytes]) -> api.Submitted:
        self._admit()
        run = await self.facts(op.run)
        if op.refs:
            if bulk:
                raise Invalid("a trajectory is submitted by reference or by value, not both", field="refs")
            _check_header(op)
            return await self._by_reference(op, run)
        if len(bulk) != 1:
            raise Invalid(f"by value a submit has one bulk frame, msgpack list[Turn]; got {len(bulk)}", field="turns")
        if len(bulk[0]) <= self._max_inline:
            return await self._put(self._check(op, run, bulk[0]))
        return await self._put(await anyio.to_thread.run_sync(self._check_large, op, run, bulk[0]))

    def _check_large(self, op: api.Submit, run: RunFacts, body: bytes) -> Parcel:
        """What takes long with a large body: away from the event loop."""
        return self._to_blob(self._check(op, run, body))

    def _to_blob(self, parcel: Parcel) -> Parcel:
        """The parcel with its body in a file, if it is too large for a row."""
        if parcel.body is None or parcel.size <= self._max_inline:
            return parcel
        sha = self._blobs.put(parcel.body)
        return parcel._replace(body=None, blob=sha, file=self._blobs.path(sha))

    async def _put(self, parcel: Parcel) -> api.Submitted:
        future: Future[api.Submitted] = asyncio.get_running_loop().create_future()

        def answer(outcome: api.Submitted | BaseException) -> None:
            if future.cancelled():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self._intake.put(parcel, answer)
        return await future

    def _check(self, op: api.Submit, run: RunFacts, body: bytes) -> Parcel:
        _check_header(op)
        try:
            turns = _turns.decode(body)
            tokens = check_turns(turns, run.vocab_size, op.split == "train", None, run.routes)
        except UNREADABLE as error:
            raise Invalid(f"the body is not msgpack list[Turn]: {error}", field="turns") from None
        except InvalidField as error:
            raise Invalid(str(error), field=error.field) from None
        if not tokens:
            raise Invalid("no turn has a sampled token", field="turns")
        sha = digest(body)
        return Parcel(
            op, run, op.key or sha, _content(op, sha), sha, body, None, len(body), tokens, epoch_range(turns), _extra(op)
        )  # fmt: skip

    async def _by_reference(self, op: api.Submit, run: RunFacts) -> api.Submitted:
        key = op.key or digest(to_json(op.refs))
        parcel = Parcel(op, run, key, _content(op, op.refs), "", None, None, 0, 0, (None, None), _extra(op))
        exchanges: list[sqlite3.Row] = []
        problem: RequestError | None = None
        try:
            exchanges = await references.read_exchanges(self._store, op, run)
            if any(row["blob"] for row in exchanges) or sum(len(row["turn"]) for row in exchanges) > self._max_inline:
                parcel = await anyio.to_thread.run_sync(self._compose_large, parcel, exchanges)
            else:
                parcel = references.compose(parcel, exchanges, self._blobs)
        except RequestError as error:
            problem = error
        now = self._store.clock.now_ms
        return await self._store.write(lambda c: references.insert(c, now(), parcel, exchanges, problem))

    def _compose_large(self, parcel: Parcel, exchanges: list[sqlite3.Row]) -> Parcel:
        return self._to_blob(references.compose(parcel, exchanges, self._blobs))

    # ---- groups -------------------------------------------------------------------------------------------------------

    async def seal(self, op: api.Seal) -> api.GroupInfo:
        run = await self.facts(op.run)

        def write(c: sqlite3.Connection) -> api.GroupInfo:
            row = c.execute(
                "SELECT id, state FROM trajectory_group WHERE run_id = ? AND name = ?", (run.id, op.group)
            ).fetchone()
            if row is None:
                raise NotFound(f"run {op.run!r} has no group {op.group!r}", field="group")
            if row["state"] == "open":
                seal_group(c, self._store.clock.now_ms(), row["id"])
            done = c.execute("SELECT state, size, reason FROM trajectory_group WHERE id = ?", (row["id"],)).fetchone()
            return api.GroupInfo(group=op.group, state=done["state"], size=done["size"], reason=done["reason"])

        return await self._store.write(write)

    async def flush(self, op: api.Flush) -> api.Done:
        run = await self.facts(op.run)

        def write(c: sqlite3.Connection) -> api.Done:
            now = self._store.clock.now_ms()
            open_groups = c.execute("SELECT id FROM trajectory_group WHERE run_id = ? AND state = 'open'", (run.id,))
            for row in open_groups.fetchall():
                seal_group(c, now, row["id"])
            c.execute("UPDATE run SET flush = 1 WHERE id = ?", (run.id,))
            emit(c, now, op.run, "run.flushed")
            return api.Done()

        return await self._store.write(write)

    async def run(self) -> None:
        """Seal groups at their deadline, until cancelled."""
        while True:
            changed = self._store.change()
            rows = await self._store.read("SELECT min(deadline) FROM trajectory_group WHERE state = 'open'")
            next_deadline = rows[0][0]
            if next_deadline is None:
                await changed.wait()
                continue
            left = (next_deadline - self._store.clock.now_ms()) / 1000
            if left <= 0 and await self._store.write(self._seal_due):
                continue
            with anyio.move_on_after(min(max(left, 0.1), LOOK_S)):
                await changed.wait()

    def _seal_due(self, c: sqlite3.Connection) -> bool:
        """Seal what is due; False while the deadlines are those of a clock that has jumped since."""
        now = self._store.clock.now_ms()
        if self._jumped():
            return False
        for row in c.execute(DUE, (now,)).fetchall():
            seal_group(c, now, row["id"])
        return True

    # ---- the gateway's ledger -----------------------------------------------------------------------------------------

    async def exchange(self, message: w.Exchange, bulk: list[bytes]) -> w.ExchangeAck:
        """Write one response, all its choices, to the ledger; the answer is durable. Errors: Busy."""
        self._admit()
        run = await self.facts(message.run)
        if len(bulk) != message.choices:
            return w.ExchangeAck(
                response_id=message.response_id, error=f"{len(bulk)} turns for {message.choices} choices"
            )
        stored = await self._stored(bulk)
        now = self._store.clock.now_ms()
        rows = [
            (run.id, message.response_id, choice, message.model, message.split, turn, blob, now)
            for choice, (turn, blob) in enumerate(stored)
        ]

        def write(c: sqlite3.Connection) -> None:
            if gone := self._blobs.missing(blob for _, blob in stored if blob):
                raise Busy(f"the file {gone[0]} was collected before its row came; send the response again")
            for turn, (_, blob) in zip(bulk, stored, strict=True):
                if blob:
                    add_row(c, blob, len(turn), "exchange", now)
            c.executemany(
                "INSERT INTO exchange (run_id, response_id, choice, model, split, turn, blob, created)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run_id, response_id, choice) DO NOTHING",
                rows,
            )

        await self._store.write(write)
        reach("exchange.committed")
        return w.ExchangeAck(response_id=message.response_id)

    async def _stored(self, bulk: list[bytes]) -> list[tuple[bytes | None, str | None]]:
        """Of each turn what goes into its row: itself, or the blob that it is in now."""

        def put() -> list[tuple[bytes | None, str | None]]:
            return [(None, self._blobs.put(turn)) if len(turn) > self._max_inline else (turn, None) for turn in bulk]

        if any(len(turn) > self._max_inline for turn in bulk):
            return await anyio.to_thread.run_sync(put)
        return [(turn, None) for turn in bulk]


def _check_header(op: api.Submit) -> None:
    if not math.isfinite(op.reward):
        raise Invalid(f"reward {op.reward} is not finite", field="reward")
    if not 1 <= len(op.group) <= 256:
        raise Invalid("a group's name has 1 to 256 characters", field="group")
    if len(op.key) > 256:
        raise Invalid("a key has at most 256 characters", field="key")


def _extra(op: api.Submit) -> bytes:
    return msgspec.json.encode({"metrics": op.metrics, "metadata": op.metadata})


def _content(op: api.Submit, what: object) -> str:
    """Digest of everything that was submitted. Errors: Invalid when `metadata` is not JSON."""
    try:
        return digest(to_json([op.group, op.reward, op.split, what, op.metrics, op.metadata]))
    except (TypeError, ValueError) as error:
        raise Invalid(f"metadata cannot be written as JSON: {error}", field="metadata") from None
