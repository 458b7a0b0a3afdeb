"""The engine's side of a push where torch is needed: a trainer that dies under a pull, and loads that are checked."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from artd_schema.paths import process_ticks
from artd_schema.wire.direct import Offer
from artd_workers.engines.adapter import Fence
from artd_workers.engines.gate import FenceError, Gate
from artd_workers.engines.pull.session import MARGIN_BYTES
from artd_workers.engines.vllm.weights.hashing import Entry, Hasher, WeightError, entries
from artd_workers.engines.vllm.weights.load import Checking, InPlace, Update
from artd_workers.transfer.checksum import sum_of
from artd_workers.transfer.contracts import PullError
from artd_workers.transfer.process_watch import ProcessWatch
from tests.awake import wait_until
from tests.direct_rig import MemoryQueue, Pair, feeding
from tests.trainer.test_direct import MOE, made

pytestmark = pytest.mark.torch
SOON_S = 30.0


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the trainer's."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def ready(tmp_path: Path, other: subprocess.Popen[bytes]) -> Iterator[Pair]:
    """Opened, with an offer of that process."""
    one = made(MOE, tmp_path)
    one.open(offered_by(one, other.pid, process_ticks(other.pid) or 0))
    one.session.expect(one.stage())
    yield one
    one.session.close()
    one.feeder.close()


def offered_by(one: Pair, pid: int, ticks: int) -> Offer:
    offer = one.feeder.offer()
    feeds = tuple(msgspec.structs.replace(feed, pid=pid, ticks=ticks) for feed in offer.feeds)
    return msgspec.structs.replace(offer, feeds=feeds)


# ---- a trainer that dies ----------------------------------------------------------------------------------------------


def test_a_dead_trainers_memory_is_let_go_at_once(ready: Pair, other: subprocess.Popen[bytes]) -> None:
    ready.push()
    assert ready.port.opened
    other.kill()
    wait_until(lambda: not ready.port.opened, SOON_S)
    with pytest.raises(PullError, match="no trainer's offer"):
        ready.session.pull(ready.fence(), 1.0)


def test_a_pull_that_waits_for_a_dead_trainer_ends_at_once(ready: Pair, other: subprocess.Popen[bytes]) -> None:
    threading.Timer(0.1, other.kill).start()
    with pytest.raises(PullError, match="process ended"):
        ready.session.pull(ready.fence(), 60.0)  # nobody feeds it
    wait_until(lambda: not ready.port.opened, SOON_S)


def test_staging_that_waits_for_a_dead_trainer_ends_at_once(ready: Pair, other: subprocess.Popen[bytes]) -> None:
    fence = ready.fence()
    ready.session.stage(fence, 60.0)
    assert ready.session.poll_staging() == {}
    other.kill()
    wait_until(lambda: not ready.port.opened, SOON_S)
    with pytest.raises(PullError, match="nothing is staged"):
        ready.session.poll_staging()
    with pytest.raises(PullError, match="nothing is staged"):
        ready.session.swap(fence)
    ready.session.open(ready.feeder.offer())  # the next trainer's; the engine's weights were never touched
    ready.session.expect(ready.stage())
    ready.push()


def test_no_mapping_is_closed_under_a_copy(
    ready: Pair, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go, open_then = threading.Event(), threading.Event(), []
    copy = MemoryQueue.copy

    def slow(self: MemoryQueue, to: int, source: int, size: int) -> None:
        began.set()
        go.wait(SOON_S)
        open_then.append(bool(ready.port.opened))
        copy(self, to, source, size)

    monkeypatch.setattr(MemoryQueue, "copy", slow)
    fence = ready.fence()
    link = ready.session._link
    assert link is not None
    with feeding(ready, fence.fence, SOON_S):
        pull = threading.Thread(target=_quietly, args=(lambda: ready.session.pull(fence, SOON_S),))
        pull.start()
        assert began.wait(SOON_S)
        other.kill()
        wait_until(lambda: all(feed.gone() for feed in link._opened), SOON_S)
        time.sleep(0.05)  # what closes them would have come by now
        go.set()
        pull.join()
        ready.feeder.abort()  # nobody takes the rest
    assert open_then and all(open_then)
    wait_until(lambda: not ready.port.opened, SOON_S)


def _quietly(call: Callable[[], Any]) -> None:
    try:
        call()
    except PullError:
        return  # the trainer's end came before the last buffer's


def test_an_offer_of_a_process_that_is_gone_is_not_opened(tmp_path: Path) -> None:
    one = made(MOE, tmp_path)
    with subprocess.Popen(["true"]) as process:
        process.wait()
    ours = os.getpid()
    for pid, ticks in ((process.pid, 1), (ours, (process_ticks(ours) or 0) - 1)):
        with pytest.raises(PullError, match="has ended"):
            one.open(offered_by(one, pid, ticks))
        assert one.port.opened == []


def test_the_end_of_a_trainer_before_leaves_the_next_ones_offer_open(
    ready: Pair, other: subprocess.Popen[bytes]
) -> None:
    first = ready.session._link
    assert first is not None
    ready.session.open(ready.feeder.offer())
    ready.session.expect(ready.stage())
    other.kill()
    other.wait()
    ready.session._on_end(first)  # as if its thread had been just too late to hear that it is not wanted
    ready.push()


def test_a_watch_that_is_stopped_says_nothing_and_leaves_no_descriptor(other: subprocess.Popen[bytes]) -> None:
    told: list[ProcessWatch] = []
    before = len(os.listdir("/proc/self/fd"))
    watches = [ProcessWatch(other.pid, process_ticks(other.pid) or 0, told.append) for _ in range(3)]
    for watch in watches:
        watch.stop()
    wait_until(
        lambda: len(os.listdir("/proc/self/fd")) <= before, SOON_S
    )  # fewer: those of the test before may be on their way
    other.kill()
    assert told == [] and not any(watch.gone.is_set() for watch in watches)


# ---- staging ----------------------------------------------------------------------------------------------------------


def test_an_old_fence_stages_nothing(ready: Pair) -> None:
    ready.push()
    with pytest.raises(FenceError, match="has seen fence 1"):
        ready.session.stage(Fence("i", 1, 1, 1), 1.0)
    with pytest.raises(FenceError, match="belongs to"):
        ready.session.stage(Fence("i", 2, 9, 9), 1.0)


def test_room_is_for_the_weights_once_more(ready: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in ready.model.parameters())
    for free, room in ((size + MARGIN_BYTES, True), (size + MARGIN_BYTES - 1, False)):
        monkeypatch.setattr(ready.port, "free", lambda free=free: free)
        assert ready.session.room() is room
    fence = ready.fence()
    with feeding(ready, fence.fence, SOON_S):
        ready.session.stage(fence, SOON_S)
        wait_until(ready.session.poll_staging, SOON_S)
    assert ready.session.room(), "the spare memory is there already"
    ready.session.drop_spare()
    assert not ready.session.room()


# ---- loads ------------------------------------------------------------------------------------------------------------


def entry_of(name: str, tensor: Tensor, kind: str = "sum64") -> Entry:
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    known = sum_of(tensor) if kind == "sum64" else hashlib.sha256(raw.numpy()).hexdigest()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return entries([[name, dtype, list(tensor.shape), known]])[0]


@pytest.mark.parametrize("kind", ["sum64", "sha256"])
@pytest.mark.parametrize("bit", [0, 63, 64 * 500 + 5])
def test_one_changed_bit_is_found_by_either_kind(kind: str, bit: int) -> None:
    tensor = torch.randn(64, 32).bfloat16()
    entry = entry_of("a", tensor, kind)
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    for found, right in ((tensor, True), (changed, False), (tensor.roll(4, 1), False)):
        assert entry.is_of(found) is right
        hasher = Hasher()
        hasher.add(entry_of("b", tensor), tensor)
        hasher.add(entry, found)
        if right:
            hasher.finish()
        else:
            with pytest.raises(WeightError, match="1 tensors .* the first is a"):
                hasher.finish()
        hasher.close()
        assert hasher.bytes == 2 * 64 * 32 * 2


def test_the_signs_of_all_numbers_show() -> None:
    """A change of each word's top bits only, which a weaker hash lets cancel out."""
    generator = torch.Generator().manual_seed(1)
    for size in (4, 16, 64, 256, 4096):
        for _ in range(40):
            tensor = torch.randn(size, generator=generator)
            assert sum_of(tensor) != sum_of(-tensor)


