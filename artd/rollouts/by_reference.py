"""Builds trajectories from references: reads their turns from the gateway's ledger and marks their exchanges as used.

Each choice of an exchange belongs to at most one trajectory, and from then on only that trajectory's body holds its
turn. The body stores the routes of each token of a sequence once. Turns are read, checked and encoded outside the
writer, which only checks that the exchanges are still unused.
"""

from __future__ import annotations

import sqlite3
import time

import msgspec

from artd.core.fields import InvalidField
from artd.core.validate import check_turns
from artd.errors import Busy, Conflict, Invalid, NotFound, RequestError
from artd.store.blobs import Blobs
from artd.store.store import Store
from artd.tables.exchanges import use_exchanges
from artd_schema.codec import digest
from artd_schema.data.route_rules import trim_routes
from artd_schema.data.rules import epoch_range
from artd_schema.data.trajectory import ExchangeRef, Turn
from artd_schema.wire import client_api as api

from .credit import add_credits, check_kind
from .insert import Parcel, RunFacts, insert_many

READ_AGAIN_S = (0.1, 0.3)
"""Pauses before a file whose bytes have the wrong digest is read a second and a third time."""
_turn = msgspec.msgpack.Decoder(Turn)
READ = (
    "WITH ref (response_id, choice) AS (VALUES {})"
    " SELECT e.id, e.response_id, e.choice, e.turn, e.blob, e.split, e.trajectory_id, e.delivery, r.next_epoch FROM ref"
    " CROSS JOIN exchange e ON e.run_id = ? AND e.response_id = ref.response_id AND e.choice = ref.choice"
    " JOIN run r ON r.id = e.run_id"
)


async def read_exchanges(store: Store, op: api.Submit, run: RunFacts) -> list[sqlite3.Row]:
    """Return the ledger's rows of all references, in order. Raises NotFound, Conflict."""
    marks = ", ".join(["(?, ?)"] * len(op.refs))
    values = (value for ref in op.refs for value in (ref.response_id, ref.choice))
    rows = await store.read(READ.format(marks), (*values, run.id))
    known = {ExchangeRef(row["response_id"], row["choice"]): row for row in rows}
    return [_take(op, index, known.get(ref)) for index, ref in enumerate(op.refs)]


def compose(parcel: Parcel, exchanges: list[sqlite3.Row], blobs: Blobs) -> Parcel:
    """Return the parcel with the turns of these rows as its body. Raises Invalid, Busy, and RequestError if one of
    their files is damaged."""
    op, run = parcel.op, parcel.run
    raw = [read_turn(blobs, row) for row in exchanges]
    turns = [_turn.decode(turn) for turn in raw]
    try:
        if op.credits:
            one_for_all = op.rollout and len(op.credits) == 1
            turns = add_credits(turns, op.credits * len(turns) if one_for_all else op.credits)
        tokens = check_turns(turns, run.vocab_size, op.split == "train", exchanges[0]["next_epoch"], run.routes)
        check_kind(run.spec, turns, op.split)
    except InvalidField as error:
        raise Invalid(str(error), field=error.field) from None
    if run.routes is None and op.credits:
        body = msgspec.msgpack.encode(turns)
    elif run.routes is None:
        body = msgspec.msgpack.encode([msgspec.Raw(turn) for turn in raw])
    else:
        body = msgspec.msgpack.encode(trim_routes(turns, run.routes))
    return parcel._replace(digest=digest(body), body=body, size=len(body), tokens=tokens, epochs=epoch_range(turns))


def insert(
    c: sqlite3.Connection, now: int, parcel: Parcel, exchanges: list[sqlite3.Row], problem: RequestError | None
) -> api.Submitted:
    """Insert one trajectory and use up its exchanges: they keep their names and lose their turns.

    `problem` says why there is no body. A known key gets its first answer all the same, because that submission has
    used the references. Raises RequestError.
    """
    known = c.execute("SELECT 1 FROM trajectory WHERE run_id = ? AND key = ?", (parcel.run.id, parcel.key)).fetchone()
    if known is None:
        # Before `problem` counts: a used exchange may have lost its file, which is not damage.
        for index, row in enumerate(exchanges):
            _check_unused(index, c.execute("SELECT trajectory_id FROM exchange WHERE id = ?", (row["id"],)).fetchone())
        if problem is not None:
            raise problem
    (outcome,) = insert_many(c, now, [parcel])
    if isinstance(outcome, RequestError):
        raise outcome
    if known is None:
        used = [(outcome.trajectory, row["id"]) for row in exchanges]
        use_exchanges(c, used)
    return outcome


def read_turn(blobs: Blobs, row: sqlite3.Row) -> bytes:
    """Return the turn of a row, from its file if it has one. Raises Busy if the file cannot be read now, and
    RequestError if its digest stays wrong however often it is read: nobody may train on such a turn."""
    if row["blob"] is None:
        return bytes(row["turn"])
    path = blobs.path(row["blob"])
    where = f"response {row['response_id']!r} choice {row['choice']}: the ledger's file {path}"
    try:
        for pause_s in (*READ_AGAIN_S, None):
            turn = path.read_bytes()
            if digest(turn) == row["blob"]:
                return turn
            if pause_s is not None:
                time.sleep(pause_s)
    except OSError as error:
        raise Busy(
            f"{where} cannot be read now: {error.strerror}; send the same again, or if that stays so leave this response out, "
            "and run artd check",
            retry_after_s=1.0,
        ) from None
    raise RequestError(f"{where} has other bytes than were written; leave this response out, and run artd check")


def _take(op: api.Submit, index: int, row: sqlite3.Row | None) -> sqlite3.Row:
    """Return the row if the reference may be used. Raises NotFound, Conflict."""
    ref, where = op.refs[index], f"refs[{index}]"
    if ref in op.refs[:index]:
        raise Conflict(f"{where}: the same response and choice is listed twice", field=where)
    if row is None:
        raise NotFound(
            f"{where}: run {op.run!r} has no response {ref.response_id!r} choice {ref.choice}; it was not served by this "
            "daemon's gateway, or has expired",
            field=where,
        )
    _check_unused(index, row)
    if row["delivery"] == "superseded":
        raise Conflict(
            f"{where}: this response is superseded: its client never had it whole, and asked again", field=where
        )
    if row["split"] != op.split:
        raise Conflict(f"{where}: this response was made for split {row['split']!r}, not {op.split!r}", field=where)
    return row


def _check_unused(index: int, row: sqlite3.Row | None) -> None:
    """Raise NotFound if the exchange is gone, and Conflict if a trajectory has used it."""
    if row is None:
        raise NotFound(f"refs[{index}]: this response has expired", field=f"refs[{index}]")
    if row["trajectory_id"] is not None:
        where = f"refs[{index}]"
        raise Conflict(f"{where}: this response is part of trajectory {row['trajectory_id']} already", field=where)
