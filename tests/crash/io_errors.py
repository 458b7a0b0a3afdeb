"""`python -m tests.crash.io_errors`: lives of a daemon's services, each in a process of its own, with a disk that fails on
demand.

Run it under the shim. Each line on stdin is one life (`Life`, JSON), each line on stdout says how it ended (`Ended`). A life is
a fork, so that the imports, which take most of the time, happen once. The services are the daemon's own, wired as in
`services`, with a packer that does not fork, a trainer and an engine without processes, and fast clocks. An error ends the
process as it ends the daemon (`daemon._fatal`, `daemon._explain_end`).
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import anyio
import msgspec

from artd import daemon
from artd.api import job_orders, requests
from artd.clock import Clock
from artd.datadir.layout import DataDir
from artd.packing import child, service
from artd.recover import identify, recover
from artd.retention import checkpoints
from artd.store import fs, store, writer
from artd.store.blobs import Blobs
from artd_schema.data.trajectory import Sampling
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from tests.fakes.rows import ENGINE, TRAINER, FakeWire, add_run, add_worker, body, make_ingest, turn
from tests.fakes.staging import stage
from tests.fakes.steps import make_dispatch, make_pusher, room

INLINE = 2000
STUCK_S = 0.25
PATIENCE_S = 30.0
SPEED = 300
UNCLEAR, LOST = 3, 4
STOPPING = "the life is over\n"
PROGRESS = """
SELECT (SELECT sum(step) FROM run), (SELECT count(*) FROM batch), (SELECT count(*) FROM trajectory),
  (SELECT count(*) FROM exchange), (SELECT count(*) FROM checkpoint WHERE state = 'retired')"""


class Life(msgspec.Struct, frozen=True):
    """folder: the data folder; failure: for the shim, "" for none; worker: it is the worker's calls that fail; told: file
    to which acknowledgements are written; steps: how many to make."""

    folder: str
    told: str
    failure: str = ""
    worker: bool = False
    steps: int = 2


class Ended(msgspec.Struct, frozen=True):
    """code: 0 lived on and reached its step, else as the daemon exits; 3: by an exception that the daemon has no line for; 4:
    it stood still. booted: the services had started; answers: codes that clients were refused with; stopping: its step was
    reached, and it was ending."""

    code: int
    said: str = ""
    booted: bool = True
    answers: tuple[str, ...] = ()
    stopping: bool = False


class FastClock(Clock):
    """Back-offs of seconds pass in milliseconds."""

    def now_ms(self) -> int:
        return int(super().monotonic() * 1000 * SPEED) + 1_700_000_000_000


class Failing:
    """Arms the shim, for the daemon's own calls or for the worker's."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._shim.shim_reset()
        self.over = not life.failure

    @contextmanager
    def during(self, worker: bool) -> Iterator[None]:
        """The calls inside are the worker's, or the daemon's."""
        self._arm(worker)
        try:
            yield
        finally:
            self._arm(not worker)

    def _arm(self, worker: bool) -> None:
        mine = worker == self._life.worker and not self.over
        self._shim.shim_arm((self._life.failure if mine else "").encode())

    def heal(self) -> None:
        self.over = True
        self._arm(False)


async def pack_here(request: child.PackRequest, stall_s: float = 0.0) -> child.PackResult | child.PackFailure:
    """What the packing child does, without its start: an error of its own disk ends it and not the daemon."""
    fs.on_sync_error = None
    try:
        return child.run(request)
    except OSError as error:
        return child.PackFailure(error=str(error))
    finally:
        fs.on_sync_error = daemon._fatal


class Desk(FakeWire):
    """A trainer and an engine that answer at once."""

    def __init__(self, failing: Failing, spawn: int) -> None:
        super().__init__(trainer=spawn, engine=spawn)
        self.failing = failing
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, name: str, message: Any, bulk: Any = ()) -> bool:
        self.inbox.put_nowait(message)
        return super().send(name, message, bulk)

    async def serve(self, dispatch: Any, pusher: Any) -> None:
        while True:
            message = await self.inbox.get()
            if isinstance(message, w.Run):
                await self._train(message, dispatch)
            elif isinstance(message, w.Push):
                await pusher.live(w.Live(push=message.push, fence=message.fence, max_abs=1e-6, mean_abs=1e-7))

    async def _train(self, order: w.Run, dispatch: Any) -> None:
        try:
            with self.failing.during(worker=True):
                sha = stage(Path(order.dir), order)
        except OSError as error:  # as artd_workers.trainer.worker classifies
            kind = "full" if fs.is_full(error) else "transient"
            await dispatch.take_failed(
                TRAINER, w.Failed(job=order.job, fence=order.fence, failure=kind, error=str(error))
            )
            return
        await dispatch.take_staged(TRAINER, w.Staged(job=order.job, fence=order.fence, dir=order.dir, manifest_sha=sha))


