"""Accepts trajectories from clients and responses from the gateway, and seals groups.

`insert` writes the rows of trajectories; `by_reference` builds those that name responses of the ledger. An answer
leaves after its COMMIT. A dedup key is never free again. A group is sealed once; one whose rewards do not differ is
discarded then, unless its run trains equal rewards. Large bodies and large metadata are checked and hashed in threads,
never in the event loop or the writer.
"""

from __future__ import annotations

import asyncio
import sqlite3
from asyncio import Future
from collections.abc import Callable

import anyio
import anyio.to_thread
import msgspec

from artd.core.fields import InvalidField
from artd.core.header import check_header
from artd.core.validate import check_turns
from artd.errors import Busy, Invalid, NotFound, RequestError
from artd.store.blobs import Blobs, add_row
from artd.store.store import Store
from artd.store.views import route_shape, stored_spec
from artd.tables.exchanges import Entry, insert_exchanges, supersede_undelivered
from artd.tables.once import first_time
from artd.tables.runs import begin_flush
from artd_schema.codec import UNREADABLE, digest, to_json
from artd_schema.crashpoint import reach
from artd_schema.data.rules import epoch_range
from artd_schema.data.trajectory import Turn
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w

from . import by_name, by_reference, slices
from .credit import add_credits, check_kind
from .insert import Answer, Intake, Parcel, RunFacts, seal_group

_turns = msgspec.msgpack.Decoder(list[Turn])
METADATA_INLINE = 1 << 16
"""The most bytes of metadata that stay in a row."""
BODY_THREADS = 4
"""Threads for large bodies, and as many again for the gateway's turns. More would delay the event loop and each other.
The commit of a step has threads of its own."""
COMPOSED = 3
"""How often a rollout is composed that gets further responses meanwhile."""
LOOK_S = 5.0  # look at deadlines this often: one looks far away after the clock was set back


