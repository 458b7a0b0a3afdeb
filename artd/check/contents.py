"""Checks the bodies of trajectories and ledger turns, for `deep`: digests, contents, and the exchanges of by-reference
ones.

It reads bodies in short transactions, so that a running daemon can fold its write-ahead log meanwhile.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from artd.datadir.layout import DataDir
from artd_schema.codec import UNREADABLE, digest
from artd_schema.data.trajectory import Turn

from .report import Violation

PAGE = 500
BODIES = (
    "SELECT t.id, t.digest, d.body, t.blob, t.tokens FROM trajectory t JOIN trajectory_data d ON d.trajectory_id = t.id"
    " WHERE t.id > ? ORDER BY t.id LIMIT ?"
)
EXCHANGES = "SELECT response_id, choice FROM exchange WHERE trajectory_id = ?"
LEDGER = "SELECT id, turn, blob FROM exchange WHERE id > ? AND trajectory_id IS NULL ORDER BY id LIMIT ?"
_turns = msgspec.msgpack.Decoder(list[Turn])
_turn = msgspec.msgpack.Decoder(Turn)


def bodies(data: DataDir, c: sqlite3.Connection) -> Iterator[Violation]:
    """Check `trajectory.body`: a body has its sha256, can be read, has as many sampled tokens as its row says, and consists
    of the exchanges that name its trajectory."""
    for row in _pages(c, BODIES):
        if row["body"] is None and row["blob"] is None:
            continue  # retention removed the expired payload
        for text in _body(data, c, row):
            yield Violation(f"trajectory {row['id']}", text)


def ledger(data: DataDir, c: sqlite3.Connection) -> Iterator[Violation]:
    """Check `exchange.turn`: every turn that waits in the ledger can be read."""
    for row in _pages(c, LEDGER):
        try:
            _turn.decode(row["turn"] if row["blob"] is None else Path(data.blob(row["blob"])).read_bytes())
        except (OSError, *UNREADABLE) as error:
            yield Violation(f"exchange {row['id']}", f"its turn cannot be read: {error}")


def _pages(c: sqlite3.Connection, sql: str) -> Iterator[sqlite3.Row]:
    last = 0
    while rows := c.execute(sql, (last, PAGE)).fetchall():
        yield from rows
        last = rows[-1]["id"]


def _body(data: DataDir, c: sqlite3.Connection, row: sqlite3.Row) -> Iterator[str]:
    try:
        raw = row["body"] if row["body"] is not None else Path(data.blob(row["blob"])).read_bytes()
        if digest(raw) != row["digest"]:
            yield f"its body has sha256 {digest(raw)}, its row says {row['digest']}"
            return
        turns = _turns.decode(raw)
    except (OSError, *UNREADABLE) as error:
        yield f"its body cannot be read: {error}"
        return
    if (sampled := sum(len(turn.token_ids) for turn in turns) // 4) != row["tokens"]:
        yield f"its body has {sampled} sampled tokens, its row says {row['tokens']}"
    used = Counter((found["response_id"], found["choice"]) for found in c.execute(EXCHANGES, (row["id"],)))
    if used and used != Counter((turn.response_id, turn.choice) for turn in turns):
        yield "its turns are not those of the exchanges that name it"
