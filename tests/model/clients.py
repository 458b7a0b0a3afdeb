"""Clients of a simulation: rollout programs that submit, one that only asks, an operator that meddles, and one that closes the books.

Owner of: the numbers of requests. Invariants: a request is sent again under the same number until it is answered, as the real
client does; what is answered goes into the history.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from artd_schema.data.trajectory import ExchangeRef, Turn
from artd_schema.wire import client_api as api
from tests.fakes.rows import body, turn

if TYPE_CHECKING:
    from .world import World

RESEND_S = 1.0
PATIENCE_S = 900.0  # an engine whose Ready was lost is ended after its start time-out, which is 600
RUN = "r"


class Client:
    """One connection."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.peer = name.encode()
        self._number = 0
        self._calls: dict[int, asyncio.Future[api.Answer]] = {}
        world.net.clients.join(self.peer, self._take)

    def _take(self, _peer: bytes, reply: api.Reply, _bulk: list[bytes]) -> None:
        future = self._calls.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply.answer)

    async def ask(self, op: api.Op, bulk: list[bytes] | None = None) -> api.Answer:
        """The answer, however often the daemon has to be asked."""
        while isinstance(answer := await self._once(op, bulk), api.Error) and answer.code in ("draining", "busy"):
            await asyncio.sleep(RESEND_S)
        if isinstance(answer, api.Error) and answer.code == "failed" and " will not " not in answer.message:
            self.world.history.broken(f"{type(op).__name__} failed: {answer.message}")
        return answer

    async def _once(self, op: api.Op, bulk: list[bytes] | None) -> api.Answer:
        self._number += 1
        number = self._number
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        while not future.done():
            self.world.net.clients.tell(self.peer, api.Request(id=number, op=op), bulk or [])
            await asyncio.wait([future], timeout=RESEND_S)
        del self._calls[number]
        return future.result()

    async def submit(self, op: api.Submit, bulk: list[bytes]) -> bool:
        """Whether the trajectory is in; False when its group is closed."""
        while True:
            answer = await self.ask(op, bulk)
            if isinstance(answer, api.Submitted):
                self.world.history.submitted(op.key, op, bulk, answer)
                return True
            assert isinstance(answer, api.Error), answer
            if answer.code == "not_found" and {ref.response_id for ref in op.refs} & self.world.history.responses:
                self.world.history.broken(f"a response of the ledger is gone: {answer.message}")
            if answer.code == "conflict":
                return False
            await asyncio.sleep(1.0)


class Rollout(Client):
    """Fills one group after the other, by value or by reference to what the gateway served."""

    async def run(self) -> None:
        world = self.world
        while not isinstance(await self.ask(api.CreateRun(name=RUN, spec=world.spec)), api.RunInfo):
            await asyncio.sleep(1.0)
        group = 0
        while True:
            group += 1
            await self.fill(f"{self.peer.decode()}-{group}")
            await asyncio.sleep(world.rng.uniform(0.5, 5.0))

    async def fill(self, group: str) -> None:
        world = self.world
        for number in range(world.spec.group_size):
            key = f"{group}-{number}"
            refs: tuple[ExchangeRef, ...] = ()
            if world.rng.random() < 0.2:
                if not await self.roll_out(group, number, key):
                    return
                continue
            if world.rng.random() < 0.4 and world.gateway is not None:
                if not (response := await world.gateway.respond(RUN)):
                    continue
                refs = (ExchangeRef(response),)
            op = api.Submit(run=RUN, group=group, reward=float(number), key=key, refs=refs)
            if not await self.submit(op, [] if refs else [body(turn(raw=key.encode()))]):
                return
        if world.rng.random() < 0.2:
            await self.ask(api.Seal(run=RUN, group=group))

    async def roll_out(self, group: str, number: int, name: str) -> bool:
        """Ask under a name until there is a reply, and submit that rollout; False when its group is closed."""
        attempt = 0
        while True:
            gateway = self.world.gateway
            reply = await gateway.respond_in(RUN, name, attempt > 0) if gateway is not None else ""
            if reply:
                break
            attempt += 1
            await asyncio.sleep(self.world.rng.uniform(0.1, 1.0))
        self.world.history.replies[name] = reply
        return await self.submit(api.Submit(run=RUN, group=group, reward=float(number), key=name, rollout=name), [])


