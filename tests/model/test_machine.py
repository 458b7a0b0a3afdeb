"""State machine: the services' own writes over real rows, against `reference`, in any order that Hypothesis thinks of.

After every rule: rows say what the reference says, `artd check` finds nothing, every state followed legally from the one
before, and what was once true for ever (ids, fences, epochs, who was trained) is true still.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from artd.errors import RequestError
from artd.serving.routing_table import load_table
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from tests.fakes.rows import ENGINE, TRAINER, body, turn

from .machine import Machine

GROUPS = ("a", "b", "c", "d", "e", "f", "g", "h")
HOLDS = ("held", "late", "gateway dies", "engine dies", "daemon dies")
FAILURES = ("transient", "permanent", "interrupted", "full")


class Rules(Machine):
    """What may happen."""

    @initialize(
        groups_per_step=st.sampled_from((1, 2)),
        mode=st.sampled_from(("merged", "lora")),
        started=st.sampled_from((1, 1, 0)),
    )
    def start(self, groups_per_step: int, mode: str, started: int) -> None:
        self.begin(groups_per_step, mode)
        if started:
            self.claim()
            self.commit()

    # ---- clients ------------------------------------------------------------------------------------------------------------

    @rule(group=st.sampled_from(GROUPS), number=st.integers(0, 2), reward=st.sampled_from((0.0, 1.0)))
    def submit(self, group: str, number: int, reward: float) -> None:
        key = f"{group}{number}"
        expected = self.model.submit(key, group, reward)
        answer = self.ask(api.Submit(run="r", group=group, reward=reward, key=key), [body(turn(raw=key.encode()))])
        if expected == "conflict":
            assert isinstance(answer, RequestError) and answer.code == "conflict", answer
            return
        assert isinstance(answer, api.Submitted), answer
        assert answer.duplicate == (expected == "again")
        assert self.ids.setdefault(key, answer.trajectory) == answer.trajectory

    @rule(first=st.sampled_from(GROUPS))
    def fill(self, first: str) -> None:
        """A whole group that can be trained on."""
        for number in range(2):
            self.submit(first, number, float(number))

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.model.groups)))
        self.model.seal(self.model.groups[group])
        answer = self.ask(api.Seal(run="r", group=group))
        assert isinstance(answer, api.GroupInfo) and answer.state == self.model.groups[group].state

    @rule()
    def flush(self) -> None:
        self.model.flush_all()
        assert isinstance(self.ask(api.Flush(run="r")), api.Done)

    @rule(seconds=st.sampled_from((1.0, 10.0, 400.0)))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.model.now = self.clock.ms
        self.model.seal_late()
        self.do(self.store.write(self.services._ingest._seal_due))

    # ---- packer and trainer ---------------------------------------------------------------------------------------------------

    @rule()
    def packs(self) -> None:
        async def look() -> bool:
            packer = self.services._packer
            request, groups = await self.store.write(packer._due)
            return request is not None and await packer._pack(request, groups)

        assert self.do(look()) == self.model.pack()

    @precondition(lambda self: self.order is None)
    @rule()
    def claim(self) -> None:
        if self.push is not None and self.push.source == "live":
            expected = None
        else:
            expected = self.model.claim()
        before = len(self.peers.sent)
        self.do(self.services._dispatch._claim_next(1))
        assert (len(self.peers.sent) > before) == (expected is not None)
        if expected is not None:
            order = self.order = self.peers.take(w.Run)
            assert (order.step, order.kind) == (expected.step, expected.kind)
            assert all((order.job, order.fence) > (old.job, old.fence) for old in self.orders if old.job == order.job)
            assert self.epochs.setdefault(order.epoch, order.job) == order.job
            self.orders.append(order)

    @precondition(lambda self: self.order is None)
    @rule(group=st.sampled_from(GROUPS))
    def work_comes(self, group: str) -> None:
        """What leads to a job, at once."""
        self.fill(group)
        self.packs()
        self.claim()

    @precondition(lambda self: self.order is not None)
    @rule()
    def commit(self) -> None:
        order, self.order = self.order, None
        assert order is not None
        if self.model.commit(self.job):
            self.do(self.services._dispatch.take_staged(TRAINER, self.stage(order)))
            self.committed[order.job] = (order.fence, self.peers.take(w.Committed).checkpoint.sha)
        else:
            self.do(self.services._dispatch.take_staged(TRAINER, self.stage(order)))
            self.peers.take(w.Fenced)

    @precondition(lambda self: self.order is None and self.push is None)
    @rule(group=st.sampled_from(GROUPS))
    def step_comes(self, group: str) -> None:
        """What leads to a push, at once."""
        self.work_comes(group)
        if self.order is not None:
            self.commit()
        self.send_push()

    @precondition(lambda self: self.order is not None)
    @rule()
    def damaged(self) -> None:
        """A result whose files are not what its manifest says is never a step."""
        order, self.order = self.order, None
        assert order is not None
        report = self.stage(order)
        (Path(order.dir) / "weights.bin").write_bytes(b"other bytes")
        self.model.fail(self.job, "permanent")
        self.do(self.services._dispatch.take_staged(TRAINER, report))
        self.peers.take(w.Ack)
        assert not Path(order.dir).exists()

    @precondition(lambda self: self.order is not None)
    @rule(failure=st.sampled_from(FAILURES))
    def fail(self, failure: Any) -> None:
        order, self.order = self.order, None
        assert order is not None
        self.model.fail(self.job, failure)
        self.do(
            self.services._dispatch.take_failed(
                TRAINER, w.Failed(job=order.job, fence=order.fence, failure=failure, error="told to")
            )
        )
        self.peers.take(w.Ack)

    @rule(ordered=st.booleans())
    def trainer_dies(self, ordered: bool) -> None:
        if self.order is not None:
            self.model.fail(self.job, "killed" if ordered else "died")
            self.order = None
        self.do(self.services._dispatch.take_back(TRAINER, self.spawns["trainer"], ordered, "gone"))
        self.respawn("trainer")

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), how=st.sampled_from(("woken", "staged", "failed")))
    def late_report(self, data: st.DataObject, how: str) -> None:
        """A report of an order that is over changes nothing; `woken`: of a process that was thought dead and has staged."""
        over = [order for order in self.orders if order is not self.order]
        if over:
            self.report_late(data.draw(st.sampled_from(over)), how)

    @precondition(lambda self: self.order is not None)
    @rule(failure=st.sampled_from(FAILURES), how=st.sampled_from(("woken", "staged", "failed")))
    def overtaken(self, failure: Any, how: str) -> None:
        """The same while the same job runs under a newer fence."""
        old = self.order
        assert old is not None
        self.fail(failure)
        self.time_passes(400.0)
        self.claim()
        self.report_late(old, how)

    def report_late(self, order: w.Run, how: str) -> None:
        identity = (order.job, order.fence)
        if how == "failed":
            late = w.Failed(job=order.job, fence=order.fence, failure="permanent", error="late")
            self.do(self.services._dispatch.take_failed(TRAINER, late))
            self.peers.take(w.Fenced)
            return
        sha = self.stage(order).manifest_sha if how == "woken" else self.results.get(identity, "0" * 64)
        report = w.Staged(job=order.job, fence=order.fence, dir=order.dir, manifest_sha=sha)
        self.do(self.services._dispatch.take_staged(TRAINER, report))
        if self.committed.get(order.job) == (order.fence, sha):
            assert self.peers.take(w.Committed).checkpoint.sha == sha
        else:
            self.peers.take(w.Fenced)
            assert not Path(order.dir).exists()

    # ---- the operator -----------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), how=st.sampled_from(("cancel", "discard")))
    def end(self, data: st.DataObject, how: str) -> None:
        number = data.draw(st.integers(1, len(self.model.jobs)))
        obeyed = self.model.end(self.model.jobs[number - 1], how)
        answer = self.ask(api.CancelJob(job=number) if how == "cancel" else api.DiscardJob(job=number))
        assert isinstance(answer, api.Done) == obeyed, answer

    @precondition(lambda self: self.model.unfinished and self.model.unfinished.state == "quarantined")
    @rule()
    def retry(self) -> None:
        obeyed = self.model.retry(self.model.jobs[-1])
        assert isinstance(self.ask(api.RetryJob(job=len(self.model.jobs))), api.Done) == obeyed

    @rule(pause=st.booleans())
    def steer(self, pause: bool) -> None:
        obeyed = self.model.steer("paused" if pause else "active")
        answer = self.ask(api.Pause(run="r") if pause else api.Resume(run="r")) if pause else self.resume()
        assert isinstance(answer, api.Done) == obeyed, answer

    def resume(self) -> api.Answer | RequestError:
        self.services._requests.parts.revive = lambda: None  # no supervisor runs here
        return self.ask(api.Resume(run="r"))

    @precondition(lambda self: self.steps > 40)
    @rule()
    def finish(self) -> None:
        self.model.steer("finished")
        assert isinstance(self.ask(api.Finish(run="r")), api.Done)

    @precondition(lambda self: self.model.step > 0)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(0, self.model.step))
        kept = {
            row["step"] for row in self.rows("SELECT step FROM checkpoint WHERE state = 'committed' AND abandoned = 0")
        }
        lineage = self.model.lineage
        obeyed = self.model.rollback(step, kept)
        answer = self.ask(api.Rollback(run="r", step=step, lineage=lineage))
        assert isinstance(answer, api.Done) == obeyed, answer

    # ---- engine, retention, boot ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.push is None)
    @rule()
    def send_push(self) -> None:
        before = len(self.peers.sent)
        self.do(self.services._pusher._send_due(ENGINE))
        sent = [message for message in self.peers.sent[before:] if isinstance(message, w.Push)]
        if sent:
            self.push, self.held = sent[-1], False
            assert all(self.push.fence > old.fence for old in self.pushes)
            assert self.push.checkpoint.step == self.model.step
            self.pushes.append(self.push)

    @precondition(lambda self: self.order is None and self.push is None and self.spec.rollout_weights_mode == "merged")
    @rule(group=st.sampled_from(GROUPS), how=st.sampled_from(HOLDS))
    def hold_comes(self, group: str, how: str) -> None:
        """What leads to the pause of a push, at once."""
        self.step_comes(group)
        if self.push is not None:
            self.pausing(how)

    @precondition(lambda self: self.push is not None and self.push.mode == "merged" and not self.held)
    @rule(how=st.sampled_from(HOLDS))
    def pausing(self, how: str) -> None:
        """The engine wants to pause, and is told to go on when the gateway has said that it holds, or is dead."""
        push, pusher = self.push, self.services._pusher
        assert push is not None
        before = len(self.peers.sent)

        async def asked() -> asyncio.Task[None]:
            message = w.Pausing(push=push.push, fence=push.fence)
            task = asyncio.ensure_future(pusher.pausing(message))
            await asyncio.sleep(0.1)
            await pusher.pausing(message)  # said twice
            return task

        async def answered(task: asyncio.Task[None], *fences: int) -> None:
            for fence in fences:
                pusher.take_held(w.Held(push=push.push, fence=fence, engine=ENGINE, in_flight=0))
            await asyncio.sleep(0.1)
            assert task.done() == (push.fence in fences)

        task = self.do(asked())
        hold = w.Hold(push=push.push, fence=push.fence, engine=ENGINE)
        held = [engine.hold for engine in self.do(self.store.write(load_table)).engines]
        # A run that is finished has no routes; the gateway still says `Held` to a push that was on its way.
        assert self.peers.sent[before:] == [hold] and held == [True] * (self.model.state != "finished")
        self.held = True
        proceed = [w.Proceed(push=push.push, fence=push.fence)]
        match how:
            case "held" | "late":
                self.do(answered(task, *({"held": (push.fence,), "late": (push.fence - 1, push.fence)}[how])))
            case "gateway dies":
                self.wire.forget("gateway", self.spawns["gateway"])
                pusher.gateway_died()
                self.do(task)
                self.respawn("gateway")
            case "engine dies":
                proceed = []
                self.engine_dies(False)
                self.do(task)
            case "daemon dies":
                proceed = []
                task.cancel()
                self.daemon_dies(False)  # with the wire that recorded what was sent
                before = 0
        assert [message for message in self.peers.sent[before:] if isinstance(message, w.Proceed)] == proceed

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def late_pausing(self, data: st.DataObject) -> None:
        """Word of a push that is over, or of an older sending of the same push, holds nothing."""
        over = [push for push in self.pushes if push is not self.push]
        if over:
            push, before = data.draw(st.sampled_from(over)), len(self.peers.sent)
            self.do(self.services._pusher.pausing(w.Pausing(push=push.push, fence=push.fence)))
            assert len(self.peers.sent) == before

    @rule()
    def gateway_dies(self) -> None:
        self.wire.forget("gateway", self.spawns["gateway"])
        self.services._pusher.gateway_died()
        self.respawn("gateway")

    @precondition(lambda self: self.push is not None)
    @rule()
    def live(self) -> None:
        if self.push is not None and self.push.mode == "merged" and not self.held:
            self.pausing("held")
        push, self.push = self.push, None
        assert push is not None
        self.do(self.services._pusher.live(w.Live(push=push.push, fence=push.fence, max_abs=0.0, mean_abs=0.0)))
        sha = push.checkpoint.sha
        (left,) = self.rows(f"SELECT abandoned FROM checkpoint WHERE sha = '{sha}'")
        # A step that a rollback left while it was being pushed takes no request any more.
        assert sha not in self.served() if left["abandoned"] else self.served()[-1] == sha

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def late_live(self, data: st.DataObject) -> None:
        """Word of a push that is over, or of an older sending of the same push, serves nothing."""
        fences = [push.fence for push in self.pushes if push is not self.push]
        if not fences:
            return
        number = data.draw(st.sampled_from([push.push for push in self.pushes]))
        before = self.served()
        self.do(
            self.services._pusher.live(
                w.Live(push=number, fence=data.draw(st.sampled_from(fences)), max_abs=0.0, mean_abs=0.0)
            )
        )
        assert self.served() == before

    @precondition(lambda self: self.push is not None)
    @rule()
    def push_again(self) -> None:
        """The engine dies under a push, which goes to the next one; then the first one's word comes."""
        old = self.push
        assert old is not None
        self.engine_dies(False)
        self.send_push()
        before = self.served()
        self.do(self.services._pusher.live(w.Live(push=old.push, fence=old.fence, max_abs=0.0, mean_abs=0.0)))
        assert self.served() == before

    @rule(failed=st.booleans())
    def engine_dies(self, failed: bool) -> None:
        """After a failed push, or by itself. A push that failed five times pauses the run."""
        given_up = self.failed_pushes()
        if self.push is not None and failed:
            message = w.PushFailed(push=self.push.push, fence=self.push.fence, phase="verify", error="told to")
            self.do(self.services._pusher.take_failed(message))
        self.do(self.services._pusher.engine_died(ENGINE, "gone"))
        self.push = None
        assert not self.served()
        if self.failed_pushes() > given_up:
            self.model.hold("push")
        self.respawn("engine")

    def failed_pushes(self) -> int:
        return len(self.rows("SELECT 1 FROM push WHERE state = 'failed'"))

    @rule()
    def retire(self) -> None:
        for folder in self.do(self.store.write(self.services._retain._retire)):
            shutil.rmtree(self.root / folder, ignore_errors=True)

    @rule(finished=st.booleans())
    def daemon_dies(self, finished: bool) -> None:
        """kill -9 and another boot; the trainer may have finished its job by then."""
        self.model.reboot(self.rows("SELECT max(at) FROM event")[0][0])
        self.close()
        if self.order is not None:
            adopted = finished and not self.job.doomed and self.model.state != "finished"
            if finished:
                self.stage(self.order)
            if adopted:
                assert self.model.commit(self.job)
                self.committed[self.order.job] = (self.order.fence, self.results[self.order.job, self.order.fence])
            else:
                self.model.fail(self.job, "killed")
        self.boot()


COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True, "database": None}


@pytest.mark.timeout(300)
class TestMachine(Rules.TestCase):  # type: ignore[valid-type]
    """Without shrinking, which takes minutes: `TestLong` makes examples small."""

    settings = settings(
        max_examples=10, stateful_step_count=40, derandomize=True, phases=[Phase.generate], **COMMON
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestLong(Rules.TestCase):  # type: ignore[valid-type]
    settings = settings(max_examples=200, stateful_step_count=60, **COMMON)