class Daemon:
    """One life. The client's answers go to `told`, one line each, after they came."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.failing = Failing(life)
        self.booted = False
        self.answers: list[str] = []
        root = Path(life.folder)
        self.data = DataDir(root, root / "run")

    async def run(self) -> None:
        """Boot, work, and end in order."""
        data = DataDir.make(self.data.root)
        made = store.Store(data.database, FastClock(), daemon._fatal)
        await made.open()
        async with anyio.create_task_group() as group:
            group.start_soon(self._hasten, made)
            boot = await self._boot(made, data)
            wire = Desk(self.failing, boot)
            dispatch, pusher, blobs = make_dispatch(made, data, wire), make_pusher(made, data, wire), Blobs(data.blobs)
            self.booted = True
            for task in (
                dispatch.run,
                pusher.run,
                service.Packer(made, blobs, data, room).run,
                checkpoints.CheckpointRetention(made, data).run,
            ):
                group.start_soon(task)
            group.start_soon(wire.serve, dispatch, pusher)
            await self._client(made, make_ingest(made, data, INLINE))
            while dispatch._claims and not await made.read("SELECT 1 FROM job WHERE state = 'running'"):
                await asyncio.sleep(0.005)  # memory comes to equal the rows
            group.cancel_scope.cancel()
        sys.stderr.write(STOPPING)
        made.hurry()
        await made.close()

    async def _boot(self, made: store.Store, data: DataDir) -> int:
        _, boot = await made.write(lambda c: identify(c, data, made.clock.now_ms()))
        await recover(made, data)
        if not await made.read("SELECT 1 FROM run"):
            await add_run(made, keep_checkpoints=1, rollout_weights_mode="lora")
        await add_worker(made, TRAINER, boot)
        await add_worker(made, ENGINE, boot, address="/engine.sock")
        return boot

    async def _hasten(self, made: store.Store) -> None:
        """Nobody waits for a time that has come; a disk that keeps failing is repaired when nothing moves any more."""
        seen, since = None, 0.0
        while True:
            await asyncio.sleep(0.02)
            made.announce()
            now = made.clock.monotonic()
            (state,) = await made.read(PROGRESS)
            if state != seen:
                seen, since = state, now
            if now - since > STUCK_S and not self.failing.over:
                self.failing.heal()
            elif now - since > PATIENCE_S:
                sys.stderr.write(f"stands still: {[tuple(row) for row in await made.read('SELECT * FROM job')]}\n")
                os._exit(LOST)

    async def _client(self, made: store.Store, ingest: Any) -> None:
        """Submit and wait, step by step, in rows and in files."""
        ((start,),) = await made.read("SELECT step FROM run")
        for step in range(start + 1, start + 1 + self._life.steps):
            if step > 0:
                await self._submit(made, ingest, step)
            while (await made.read("SELECT step FROM run"))[0][0] < step:
                await self._retry_quarantined(made)
                await asyncio.sleep(0.005)
            self._tell("step", step)
        # What the engine of an earlier life served goes; what this one did stays while it lives.
        while (await made.read("SELECT count(*) FROM checkpoint WHERE state = 'committed' AND step < ?", (start,)))[0][
            0
        ]:
            await asyncio.sleep(0.005)

    async def _submit(self, made: store.Store, ingest: Any, step: int) -> None:
        large = b"x" * INLINE if step % 2 else b""
        message = w.Exchange(
            response_id=f"e{step}", run="r", model="r@0", split="train", sampling=Sampling(),
            choices=1, prompt_tokens=1, completion_tokens=1, seconds=0.1,
        )  # fmt: skip
        made_turn = msgspec.structs.replace(turn(raw=large), response_id=f"e{step}")
        await self._ask(lambda: ingest.exchange(message, [msgspec.msgpack.encode(made_turn)]))
        self._tell("response", f"e{step}")
        for number in range(2):
            key = f"s{step}-{number}"
            op = api.Submit(run="r", group=f"s{step}", reward=float(number), key=key)
            answer = await self._ask(lambda op=op, key=key: ingest.submit(op, [body(turn(raw=large + key.encode()))]))
            self._tell("trajectory", key, answer.trajectory)

    async def _ask(self, request: Any) -> Any:
        """Ask until it is answered: clients do."""
        while True:
            try:
                return await request()
            except Exception as error:
                self.answers.append(requests._failure(error).code)
                await asyncio.sleep(0.02)

    async def _retry_quarantined(self, made: store.Store) -> None:
        """What an operator types when the disk is well again."""
        for (job,) in await made.read("SELECT id FROM job WHERE state = 'quarantined'"):
            self.failing.heal()
            self.answers.append("quarantined")
            await made.write(lambda c, job=job: job_orders.retry(c, made.clock.now_ms(), job))

    def _tell(self, kind: str, what: object, number: int = 0) -> None:
        with open(self._life.told, "ab") as file:
            file.write(msgspec.json.encode((kind, what, number)) + b"\n")


def live(life: Life) -> Ended:
    """How it ended. Does not return where the daemon would not."""
    made = Daemon(life)
    code, said = 0, ""
    try:
        with made.failing.during(worker=False):
            anyio.run(made.run)
    except Exception as error:
        try:
            code = daemon._explain_end(made.data, error)
        except BaseException:
            code, said = UNCLEAR, traceback.format_exc()
    return Ended(code, said, made.booted, tuple(made.answers))


def fork(life: Life, log: Path) -> Ended:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _child(life, writing, log)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        raw = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended = msgspec.json.decode(raw, type=Ended) if raw else Ended(code)
    said = ended.said + log.read_text(errors="replace")
    return msgspec.structs.replace(ended, said=said, stopping=STOPPING in said)


def _child(life: Life, writing: int, log: Path) -> NoReturn:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    fs.on_sync_error = daemon._fatal
    ended = live(life)
    os.write(writing, msgspec.json.encode(ended))
    os._exit(0)


def main() -> None:
    service.run_child = pack_here
    service.RETRY_S = checkpoints.PERIOD_S = 0.02
    store.FULL_RETRY_S = writer.FULL_RETRY_S = 0.02
    logging.basicConfig(level="WARNING", stream=sys.stderr)
    faulthandler.enable()
    for line in sys.stdin.buffer:
        life = msgspec.json.decode(line, type=Life)
        sys.stdout.buffer.write(msgspec.json.encode(fork(life, Path(life.told).with_suffix(".log"))) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