class Asker(Client):
    """Asks and asks, for nothing: whoever may be let in where nobody should be is at the door."""

    async def run(self) -> None:
        world = self.world
        while True:
            await asyncio.sleep(world.rng.uniform(0.02, 0.4))
            if world.gateway is not None:
                await world.gateway.respond(RUN)


class Watcher(Client):
    """Waits for one step after the other."""

    async def run(self) -> None:
        step = 0
        while True:
            answer = await self.ask(api.WaitStep(run=RUN, step=step, timeout_s=5.0))
            if isinstance(answer, api.StepInfo):
                self.world.history.stepped(answer)
                step += 1
            else:
                await asyncio.sleep(0.5)


class Operator(Client):
    """Pauses, resumes, flushes, cancels, discards, retries and rolls back."""

    async def run(self) -> None:
        rng = self.world.rng
        while True:
            await asyncio.sleep(rng.uniform(1.0, 10.0))
            await rng.choice(
                (self.pause, self.mend, self.mend, self.flush, self.cancel, self.discard, self.roll_back)
            )()

    async def pause(self) -> None:
        await self.ask(api.Pause(run=RUN))

    async def flush(self) -> None:
        await self.ask(api.Flush(run=RUN))

    async def cancel(self) -> None:
        for job in await self._jobs("queued", "running", "quarantined"):
            await self.ask(api.CancelJob(job=job))

    async def discard(self) -> None:
        for job in await self._jobs("quarantined"):
            await self.ask(api.DiscardJob(job=job))

    async def roll_back(self) -> None:
        info = await self.ask(api.CreateRun(name=RUN))
        if isinstance(info, api.RunInfo) and info.step > 1 and self.world.rng.random() < 0.5:
            self.world.history.rolled_back = True
            await self.cancel()
            await self.ask(api.Rollback(run=RUN, step=info.step - 1, lineage=info.lineage))

    async def mend(self) -> None:
        """What a person does who reads `artctl status`."""
        for job in await self._jobs("quarantined"):
            await self.ask(api.RetryJob(job=job))
        await self.ask(api.Resume(run=RUN))

    async def _jobs(self, *states: str) -> list[int]:
        answer = await self.ask(api.List(what="jobs", states=states))
        return [row["id"] for row in answer.rows] if isinstance(answer, api.Rows) else []


class Closer(Operator):
    """After the storm: sees that the run goes on, and asks for everything that was acknowledged."""

    async def run(self) -> None:
        """Two more steps, and a request that is answered; then every acknowledged submit again."""
        mending = asyncio.ensure_future(self._keep_mending())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._two_steps()
                await self._answered()
        except TimeoutError:
            self.world.history.broken(f"the run does not go on by itself within {PATIENCE_S:.0f} s")
        finally:
            mending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await mending
        for key, acked in list(self.world.history.acked.items()):
            answer = await self.ask(acked.op, acked.bulk)
            if isinstance(answer, api.Submitted) and answer.duplicate:
                self.world.history.submitted(key, acked.op, acked.bulk, answer)
            else:
                self.world.history.broken(f"{key} was acknowledged and is lost: {answer}")
            if acked.op.rollout:
                await self._same_reply(key, acked.trajectory)

    async def _same_reply(self, rollout: str, trajectory: int) -> None:
        """The trajectory of a rollout has the reply that its client had, once. (A wire that loses the word that another one was lost
        leaves that in it, too; the real one loses nothing.)"""
        body = await self.ask(api.ReadTrajectory(run=RUN, trajectory=trajectory))
        if isinstance(body, api.Body) and not body.problem:
            found = [one.response_id for one in msgspec.msgpack.decode(body.body, type=list[Turn])]
            if found.count(self.world.history.replies[rollout]) != 1:
                self.world.history.broken(f"{rollout} had {self.world.history.replies[rollout]}, and trains {found}")

    async def _keep_mending(self) -> None:
        while True:
            await self.mend()
            await asyncio.sleep(5.0)

    async def _answered(self) -> None:
        """Nothing is held for ever."""
        while self.world.gateway is None or not await self.world.gateway.respond(RUN):
            await asyncio.sleep(0.5)

    async def _two_steps(self) -> None:
        info = await self.ask(api.CreateRun(name=RUN, spec=self.world.spec))
        assert isinstance(info, api.RunInfo), info
        for step in (info.step + 1, info.step + 2):
            while not isinstance(
                answer := await self.ask(api.WaitStep(run=RUN, step=step, timeout_s=5.0)), api.StepInfo
            ):
                await asyncio.sleep(0.5)
            self.world.history.stepped(answer)