class Fused(nn.Module):
    """Its loader fuses `a` and `b` into one parameter, as vLLM's do; `odd` does what a wrong one might."""

    def __init__(self) -> None:
        super().__init__()
        self.ab = nn.Parameter(torch.zeros(8, 8), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.odd: Callable[[str], bool] = lambda name: False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        place = {"a": self.ab.data[:4], "b": self.ab.data[4:], "norm": self.norm.data}
        for name, tensor in weights:
            if not self.odd(name):
                place[name].copy_(tensor)
        return {"ab", "norm"}


def weights() -> dict[str, Tensor]:
    return {"a": torch.randn(4, 8), "b": torch.randn(4, 8), "norm": torch.ones(8)}


def test_a_load_in_place_fills_every_tensor_where_it_lies() -> None:
    model, held = Fused(), weights()
    at = [parameter.data_ptr() for parameter in model.parameters()]
    load = InPlace(model)
    load.start()
    load.load([entry_of(*item) for item in held.items()], iter(held.items()))
    load.finish()
    assert torch.equal(model.ab.data, torch.cat([held["a"], held["b"]]))
    assert [parameter.data_ptr() for parameter in model.parameters()] == at
    assert load.bytes == (64 + 8) * 4
    assert set(load.seconds) == {"transfer", "load"}


@pytest.mark.parametrize("left_out", ["b", "norm"])
def test_a_load_in_place_that_leaves_something_out_is_found(left_out: str) -> None:
    model, held = Fused(), weights()
    model.odd = lambda name: name == left_out
    load = InPlace(model)
    load.start()
    with pytest.raises(WeightError, match="the first is " + {"b": "ab"}.get(left_out, left_out)):
        load.load([entry_of(*item) for item in held.items()], iter(held.items()))


def test_what_a_load_is_fed_must_be_the_table() -> None:
    held = weights()
    table = [entry_of(*item) for item in held.items()]
    items = list(held.items())
    for source, says in (
        (items[:2], "the source has no more"),
        ([items[1], items[0], items[2]], "the source has b"),
        ([*items, ("c", torch.ones(2))], "the source has c"),
        ([("a", held["a"].double()), *items[1:]], "a is .'float64'"),
        ([("a", -held["a"]), *items[1:]], "the first is a"),
    ):
        load = InPlace(Fused())
        load.start()
        with pytest.raises(WeightError, match=says):
            load.load(table, iter(source))


def test_vllms_own_calls_bring_what_the_update_wants_and_nothing_else() -> None:
    held, update = weights(), Update(Gate("i", 1))
    update.begin(Fence("i", 1, 1, 1))
    update.wanted = {name: entry_of(name, tensor) for name, tensor in held.items()}
    model = Fused()
    checking = Checking(model, update)
    checking.load_weights([("a", held["a"]), ("norm", held["norm"])])
    assert set(update.wanted) == {"b"} and update.figures == {"bytes": (32 + 8) * 4.0}
    for name, tensor, says in (
        ("a", held["a"], "already received"),
        ("c", held["a"], "not in this update"),
        ("b", -held["b"], "other bytes"),
    ):
        with pytest.raises(WeightError, match=says):
            checking.load_weights([(name, tensor)])
    assert not torch.equal(model.ab.data[4:], -held["b"]), "what is wrong is never loaded"
