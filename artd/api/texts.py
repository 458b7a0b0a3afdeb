"""Answers clients that read trajectories as text: bodies without routes, and the tokenizer with which the client decodes them.

The client decodes, because a vocabulary takes tens of milliseconds to read, in which the daemon could answer nobody else.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import msgspec

from artd.errors import Invalid, NotFound
from artd.store import pages, samples
from artd_schema.text.tokenizer import FILE
from artd_schema.wire import client_api as api

from .listing import answer_rows, plain, require_run
from .orders import Handler, Parts

MOST = 1000
"""The most trajectories of one answer."""


async def choose_samples(parts: Parts, op: api.Samples) -> api.Rows:
    """Return the trajectories that `op` asks for. Raises NotFound (the run), Invalid (a limit of 0, or one whose rows fit no answer)."""
    if op.limit < 1:
        raise Invalid("limit: ask for 1 trajectory or more", field="limit")
    await require_run(parts.store, op.run)
    choice = samples.Choice(op.step, op.split, op.pick, min(op.limit, MOST))
    answer = await parts.store.ask(lambda c: answer_rows(samples.choose(c, op.run, choice)))
    if answer.more:
        raise Invalid(
            f"limit: the rows of {len(answer.rows)} trajectories fill an answer: ask for that many at most",
            field="limit",
        )
    return answer


async def read_trajectory(parts: Parts, op: api.ReadTrajectory) -> api.Body:
    """Return one trajectory without its routes. Raises NotFound (the run has no such trajectory)."""
    await require_run(parts.store, op.run)
    blobs = parts.ingest.blobs.root

    def read(c: sqlite3.Connection) -> api.Body:
        page = pages.Page("trajectories", after=op.trajectory - 1, limit=1)
        rows = [row for row in pages.read(c, page) if (row["id"], row["run"]) == (op.trajectory, op.run)]
        if not rows:
            raise NotFound(f"run {op.run!r} has no trajectory {op.trajectory}", field="trajectory")
        advantage = samples.read_advantage(c, blobs, op.trajectory)
        try:
            turns = samples.decode_body(samples.read_body(c, blobs, op.trajectory))
        except samples.Missing as error:
            return api.Body(row=plain(rows[0]), body=b"", advantage=advantage, problem=str(error))
        lean = [msgspec.structs.replace(turn, routes=b"", routes_start=0) for turn in turns]
        return api.Body(row=plain(rows[0]), body=msgspec.msgpack.encode(lean), advantage=advantage)

    return await parts.store.ask(read)


async def read_tokenizer(parts: Parts, op: api.ReadTokenizer) -> api.TokenizerFile:
    """Return the tokenizer of a run's model. Raises NotFound (the run)."""
    found = await parts.store.read("SELECT spec FROM run WHERE name = ?", (op.run,))
    if not found:
        raise NotFound(f"there is no run {op.run!r}; `artctl runs` lists them", field="run")
    path = Path(str(msgspec.json.decode(found[0]["spec"]).get("model", ""))) / FILE
    try:
        return api.TokenizerFile(content=await asyncio.to_thread(path.read_bytes))
    except OSError as error:
        return api.TokenizerFile(content=b"", problem=f"{path} cannot be read: {error.strerror or error}")


READING: dict[type[api.Op], Handler] = {
    api.Samples: choose_samples,
    api.ReadTrajectory: read_trajectory,
    api.ReadTokenizer: read_tokenizer,
}