class Ingest:
    """Serves clients (`submit`, `seal`, `flush`) and the gateway (`exchange`); `run` seals groups at their deadline.

    `max_inline` is the most bytes of a body, or of a turn of the ledger, that stay in a row. `admit` raises Busy when
    nothing more may be accepted. `jumped` returns whether the clock jumped, so that stored deadlines do not count yet.
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
        self._bodies = anyio.CapacityLimiter(BODY_THREADS)
        self._turns = anyio.CapacityLimiter(BODY_THREADS)
        self._intake = Intake(store)
        self._runs: dict[str, RunFacts] = {}
        self._deleted = 0  # runs that were deleted in this boot

    async def facts(self, name: str) -> RunFacts:
        """Return the facts of the run `name`. Raises NotFound, Unreadable."""
        if (known := self._runs.get(name)) is not None:
            return known
        deleted = self._deleted
        rows = await self._store.read("SELECT id, name, spec, vocab_size, routes FROM run WHERE name = ?", (name,))
        if not rows:
            raise NotFound(f"there is no run {name!r}; create it with Client.run({name!r}, model=...)", field="run")
        facts = RunFacts(rows[0]["id"], stored_spec(rows[0]), rows[0]["vocab_size"], route_shape(rows[0]))
        if deleted == self._deleted:  # otherwise the row may be that of a run which was deleted meanwhile
            self._runs[name] = facts
        return facts

    def forget(self, name: str) -> None:
        """Forget the facts of a deleted run, because another run may get its name."""
        self._deleted += 1
        self._runs.pop(name, None)

    # ---- trajectories -------------------------------------------------------------------------------------------------

    def submit_now(self, op: api.Submit, bulk: list[bytes], answer: Answer, header: int = 0) -> bool:
        """Queue a small trajectory by value of a known run, without a task of its own. Returns False if it needs
        `submit`.

        `header` is the number of bytes in which `op` arrived. `answer` gets the later outcome. Raises RequestError for
        what is wrong at once.
        """
        run = self._runs.get(op.run)
        if (
            run is None
            or op.refs
            or op.rollout
            or len(bulk) != 1
            or len(bulk[0]) > self._max_inline
            or header > METADATA_INLINE
        ):
            return False
        self._admit()
        parcel = self._check(op, run, bulk[0])
        if self._large(parcel):
            return False
        self._intake.put(parcel, answer)
        return True

    async def submit(self, op: api.Submit, bulk: list[bytes], header: int = 0) -> api.Submitted:
        """Store a trajectory, by value or by reference. `header` is the number of bytes in which `op` arrived; it shows
        large metadata before anything encodes it. Raises RequestError."""
        self._admit()
        run = await self.facts(op.run)
        if op.refs or op.rollout:
            if bulk or (op.refs and op.rollout):
                raise Invalid(
                    "a trajectory is submitted by reference (responses, or a rollout) or by value, not both",
                    field="refs",
                )
            return await self._by_reference(op, run, header)
        if len(bulk) != 1:
            raise Invalid(f"by value a submit has one bulk frame, msgpack list[Turn]; got {len(bulk)}", field="turns")
        if len(bulk[0]) <= self._max_inline and header <= METADATA_INLINE:
            parcel = self._check(op, run, bulk[0])
            return await self._put(
                await anyio.to_thread.run_sync(self._to_files, parcel, limiter=self._bodies)
                if self._large(parcel)
                else parcel
            )
        return await self._put(
            await anyio.to_thread.run_sync(self._check_large, op, run, bulk[0], limiter=self._bodies)
        )

    def _check_large(self, op: api.Submit, run: RunFacts, body: bytes) -> Parcel:
        return self._to_files(self._check(op, run, body))

    def _large(self, parcel: Parcel) -> bool:
        """Return whether the body or the metadata is too large for a row."""
        return parcel.size > self._max_inline or len(parcel.metadata) > METADATA_INLINE

    def _to_files(self, parcel: Parcel) -> Parcel:
        """Return the parcel with its body and its metadata in files, where they are too large for a row."""
        if parcel.body is not None and parcel.size > self._max_inline:
            parcel = parcel._replace(body=None, blob=self._blobs.put(parcel.body))
        if len(parcel.metadata) > METADATA_INLINE:
            parcel = parcel._replace(metadata=b"null", metadata_blob=self._blobs.put(parcel.metadata))
        files = tuple(self._blobs.path(sha) for sha in (parcel.blob, parcel.metadata_blob) if sha)
        return parcel._replace(files=files)

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
        try:
            metadata = check_header(op)
            turns = _turns.decode(body)
            if op.credits:
                turns = add_credits(turns, op.credits)
                body = msgspec.msgpack.encode(turns)
            tokens = check_turns(turns, run.vocab_size, op.split == "train", None, run.routes)
            check_kind(run.spec, turns, op.split)
        except UNREADABLE as error:
            raise _not_turns(error) from None
        except InvalidField as error:
            raise Invalid(str(error), field=error.field) from None
        if not tokens:
            raise Invalid("no turn has a sampled token", field="turns")
        sha = digest(body)
        return Parcel(
            op, run, op.key or sha, _content(op, sha), sha, body, None, len(body), tokens, epoch_range(turns), metadata
        )  # fmt: skip

    async def _by_reference(self, op: api.Submit, run: RunFacts, header: int) -> api.Submitted:
        for _ in range(COMPOSED):
            try:
                return await self._refer(op, run, header)
            except by_name.Changed as error:
                changed = error
        raise changed

    async def _refer(self, op: api.Submit, run: RunFacts, header: int) -> api.Submitted:
        if header > METADATA_INLINE:
            parcel = await anyio.to_thread.run_sync(_referring, op, run, limiter=self._bodies)
        else:
            parcel = _referring(op, run)
        exchanges: list[sqlite3.Row] = []
        problem: RequestError | None = None
        try:
            read = by_name.read_responses if op.rollout else by_reference.read_exchanges
            exchanges = await read(self._store, op, run)
            turns = 0 if any(row["blob"] for row in exchanges) else sum(len(row["turn"]) for row in exchanges)
            if not turns or turns > self._max_inline or self._large(parcel):
                parcel = await anyio.to_thread.run_sync(self._compose_large, parcel, exchanges, limiter=self._bodies)
            else:
                parcel = by_reference.compose(parcel, exchanges, self._blobs)
        except RequestError as error:
            problem = error
        now = self._store.clock.now_ms
        insert = by_name.insert if op.rollout else by_reference.insert
        done = await self._store.write(lambda c: insert(c, now(), parcel, exchanges, problem))
        reach("refer.committed")
        return done

    def _compose_large(self, parcel: Parcel, exchanges: list[sqlite3.Row]) -> Parcel:
        return self._to_files(by_reference.compose(parcel, exchanges, self._blobs))

    @property
    def blobs(self) -> Blobs:
        """The blob store that holds large bodies."""
        return self._blobs

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

        def write(c: sqlite3.Connection) -> None:
            # A repeated request must not seal groups that were opened since the first one.
            if first_time(c, self._store.clock.now_ms(), op.request):
                begin_flush(c, run.id)

        await self._store.write(write)
        await self._go_on(slices.flush, run.id)
        return api.Done()

    async def _go_on(self, some: Callable[[sqlite3.Connection, int, int], bool], run: int) -> None:
        """Call `some` in one transaction after another until it returns False."""
        while await self._store.write(lambda c: some(c, self._store.clock.now_ms(), run)):
            pass

    async def run(self) -> None:
        """Finish what a restart interrupted, then seal groups at their deadline, until cancelled."""
        for row in await self._store.read(slices.UNDER_WAY):
            await self._go_on(slices.discard_waiting if row["state"] == "finished" else slices.flush, row["id"])
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
        """Seal some of the groups that are due. Returns False while the stored deadlines do not count because the clock
        jumped."""
        now = self._store.clock.now_ms()
        if self._jumped():
            return False
        slices.seal_due(c, now)
        return True

    # ---- the gateway's ledger -----------------------------------------------------------------------------------------

    async def exchange(self, message: w.Exchange, bulk: list[bytes]) -> w.ExchangeAck:
        """Write one response with all its choices to the ledger. The answer leaves after the COMMIT. Raises Busy."""
        self._admit()
        run = await self.facts(message.run)
        if len(bulk) != message.choices:
            return w.ExchangeAck(
                response_id=message.response_id, error=f"{len(bulk)} turns for {message.choices} choices"
            )
        stored = await self._store_turns(bulk)
        now = self._store.clock.now_ms()

        def write(c: sqlite3.Connection) -> None:
            if gone := self._blobs.missing(blob for _, blob in stored if blob):
                raise Busy(
                    f"the file {gone[0]} was garbage-collected before its row was committed; send the response again"
                )
            for turn, (_, blob) in zip(bulk, stored, strict=True):
                if blob:
                    add_row(c, blob, len(turn), "exchange", now)
            insert_exchanges(c, self._entries(c, now, run, message, stored))

        await self._store.write(write)
        reach("exchange.committed")
        return w.ExchangeAck(response_id=message.response_id)

    def _entries(
        self,
        c: sqlite3.Connection,
        now: int,
        run: RunFacts,
        message: w.Exchange,
        stored: list[tuple[bytes | None, str | None]],
    ) -> list[Entry]:
        """Return the rows of a response. One of a rollout enters it first, and supersedes what the same request got before and its client
        never had. Raises Conflict."""
        rollout, delivery = None, ""
        if message.rollout:
            rollout, delivery = (
                by_name.enter_response(c, now, run, message.rollout),
                "superseded" if message.part else "pending",
            )
            supersede_undelivered(c, rollout, message.request, message.place)
        return [
            Entry(run.id, message.response_id, choice, message.model, message.split, turn, blob, now, rollout, message.place,
                  message.request, delivery)
            for choice, (turn, blob) in enumerate(stored)
        ]  # fmt: skip

    async def _store_turns(self, bulk: list[bytes]) -> list[tuple[bytes | None, str | None]]:
        """Return what each turn's row stores: the turn itself, or the digest of the blob that now holds it."""

        def put() -> list[tuple[bytes | None, str | None]]:
            return [(None, self._blobs.put(turn)) if len(turn) > self._max_inline else (turn, None) for turn in bulk]

        if any(len(turn) > self._max_inline for turn in bulk):
            return await anyio.to_thread.run_sync(put, limiter=self._turns)
        return [(turn, None) for turn in bulk]


def _referring(op: api.Submit, run: RunFacts) -> Parcel:
    """Return the parcel of a trajectory by reference, without its turns. Raises Invalid."""
    try:
        metadata = check_header(op)
    except InvalidField as error:
        raise Invalid(str(error), field=error.field) from None
    what = {"rollout": op.rollout} if op.rollout else op.refs
    key = op.key or digest(to_json(what))
    return Parcel(op, run, key, _content(op, what), "", None, None, 0, 0, (None, None), metadata)


def _not_turns(error: Exception) -> Invalid:
    """Return the error for a body that cannot be decoded, with the path of the value."""
    text, _, path = str(error).partition(" - at `$")
    if path.startswith("[") and path != "[...]`":
        where = f"turns{path.rstrip('`')}"
        return Invalid(f"{where}: {text}", field=where)
    return Invalid(f"the body is not msgpack list[Turn]: {error}", field="turns")


def _content(op: api.Submit, what: object) -> str:
    """Return the digest of everything that was submitted."""
    more = [op.credits] if op.credits else []
    return digest(to_json([op.group, op.reward, op.split, what, op.metrics, op.metadata, *more]))
