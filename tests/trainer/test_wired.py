"""The direct push without shared memory: the same plan over a connection, every buffer a message, and nothing that hangs.

The connection is a Unix socket (`tests.plain_wire`), as bad as NCCL over NVLink: the end of the other side is not seen. The last
part has the real `Nccl` over a scripted libnccl.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from artd_schema.paths import process_ticks
from artd_schema.wire.direct import Feed, Offer
from artd_workers.deadline import Deadline
from artd_workers.engines.pull.nccl_feed import NcclFeed
from artd_workers.engines.pull.open_offer import WrongWeights
from artd_workers.engines.vllm.direct.survey import parameters
from artd_workers.trainer.push.direct.feeder import Feeder
from artd_workers.transfer.contracts import PullError
from artd_workers.transfer.nccl.communicator import NcclError
from artd_workers.transfer.ring import slot_bytes
from tests.awake import wait_until
from tests.direct_rig import MemoryPort, Pair, feeding
from tests.plain_wire import PlainWire

from .test_direct import KINDS, MOE, made, same

pytestmark = pytest.mark.torch
PATIENCE_S, SHORT_S = 60.0, 0.3
"""For what must end by itself, and for what must be ended."""


class Both(Pair):
    """A pair whose source sends. ours, theirs: trainer's and engine's end."""

    ours: PlainWire

    @property
    def theirs(self) -> PlainWire:
        return self.port.wires[-1]

    def open(self, offer: Offer | None = None) -> None:
        """Both sides meet, as at a first push."""
        join = threading.Thread(target=self._meet)
        join.start()
        try:
            super().open(offer)
        finally:
            join.join()

    def _meet(self) -> None:
        with self.ours.within(PATIENCE_S):
            self.ours.join(self.feeder.outlet.name, 0)  # type: ignore[attr-defined]

    def feed(self, fence: int, timeout_s: float) -> None:
        with self.ours.within(timeout_s):
            super().feed(fence, timeout_s)


@contextmanager
def wired(shape: dict[str, Any], folder: Path, **rest: Any) -> Iterator[Both]:
    one = Both(**vars(made(shape, folder, **rest)))
    one.feeder.close()
    one.ours = one.port.wire()
    one.feeder = Feeder(one.served.weight_source, one.plan, folder, one.ours)
    try:
        yield one
    finally:
        one.session.close()
        one.feeder.close()


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Both]:
    with wired(MOE, tmp_path) as one:
        one.open()
        one.session.expect(one.stage())
        yield one


def untouched(one: Pair) -> bool:
    return all(bool(tensor.isnan().all()) for tensor in parameters(one.model).values())


# ---- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [4, 0])
def test_a_push_gives_the_export(kind: str, rank: int, tmp_path: Path) -> None:
    """rank 0: full parameters."""
    with wired(KINDS[kind], tmp_path, rank=rank) as one:
        one.open()
        one.session.expect(one.stage())
        one.push()
        assert same(one) and one.port.opened == []


@pytest.mark.parametrize("buffer_bytes", [1 << 12, 24 << 10, 1 << 22])
def test_buffers_of_any_size_and_another_dtype(buffer_bytes: int, tmp_path: Path) -> None:
    with wired(MOE, tmp_path, dtype=torch.float16, buffer_bytes=buffer_bytes) as one:
        one.open()
        one.session.expect(one.stage())
        one.push()
        assert same(one, torch.float16)


def test_pushes_follow_each_other_over_one_connection(ready: Both) -> None:
    """In place, then staged; each with what was staged for it."""
    for staged in (False, True, False):
        for tensor in ready.live.values():
            tensor.mul_(1.5)
        ready.session.expect(ready.stage())
        if not staged:
            ready.push()
        else:
            before = {name: tensor.clone() for name, tensor in parameters(ready.model).items()}
            fence = ready.fence()
            with feeding(ready, fence.fence, PATIENCE_S):
                ready.session.stage(fence, PATIENCE_S)
                while not ready.session.poll_staging():
                    pass
            assert all(torch.equal(tensor, before[name]) for name, tensor in parameters(ready.model).items())
            ready.session.swap(fence)
        assert same(ready)
    assert len(ready.port.wires) == 2 and not ready.theirs.reason


def test_the_wire_form_is_a_header_and_each_turns_bytes(ready: Both) -> None:
    (feed,) = ready.feeder.offer().feeds
    ready.push()
    sizes = slot_bytes(feed, 2)
    assert [size for _, size in ready.ours.log] == [size for _, size in ready.theirs.log] == [8, *sizes]
    assert sum(sizes) == 2 * sum(tensor.numel() for tensor in parameters(ready.model).values())
    assert (feed.page, len(feed.nccl), {segment.handle for segment in feed.segments}) == ("", 128, {b""})


def test_nothing_is_received_into_a_buffer_that_was_not_copied(ready: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing at all when no pull is under way."""
    from tests.direct_rig import Done, MemoryQueue

    copied = threading.Event()
    monkeypatch.setattr(Done, "done", lambda _: copied.is_set())
    monkeypatch.setattr(MemoryQueue, "after", lambda *_: None)
    assert ready.theirs.log == []
    fence = ready.fence()
    pull = threading.Thread(target=ready.session.pull, args=(fence, PATIENCE_S))
    monkeypatch.setattr(ready.feeder._schedule.queue, "mark", lambda: _Made(), raising=False)
    with feeding(ready, fence.fence, PATIENCE_S):
        pull.start()
        wait_until(lambda: ready.theirs.worked == 4)
        time.sleep(0.05)
        assert ready.theirs.log[0] == ("recv", 8) and len(ready.theirs.log) == 1 + 3
        copied.set()
        pull.join(PATIENCE_S)
    assert same(ready)


