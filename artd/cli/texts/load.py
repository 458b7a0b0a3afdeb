"""Trajectories with their text, from the database, the blobs and the model folder alone: the daemon need not run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from artd.cli import read
from artd.cli.show import Row
from artd.datadir.layout import DataDir
from artd.store import samples
from artd_schema.text import tokenizer, transcript


class Loaded(NamedTuple):
    """A trajectory's row, its sequences and the advantage of its tokens (None if it is in no batch). `missing` says why
    it has no sequences. `untold` says why they have no text, or only the engine's."""

    row: Row
    passages: list[transcript.Passage]
    advantage: float | None = None
    missing: str = ""
    untold: str = ""


def load(database: read.Database, data: Path, row: Row) -> Loaded:
    """Read the body of a trajectory. `row` is one of `selects.TRAJECTORIES`."""
    words, untold = _words(database, row["run"])
    blobs = DataDir(data, data).blobs
    with database.explain_errors() as connection:
        advantage = samples.read_advantage(connection, blobs, row["id"])
        try:
            turns = samples.decode_body(samples.read_body(connection, blobs, row["id"]))
        except samples.Missing as error:
            return Loaded(row, [], advantage, str(error))
    return Loaded(row, transcript.read_turns(turns, words), advantage, "", untold)


def _words(database: read.Database, run: str) -> tuple[tokenizer.Tokenizer | None, str]:
    """Return the tokenizer of a run's model, or None and why there is none."""
    [row] = database.rows("SELECT spec FROM run WHERE name = :run", run=run)
    try:
        return _tokenizer(str(row["spec"].get("model", ""))), ""
    except tokenizer.Unreadable as error:
        return None, str(error)


@cache
def _tokenizer(folder: str) -> tokenizer.Tokenizer:
    return tokenizer.load(folder)
