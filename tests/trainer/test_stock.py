"""The trainer's side of the engine's own transfer calls: what goes over the wire, and that nothing makes it hang.

libnccl is `tests/fakes/nccl.c`: broadcasts go into a pipe, and any step can be never done, hang, or fail.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import stat
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from artd_schema.data.manifest import WeightEntry
from artd_schema.wire import worker as w
from artd_workers.engines.vllm.weights import stock_calls
from artd_workers.trainer.push import stock
from artd_workers.trainer.push.pusher import Pusher
from artd_workers.trainer.push.snapshot import Snapshot
from artd_workers.transfer import checksum, sums
from artd_workers.transfer.nccl import stock as wire
from artd_workers.transfer.nccl.communicator import Library, NcclError
from tests.awake import Awake
from tests.compiled import library
from tests.listening import listening

pytestmark = pytest.mark.torch
FINE, NEVER, HANGS, FAILS, FAILS_LATER = range(5)
INIT, REDUCE, BROADCAST = range(3)
FAKE = Path(__file__).parents[1] / "fakes" / "nccl.c"
DEADLINE_S, PATIENCE_S = 0.3, 60.0
"""Of what must not end by itself, and of what does."""
LIMIT = 10_000
ID = bytes(range(1, 129))


class Fake(Library):
    """The fake libnccl and its script."""

    def __init__(self) -> None:
        path = str(library(FAKE))
        super().__init__(path)
        self._fake = ctypes.CDLL(path)
        self._before = self._fake.fake_aborts()
        for step in (INIT, REDUCE, BROADCAST):
            self.script(step, FINE)

    def script(self, step: int, way: int, well: int = 0, out: int = -1) -> None:
        self._fake.fake_script(step, way, well, out)

    @property
    def aborts(self) -> int:
        return self._fake.fake_aborts() - self._before


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def sender(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stock.Sender]:
    monkeypatch.setattr(stock, "chunks", partial(wire.chunks, limit=LIMIT))
    one = stock.Sender(tmp_path / "pair", torch.device("cpu"), fake)
    yield one
    one.abort()
    assert one._watchdog.bitten.wait(PATIENCE_S)


def tensors() -> dict[str, torch.Tensor]:
    """Of several dtypes, one not contiguous, one larger than a chunk."""
    torch.manual_seed(1)
    shapes = {"a": (30, 20), "b": (7,), "c": (64, 48), "d": (1, 3), "e": (20, 30)}
    kinds = {"a": torch.bfloat16, "d": torch.float16}
    found = {name: torch.randn(shape).to(kinds.get(name, torch.float32)) for name, shape in shapes.items()}
    return found | {"e": found["e"].t()}


def table(found: dict[str, torch.Tensor]) -> list[WeightEntry]:
    return [WeightEntry(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in found.items()]


def flat(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# ---- the wire -------------------------------------------------------------------------------------------------------


def test_every_push_is_the_tables_bytes_in_chunks_as_vllm_cuts_them(
    fake: Fake, sender: stock.Sender, tmp_path: Path
) -> None:
    found = tensors()
    reading, writing = os.pipe()
    fake.script(BROADCAST, FINE, out=writing)
    sender.join(PATIENCE_S)
    for _ in range(2):
        sender.send(table(found), found.values(), PATIENCE_S)
    os.close(writing)
    sent = frames(reading)
    parts = {name: flat(tensor) for name, tensor in found.items()}
    wanted = [parts["a"] + parts["b"] + parts["c"], parts["d"] + parts["e"]]
    assert sent == wanted * 2
    assert sender.joined and not sender.dead and fake.aborts == 0
    left = tmp_path / "pair"
    assert left.read_bytes() == ID and stat.S_IMODE(left.stat().st_mode) == 0o600


def frames(reading: int) -> list[bytes]:
    with open(reading, "rb") as pipe:
        out = []
        while size := pipe.read(8):
            out.append(pipe.read(int.from_bytes(size, sys.byteorder)))
        return out


def test_a_chunk_ends_only_when_it_is_larger_than_the_limit() -> None:
    rows = [WeightEntry(str(i), "float32", (25,)) for i in range(5)]
    assert [[row.name for row in chunk] for chunk in wire.chunks(rows, 200)] == [["0", "1", "2"], ["3", "4"]]
    assert wire.chunks([], 200) == []


@pytest.mark.parametrize("change", [{"e": None}, {"b": torch.ones(8)}, {"b": torch.ones(7, dtype=torch.bfloat16)}])
def test_tensors_that_are_not_the_tables_end_the_pair(
    fake: Fake, sender: stock.Sender, change: dict[str, torch.Tensor | None]
) -> None:
    found = tensors()
    sender.join(PATIENCE_S)
    with pytest.raises(ValueError, match=next(iter(change))):
        sender.send(table(found), [t for t in (found | change).values() if t is not None], PATIENCE_S)
    assert sender.dead and fake.aborts == 1


def test_a_chunks_checksums_are_made_at_once() -> None:
    """By the GPU's kernel, in Triton's interpreter."""
    torch.manual_seed(2)
    packed = torch.randint(0, 255, (8 * 50_000,), dtype=torch.uint8)
    parts = [part.view(torch.bfloat16).view(-1, 4) for part in packed.split([8 * 40_000, 8, 8 * 9_000, 8 * 999])]
    assert sums.by_kernel(parts) == sums.sums_of(parts) == [checksum.sum_of(part) for part in parts]
    swapped = parts[0].clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert sums.by_kernel([swapped]) != sums.by_kernel(parts[:1])
    with pytest.raises(ValueError, match="tensor 1 of 2"):
        sums.by_kernel([parts[1], torch.ones(3)])
    assert sums.sums_of([]) == []


# ---- nothing hangs --------------------------------------------------------------------------------------------------

STEPS = {INIT: "ncclCommInitRankConfig", REDUCE: "ncclAllReduce", BROADCAST: "ncclBroadcast"}


@pytest.mark.parametrize("way", [NEVER, HANGS, FAILS, FAILS_LATER])
@pytest.mark.parametrize("step", STEPS)
def test_whatever_nccl_does_a_push_ends_by_its_deadline_and_the_communicator_is_aborted(
    fake: Fake, sender: stock.Sender, step: int, way: int
) -> None:
    fake.script(step, way, well=1 if step == BROADCAST else 0)
    found = tensors()
    limit_s = DEADLINE_S if way in (NEVER, HANGS) else PATIENCE_S
    if step == BROADCAST:
        sender.join(PATIENCE_S)
    with Awake() as took, pytest.raises(NcclError, match=STEPS[step]) as error:
        if step == BROADCAST:
            sender.send(table(found), found.values(), limit_s)
        else:
            sender.join(limit_s)
    assert took.seconds < PATIENCE_S / 2
    assert {NEVER: "not done within 0.3 s", HANGS: "(3)", FAILS: "system error", FAILS_LATER: "remote"}[way] in str(
        error.value
    )
    assert sender.dead and fake.aborts == 1
    with pytest.raises(NcclError, match="aborted"):
        sender.send(table(found), found.values(), DEADLINE_S)
    assert fake.aborts == 1


def test_a_push_that_the_daemon_ends_is_aborted_at_once(fake: Fake, sender: stock.Sender) -> None:
    fake.script(BROADCAST, NEVER)
    found = tensors()
    sender.join(PATIENCE_S)
    timer = threading.Timer(0.1, sender.abort)
    timer.start()
    with Awake() as took, pytest.raises(NcclError, match="the push has ended"):
        sender.send(table(found), found.values(), PATIENCE_S)
    assert took.seconds < PATIENCE_S / 2 and fake.aborts == 1


def test_a_thread_that_is_stuck_elsewhere_does_not_keep_the_communicator(fake: Fake, sender: stock.Sender) -> None:
    """As in an allocation that waits for the GPU, on which a broadcast hangs."""
    found = tensors()

    def stuck() -> Iterator[torch.Tensor]:
        end = time.monotonic() + PATIENCE_S
        while not fake.aborts and time.monotonic() < end:
            time.sleep(0.005)
        yield from found.values()

    sender.join(PATIENCE_S)
    with pytest.raises(NcclError, match="not done within"):
        sender.send(table(found), stuck(), DEADLINE_S)
    assert fake.aborts == 1


def test_a_torch_without_nccl_says_so() -> None:
    with pytest.raises(NcclError, match="not built for CUDA"):
        Library("libnccl-of-nobody.so")


# ---- what the daemon is told ------------------------------------------------------------------------------------------


class Bench:
    """A pusher for a GPU that is this CPU. told: what it refused."""

    def __init__(self, fake: Fake, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: queue.SimpleQueue[w.Refused] = queue.SimpleQueue()
        self.pusher, self.folder, self.senders = Pusher(self.told.put), folder, []

        def make(rendezvous: Path, _device: torch.device) -> stock.Sender:
            self.senders.append(sender(rendezvous, torch.device("cpu"), fake))
            return self.senders[-1]

        sender = stock.Sender
        monkeypatch.setattr(stock, "Sender", make)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def push(self, number: int, deadline_s: float = PATIENCE_S, pair: str = "pair", engine: str = "engine-1-0") -> None:
        found = tensors()
        entries = tuple(table(found))
        snapshot = Snapshot(entries, tuple(zip(entries, found.values(), strict=True)), "cuda")
        ref = w.CheckpointRef(run="r", step=1, epoch=1, lineage=0, sha="0" * 64, dir=str(self.folder))
        message = w.Push(push=number, fence=number, checkpoint=ref, mode="merged", source="live", name="r@1", drain_s=0.0,
                         deadline_s=deadline_s, rendezvous=str(self.folder / pair), transfer="stock", engine=engine)  # fmt: skip
        self.pusher.push(message, snapshot)

    def refused(self) -> w.Refused:
        return self.told.get(timeout=PATIENCE_S)


@pytest.fixture
def bench(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    one = Bench(fake, tmp_path, monkeypatch)
    yield one
    for sender in one.senders:
        sender.abort()
        assert sender._watchdog.bitten.wait(PATIENCE_S)


def test_a_push_that_breaks_off_is_told_to_the_daemon_for_the_engine_cannot_see_it(fake: Fake, bench: Bench) -> None:
    fake.script(BROADCAST, FAILS_LATER)
    bench.push(1)
    said = bench.refused()
    assert (said.push, said.transfer) == (1, None) and "remote process exited" in said.reason
    bench.push(2)
    assert "failed before" in bench.refused().reason
    fake.script(BROADCAST, FINE)
    bench.push(3, pair="next spawn")
    wait_for(lambda: bench.senders[-1].joined and not bench.pusher._running)
    assert len(bench.senders) == 2 and bench.told.empty() and not bench.senders[1].dead


def test_an_engine_that_cannot_be_met_is_not_tried_this_way_again(fake: Fake, bench: Bench) -> None:
    """As when both sides are on one GPU, which NCCL refuses."""
    fake.script(INIT, FAILS)
    bench.push(1)
    said = bench.refused()
    assert said.transfer == "stock" and "unhandled system error" in said.reason


def test_the_daemons_end_of_a_push_aborts_it(fake: Fake, bench: Bench) -> None:
    fake.script(BROADCAST, NEVER)
    bench.push(1, deadline_s=60.0)
    wait_for(lambda: bench.senders and bench.senders[0].joined)
    bench.pusher.end(1, 1)
    said = bench.refused()
    assert said.transfer is None and "the push has ended" in said.reason
    assert fake.aborts == 1


def test_two_engines_have_pairs_and_fences_of_their_own(bench: Bench) -> None:
    bench.push(2, pair="first")
    bench.push(1, pair="second", engine="engine-1-1")
    wait_for(lambda: len(bench.senders) == 2 and all(one.joined for one in bench.senders) and not bench.pusher._running)
    assert bench.told.empty() and not any(one.dead for one in bench.senders)
    bench.push(1, pair="first")
    assert "fence 1 is older than 2" in bench.refused().reason


def wait_for(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


# ---- the meeting ----------------------------------------------------------------------------------------------------


def test_the_engine_waits_for_the_id(tmp_path: Path) -> None:
    path = tmp_path / "pair"
    with pytest.raises(TimeoutError, match=str(path)):
        wire.await_id(path, 0.01)
    timer = threading.Timer(0.05, wire.leave_id, (path, ID))
    timer.start()
    assert wire.await_id(path, 10.0) == ID
    wire.leave_id(path, ID[1:])
    with pytest.raises(ValueError, match="127 bytes"):
        wire.await_id(path, 0.0)


def test_vllm_unpickles_the_id_from_a_store_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer does what vLLM's `StatelessProcessGroup.broadcast_obj` does."""

    class UniqueId(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_byte * 128)]

    name = ""
    for part in ("vllm", "distributed", "device_communicators", "pynccl_wrapper"):
        name = f"{name}.{part}".removeprefix(".")
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(__path__=[], ncclUniqueId=UniqueId))
    with stock_calls.meet(ID, PATIENCE_S) as meeting:
        port = meeting["master_port"]
        assert of_port(port) == [("tcp", "127.0.0.1", port)]
        client = dist.TCPStore(
            meeting["master_address"], port, 2, is_master=False, timeout=timedelta(seconds=PATIENCE_S), use_libuv=False
        )
        found = pickle.loads(client.get("broadcast_from/0/0"))
    assert isinstance(found, UniqueId) and bytes(found) == ID
    assert of_port(port) == []


def of_port(port: int) -> list[tuple[str, str, int]]:
    """This process's listeners at a port; libraries loaded by other tests open and close theirs."""
    return [entry for entry in listening([os.getpid()]) if entry[2] == port]