class _Made:
    def done(self) -> bool:
        return True


# ---- refusals, and nothing hangs ----------------------------------------------------------------------------------------


def ended(one: Both, match: str) -> None:
    """Both ends are aborted, the engine's with this reason, and are not used again."""
    assert one.theirs.watchdog.bitten.wait(PATIENCE_S) and match in one.theirs.reason
    with pytest.raises(PullError, match="was aborted"):
        one.session._link.pull.run(99, Deadline(SHORT_S), None)


def test_one_flipped_bit_is_refused(ready: Both) -> None:
    weight = ready.weights["decoder.layers.1.self_attention.linear_proj.weight"]
    weight.view(-1).view(torch.uint8)[4321] ^= 1
    with pytest.raises(WrongWeights, match=r"1 of .*model.layers.1.self_attn.o_proj.weight"):
        ready.push()


@pytest.mark.parametrize("sent", [3, 2**40, -1])
def test_a_stale_trainers_header_is_refused_and_nothing_is_copied(ready: Both, sent: int) -> None:
    fence = ready.fence()
    feed = threading.Thread(target=_swallow, args=(ready.feed, sent, PATIENCE_S))
    feed.start()
    with pytest.raises(PullError, match=f"fence {sent}, and the engine expects fence {fence.fence}"):
        ready.session.pull(fence, PATIENCE_S)
    assert untouched(ready)
    ended(ready, "the engine expects fence")
    ready.ours.abort("the push has ended")
    feed.join(PATIENCE_S)
    assert not feed.is_alive()


