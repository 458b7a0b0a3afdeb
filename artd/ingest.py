"""Trajectories come in: by value, or by reference to the gateway's ledger; groups seal.

Owner of: trajectory_group, trajectory (until packed), exchange; the rows of trajectories are written by `intake`.
Invariants: an answer leaves after its COMMIT; a dedup key is taken for ever; an exchange's choice belongs to at most
one trajectory; a group seals once, and one without variance is discarded then.
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
from artd_schema.codec import digest, to_json
from artd_schema.spec import RunSpec
from artd_schema.trajectory import Turn

from .core.validate import InvalidField, check_turns, epoch_range
from .errors import Conflict, Invalid, NotFound, RequestError
from .intake import Answer, Intake, Outcome, Parcel, RunFacts, insert_many, seal_group
from .store.blobs import Blobs
from .store.store import Store, emit

_turns = msgspec.msgpack.Decoder(list[Turn])
_turn = msgspec.msgpack.Decoder(Turn)
DUE = "SELECT id FROM trajectory_group WHERE state = 'open' AND deadline <= ?"


class Ingest:
    """submit, seal, flush for clients; exchanges for the gateway; `run` seals groups at their deadline.

    max_inline: bytes of a body kept in its row; admit: raises Busy when nothing more may be taken.
    """

    def __init__(self, store: Store, blobs: Blobs, max_inline: int, admit: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._admit = admit
        self._blobs = blobs
        self._max_inline = max_inline
        self._intake = Intake(store)
        self._runs: dict[str, RunFacts] = {}

    async def facts(self, name: str) -> RunFacts:
        """Errors: NotFound."""
        if name not in self._runs:
            rows = await self._store.read("SELECT id, spec, vocab_size FROM run WHERE name = ?", (name,))
            if not rows:
                raise NotFound(f"there is no run {name!r}; create it with Client.run({name!r}, model=...)", field="run")
            spec = msgspec.json.decode(rows[0]["spec"], type=RunSpec)
            self._runs[name] = RunFacts(rows[0]["id"], spec, rows[0]["vocab_size"])
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
            return await self._store.write(lambda c: self._insert_by_reference(c, op, run))
        if len(bulk) != 1:
            raise Invalid(f"by value a submit has one bulk frame, msgpack list[Turn]; got {len(bulk)}", field="turns")
        parcel = self._check(op, run, bulk[0])
        if parcel.size > self._max_inline:
            blob = await anyio.to_thread.run_sync(self._blobs.put, bulk[0])
            parcel = parcel._replace(body=None, blob=blob)
        return await self._put(parcel)

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
            tokens = check_turns(turns, run.vocab_size, op.split == "train")
        except msgspec.DecodeError as error:
            raise Invalid(f"the body is not msgpack list[Turn]: {error}", field="turns") from None
        except InvalidField as error:
            raise Invalid(str(error), field=error.field) from None
        if not tokens:
            raise Invalid("no turn has a sampled token", field="turns")
        sha = digest(body)
        return Parcel(
            op,
            run,
            op.key or sha,
            _content(op, sha),
            sha,
            body,
            None,
            len(body),
            tokens,
            epoch_range(turns),
            _extra(op),
        )

    def _insert_by_reference(self, c: sqlite3.Connection, op: api.Submit, run: RunFacts) -> api.Submitted:
        key = op.key or digest(to_json(op.refs))
        content = _content(op, op.refs)
        if c.execute("SELECT 1 FROM trajectory WHERE run_id = ? AND key = ?", (run.id, key)).fetchone():
            known = Parcel(op, run, key, content, "", None, None, 0, 0, (None, None), b"")
            return _one(insert_many(c, self._store.clock.now_ms(), [known]))  # its first answer, or Conflict
        rows = [self._exchange(c, run, op, index) for index in range(len(op.refs))]
        body = msgspec.msgpack.encode([msgspec.Raw(row["turn"]) for row in rows])
        turns = [_turn.decode(row["turn"]) for row in rows]
        next_epoch = c.execute("SELECT next_epoch FROM run WHERE id = ?", (run.id,)).fetchone()[0]
        try:
            tokens = check_turns(turns, run.vocab_size, op.split == "train", next_epoch)
        except InvalidField as error:
            raise Invalid(str(error), field=error.field) from None
        blob = None
        if len(body) > self._max_inline:
            blob = self._blobs.put(body)
        epochs = epoch_range(turns)
        inline = None if blob else body
        parcel = Parcel(op, run, key, content, digest(body), inline, blob, len(body), tokens, epochs, _extra(op))
        answer = _one(insert_many(c, self._store.clock.now_ms(), [parcel]))
        c.executemany(
            "UPDATE exchange SET trajectory_id = ? WHERE id = ?", [(answer.trajectory, row["id"]) for row in rows]
        )
        return answer

    def _exchange(self, c: sqlite3.Connection, run: RunFacts, op: api.Submit, index: int) -> sqlite3.Row:
        ref = op.refs[index]
        if ref in op.refs[:index]:
            raise Conflict(f"refs[{index}]: the same response and choice is listed twice", field=f"refs[{index}]")
        row: sqlite3.Row | None = c.execute(
            "SELECT id, turn, split, trajectory_id FROM exchange WHERE run_id = ? AND response_id = ? AND choice = ?",
            (run.id, ref.response_id, ref.choice),
        ).fetchone()
        where = f"refs[{index}]"
        if row is None:
            raise NotFound(
                f"{where}: run {op.run!r} has no response {ref.response_id!r} choice {ref.choice}; it was not served by this "
                "daemon's gateway, or has expired",
                field=where,
            )
        if row["trajectory_id"] is not None:
            raise Conflict(f"{where}: this response is part of trajectory {row['trajectory_id']} already", field=where)
        if row["split"] != op.split:
            raise Conflict(f"{where}: this response was made for split {row['split']!r}, not {op.split!r}", field=where)
        return row

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
            if left <= 0:
                await self._store.write(self._seal_due)
                continue
            with anyio.move_on_after(left):
                await changed.wait()

    def _seal_due(self, c: sqlite3.Connection) -> None:
        now = self._store.clock.now_ms()
        for row in c.execute(DUE, (now,)).fetchall():
            seal_group(c, now, row["id"])

    # ---- the gateway's ledger -----------------------------------------------------------------------------------------

    async def exchange(self, message: w.Exchange, bulk: list[bytes]) -> w.ExchangeAck:
        """Write one response, all its choices, to the ledger; the answer is durable."""
        run = await self.facts(message.run)
        if len(bulk) != message.choices:
            return w.ExchangeAck(
                response_id=message.response_id, error=f"{len(bulk)} turns for {message.choices} choices"
            )
        now = self._store.clock.now_ms()
        rows = [
            (run.id, message.response_id, choice, message.model, message.split, turn, now)
            for choice, turn in enumerate(bulk)
        ]

        def write(c: sqlite3.Connection) -> None:
            c.executemany(
                "INSERT INTO exchange (run_id, response_id, choice, model, split, turn, created) VALUES (?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (run_id, response_id, choice) DO NOTHING",
                rows,
            )

        await self._store.write(write)
        return w.ExchangeAck(response_id=message.response_id)


def _check_header(op: api.Submit) -> None:
    if not math.isfinite(op.reward):
        raise Invalid(f"reward {op.reward} is not finite", field="reward")
    if not 1 <= len(op.group) <= 256:
        raise Invalid("a group's name has 1 to 256 characters", field="group")
    if len(op.key) > 256:
        raise Invalid("a key has at most 256 characters", field="key")


def _one(outcomes: list[Outcome]) -> api.Submitted:
    (outcome,) = outcomes
    if isinstance(outcome, RequestError):
        raise outcome
    return outcome


def _extra(op: api.Submit) -> bytes:
    return msgspec.json.encode({"metrics": op.metrics, "metadata": op.metadata})


def _content(op: api.Submit, what: object) -> str:
    """Digest of everything that was submitted. Errors: Invalid when `metadata` is not JSON."""
    try:
        return digest(to_json([op.group, op.reward, op.split, what, op.metrics, op.metadata]))
    except (TypeError, ValueError) as error:
        raise Invalid(f"metadata cannot be written as JSON: {error}", field="metadata") from None