def _swallow(call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except (NcclError, TimeoutError):
        return


def test_a_trainer_that_is_silent_ends_the_pull_at_its_deadline(ready: Both) -> None:
    """Before the header, and in the middle of the messages."""
    with pytest.raises(PullError):
        ready.session.pull(ready.fence(), SHORT_S)
    assert untouched(ready)
    ended(ready, "")


def test_a_trainer_that_hangs_in_the_middle_ends_the_pull_at_its_deadline(ready: Both) -> None:
    half(ready, 1)
    deadline = Deadline(60.0)

    def passes() -> None:
        wait_until(lambda: ready.theirs.worked > 2)
        deadline._end = 0.0

    threading.Thread(target=passes).start()
    with pytest.raises(PullError, match="60 s passed"):
        ready.session._link.pull.run(1, deadline, None)
    ended(ready, "60 s passed")


def half(one: Both, fence: int) -> None:
    """Header and two turns."""
    outlet: Any = one.feeder.outlet
    outlet.begin(fence)
    for slot in range(2):
        one.feeder._schedule.fill(slot)
    outlet.ready = 2


@pytest.mark.parametrize("staged", [False, True])
def test_a_trainer_that_dies_in_the_middle_ends_the_pull_at_once(tmp_path: Path, staged: bool) -> None:
    """The process that the offer names is watched, where it is one of this machine's."""
    trainer = subprocess.Popen(["sleep", "60"])
    try:
        with wired(MOE, tmp_path) as one:
            offer = one.feeder.offer()
            who = {"pid": trainer.pid, "ticks": process_ticks(trainer.pid)}
            one.open(msgspec.structs.replace(offer, feeds=(msgspec.structs.replace(offer.feeds[0], **who),)))
            one.session.expect(one.stage())
            fence = one.fence()
            half(one, fence.fence)
            threading.Timer(0.1, trainer.kill).start()
            with pytest.raises(PullError, match="process (has )?ended"):
                if staged:
                    one.session.stage(fence, 60.0)
                    while not one.session.poll_staging():
                        time.sleep(0.005)
                else:
                    one.session.pull(fence, 60.0)
            wire = one.theirs
            assert wire.watchdog.bitten.wait(PATIENCE_S) and "process has ended" in wire.reason
            wait_until(lambda: one.session._link is None)
    finally:
        trainer.kill()
        trainer.wait()


def test_an_engine_that_hangs_ends_the_feed_at_its_deadline(ready: Both) -> None:
    """It takes some, then nothing: the trainer's wait ends, and its connection."""
    with pytest.raises((NcclError, TimeoutError)):
        ready.feed(1, SHORT_S)
    assert ready.ours.watchdog.bitten.wait(PATIENCE_S) and ready.ours.reason
    with pytest.raises(NcclError, match="was aborted"):
        ready.feed(2, SHORT_S)


def test_an_abort_from_outside_ends_either_side(ready: Both) -> None:
    for side, call in (
        (ready.ours, lambda: ready.feed(1, 60.0)),
        (ready.theirs, lambda: ready.session.pull(ready.fence(), 60.0)),
    ):
        threading.Timer(0.1, side.abort, ("the daemon said so",)).start()
        with pytest.raises((NcclError, PullError), match="the daemon said so"):
            call()


def test_an_engine_that_nobody_meets_gives_up_and_keeps_nothing(tmp_path: Path) -> None:
    with wired(MOE, tmp_path) as one:
        one.session.open(one.feeder.offer(), SHORT_S)
        with pytest.raises(PullError, match=r"was not met over NCCL: it was not done within 0.3 s"):
            one.session._link.pull.run(1, Deadline(PATIENCE_S), None)
        one.session.open(one.feeder.offer(), 60.0)
        with pytest.raises(PullError, match=r"was not met over NCCL: 0.3 s passed"):
            one.session._link.pull.run(1, Deadline(SHORT_S), None)
        assert one.theirs.watchdog.bitten.wait(PATIENCE_S) and untouched(one)


def test_a_new_offer_ends_the_connection_of_the_one_before(ready: Both, tmp_path: Path) -> None:
    before, opened = ready.theirs, ready.session._link._opened[0]
    assert isinstance(opened, NcclFeed) and len(opened._ring) == 3
    (other := tmp_path / "other").mkdir()
    with wired(MOE, other) as one:
        one.session = ready.session
        one.port = ready.port
        one.open()
        assert before.watchdog.bitten.is_set() and not one.theirs.reason and opened._ring == []


# ---- offers that are no ring ---------------------------------------------------------------------------------------------


def change(feed: Feed, **values: Any) -> Feed:
    return msgspec.structs.replace(feed, **values)


def test_feeds_that_are_no_ring_are_refused_before_anybody_is_met(tmp_path: Path) -> None:
    with wired(MOE, tmp_path) as one:
        (feed,) = one.feeder.offer().feeds
        port, none = MemoryPort(), lambda: None

        def refused(match: str, feed: Feed) -> None:
            with pytest.raises(PullError, match=match):
                NcclFeed(port, feed, none, Deadline(SHORT_S), 2)
            assert port.wires == []

        first, second, *rest = feed.units
        refused("unit 0 of", change(feed, units=(second, first, *rest)))
        refused("unit 1 of", change(feed, units=(first, msgspec.structs.replace(second, runs=first.runs), *rest)))
        refused("unit 0 of", change(feed, units=(msgspec.structs.replace(first, slot=-1), second, *rest)))
        refused("unit 0 of", change(feed, segments=()))
        small = [msgspec.structs.replace(segment, size=64) for segment in feed.segments]
        refused("slot 0 has", change(feed, segments=tuple(small)))


def test_an_engine_without_room_for_the_ring_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(_: PlainWire, size: int) -> None:
        raise RuntimeError(f"CUDA out of memory: {size}")

    with wired(MOE, tmp_path) as one:
        monkeypatch.setattr(PlainWire, "memory", memory)
        with pytest.raises(PullError, match=f"no room for the {3 << 14}-byte ring"):
            one.session.open(one.feeder.offer(), PATIENCE_S)
        assert one.theirs.watchdog.bitten.is_set()
