"""A trainer that serves from its weights as they lie, with plain memory for a GPU's: real jobs, real pushes, an engine's session."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from artd_schema.run.spec import EngineSpec, RunSpec, TrainerSpec
from artd_schema.wire import worker as w
from artd_schema.wire.direct import EngineTable, Obstacle, Offer
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Fence
from artd_workers.engines.gate import Gate
from artd_workers.engines.pull.session import Session
from artd_workers.engines.vllm.direct.survey import parameters
from artd_workers.trainer import placement
from artd_workers.trainer.placement import Placement
from artd_workers.trainer.push import serving
from artd_workers.trainer.push.direct.feeder import Feeder
from artd_workers.trainer.push.direct.weight_lock import WeightLock
from artd_workers.trainer.push.direct.weight_source import WeightSource
from artd_workers.trainer.step import job as step_job
from artd_workers.trainer.worker import TrainerWorker
from artd_workers.transfer import checksum
from artd_workers.transfer.contracts import DeviceError, Port, PullError
from artd_workers.transfer.merge import BaseWeights, Stored, explain_rounding, merged_tensors
from tests import toys
from tests.awake import Awake, wait_until
from tests.direct_rig import MemoryPort, engine_model, engine_table, fused

from .jobs import push_of, spec_for, table_of
from .test_memory import Desk, Ear

pytestmark = pytest.mark.torch
WAIT_S = 60.0


class Engine:
    """One spawn of an engine: its folder, with its table in it, and its session."""

    def __init__(
        self, folder: Path, config: dict[str, Any], dtype: torch.dtype, turned: bool = False, port: Port | None = None
    ) -> None:
        """turned: its table has another order."""
        folder.mkdir()
        self.model, self._meeting = engine_model(config, dtype), folder / "direct-1"
        table = engine_table(self.model)
        if turned:
            table = msgspec.structs.replace(table, tensors=table.tensors[::-1])
        self.write(table)
        tensors = parameters(self.model)
        names = [tensor.name for tensor in table.tensors]
        self.session = Session(Gate("i", 1), port or MemoryPort(), names, [tensors[name] for name in names])
        self._opened = False

    @property
    def meeting(self) -> Path:
        return self._meeting

    def write(self, table: EngineTable) -> None:
        (self._meeting.parent / "table").write_bytes(msgspec.msgpack.encode(table))

    def pull(self, ref: w.CheckpointRef, number: int, timeout_s: float = WAIT_S) -> None:
        """As the harness and its engine take a push."""
        if not self._opened:
            wait_until((self._meeting / "offer").exists)
            self.session.open(msgspec.msgpack.decode((self._meeting / "offer").read_bytes(), type=Offer))
            self._opened = True
        self.session.expect({entry.name: entry.sum64 or 0 for entry in table_of(ref).tensors})
        self.session.pull(Fence("i", 1, number, number), timeout_s)

    def holds(self, ref: w.CheckpointRef, spec: Any) -> bool:
        """Whether it has the merge of what lies on disk, bit for bit."""
        wanted = fused(dict(on_disk(ref, spec)), self.model)
        return all(torch.equal(tensor, wanted[name]) for name, tensor in parameters(self.model).items())


def on_disk(ref: w.CheckpointRef, spec: Any) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint folder says that the engine is served, in push order."""
    folder, dtype = Path(ref.dir), getattr(torch, spec.engine.dtype)
    if spec.parameters == "full":
        return merged_tensors(Stored(folder / "model.safetensors", list(BaseWeights(spec.model))), {}, 1.0, dtype)
    scale = spec.lora.alpha / spec.lora.rank
    return merged_tensors(BaseWeights(spec.model), load_file(folder / "adapter_model.safetensors"), scale, dtype)


class Bench:
    """A worker over a desk's trainer; the test is its link's thread."""

    def __init__(self, root: Path, toy: Path, **changes: Any) -> None:
        self.spec = spec_for(
            toy, expert_replay=False, engine=EngineSpec(dtype=changes.pop("dtype", "bfloat16")), **changes
        )
        self.root, self.config = root, json.loads((toy / "config.json").read_text())
        self.desk, self.ear = Desk(root, self.spec, MemoryPort()), Ear()
        self.worker = TrainerWorker(self.ear, self.desk.trainer)
        self._pushes = 0

    def engine(self, name: str, **rest: Any) -> Engine:
        return Engine(self.root / name, self.config, getattr(torch, self.spec.engine.dtype), **rest)

    def push(self, ref: w.CheckpointRef, engine: Engine, **changes: Any) -> int:
        """Tell the trainer; returns the push's number, which is its fence too."""
        self._pushes += 1
        message = push_of(ref, engine.meeting, self._pushes, self._pushes)
        fields: dict[str, Any] = {"transfer": "direct", **changes}
        self.worker._take(msgspec.structs.replace(message, **fields), [])
        return self._pushes

    def ended(self) -> None:
        wait_until(lambda: not self.worker._pusher._running)

    def refused(self, number: int) -> w.Refused:
        self.ended()
        (found,) = [m for m in self.ear.said if isinstance(m, w.Refused) and m.push == number]
        return found

    def served(self, ref: w.CheckpointRef, engine: Engine) -> bool:
        """A whole push."""
        number = self.push(ref, engine)
        engine.pull(ref, number)
        self.ended()
        return engine.holds(ref, self.spec)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Buffers that are filled many times in a push."""
    monkeypatch.setattr(serving, "WeightSource", partial(WeightSource, buffers=3, buffer_bytes=1 << 17))
    yield
    torch.use_deterministic_algorithms(False)  # a trainer makes its process so for good; tests share theirs


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's experts are one parameter, as on a GPU."""
    monkeypatch.setattr(placement, "of", lambda spec, layers: Placement(grouped=True))


def test_steps_reach_two_engines(tmp_path: Path, toy_folders: dict[str, Path], grouped: None) -> None:
    bench = Bench(tmp_path, toy_folders["moe"])
    first, second = bench.engine("first"), bench.engine("second", turned=True)
    zero = bench.desk.commit(0, None)
    assert bench.served(zero, first)
    one = bench.desk.commit(1, zero)
    assert bench.served(one, first) and not first.holds(zero, bench.spec)
    assert (first.meeting.stat().st_mode & 0o777, (first.meeting / "page").exists()) == (0o700, True)
    assert bench.served(one, second)
    wait_until(lambda: not (first.meeting / "page").exists())
    two = bench.desk.commit(2, one)
    assert bench.served(two, second)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_is_of_the_merge_on_disk(tmp_path: Path, toy_folders: dict[str, Path], dtype: str) -> None:
    """Sums, shapes and order; and tensor by tensor the same bits, for whoever sends them so."""
    bench = Bench(tmp_path, toy_folders["qwen3"], dtype=dtype)
    one = bench.desk.commit(1, bench.desk.commit(0, None))
    snapshot = bench.desk.trainer.snapshot_of(one)
    assert snapshot is not None
    table, found = table_of(one).tensors, dict(on_disk(one, bench.spec))
    assert [entry.name for entry in table] == list(found)
    assert all(entry.sum64 == checksum.sum_of(found[entry.name]) and not entry.sha256 for entry in table)
    assert all((entry.dtype, entry.shape) == (dtype, tuple(found[entry.name].shape)) for entry in table)
    for _ in range(2):
        sent = list(snapshot.tensors)
        assert [entry for entry, _ in sent] == list(table)
        assert all(torch.equal(tensor, found[entry.name]) for entry, tensor in sent)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_training_waits_for_a_push_and_does_not_change_it(
    tmp_path: Path, toy_folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter is trained beside the push, and staged after it; weights that are read as they lie are not even trained."""
    # An engine of the trainer's own dtype could be given full parameters as they lie.
    dtype = "float32" if kind == "full" else "bfloat16"
    bench = Bench(tmp_path, toy_folders["qwen3"], parameters=kind, dtype=dtype)
    engine, waiting, training = bench.engine("engine"), threading.Event(), threading.Event()
    zero = bench.desk.commit(0, None)
    before = clones(bench)
    number = bench.push(zero, engine)
    wait_until((engine.meeting / "offer").exists)
    renew, train = WeightLock.renew, step_job.train_step
    monkeypatch.setattr(WeightLock, "renew", lambda weight_lock: (waiting.set(), renew(weight_lock))[1])
    monkeypatch.setattr(step_job, "train_step", lambda *rest: (training.set(), train(*rest))[1])
    done: list[w.CheckpointRef] = []
    job = threading.Thread(target=lambda: done.append(bench.desk.commit(1, zero)))
    job.start()
    assert waiting.wait(WAIT_S) and training.wait(0.1) == (kind == "lora")
    changed = any(not torch.equal(a, b) for a, b in zip(before, clones(bench), strict=True))
    assert changed == (kind == "lora") and not done
    engine.pull(zero, number)
    assert engine.holds(zero, bench.spec)
    job.join(WAIT_S)
    assert bench.served(done[0], engine)


def clones(bench: Bench) -> list[Tensor]:
    """What is trained, as it is now."""
    return [parameter.detach().clone() for _, parameter in bench.desk.trainer._trained.parameters.list_parameters()]


def test_a_push_that_nobody_takes_ends(tmp_path: Path, toy_folders: dict[str, Path]) -> None:
    """At the daemon's word at once, and at its deadline when the weights are to change; its pair is not used again."""
    bench = Bench(tmp_path, toy_folders["qwen3"])
    first, second = bench.engine("first"), bench.engine("second")
    zero = bench.desk.commit(0, None)
    number = bench.push(zero, first)
    wait_until((first.meeting / "offer").exists)
    with Awake() as took:
        bench.worker._take(w.PushEnd(push=number, fence=number), [])
        bench.ended()
    assert took.seconds < 20.0  # of a deadline of 30 s
    with pytest.raises(PullError, match="failed to fill"):
        first.pull(zero, number)
    assert "failed before" in bench.refused(bench.push(zero, first)).reason
    number = bench.push(zero, second, deadline_s=0.3, drain_s=0.1)
    bench.desk.commit(1, zero)
    bench.ended()
    assert bench.refused(bench.push(zero, second)).transfer is None, "step 0 is not resident any more"


def test_an_end_that_is_told_before_the_trainer_has_seen_the_last_copy_leaves_the_pair(
    tmp_path: Path, toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, toy_folders["qwen3"])
    engine, told, wait = bench.engine("engine"), threading.Event(), Feeder._wait

    def late(source: Feeder, *rest: Any) -> None:
        wait(source, *rest)
        if source.outlet.ready == len(source._schedule.slots):
            assert told.wait(WAIT_S)  # the engine takes the last buffer meanwhile

    zero = bench.desk.commit(0, None)
    with monkeypatch.context() as patch:
        patch.setattr(Feeder, "_wait", late)
        number = bench.push(zero, engine)
        engine.pull(zero, number)
        assert bench.worker._pusher._running
        bench.worker._take(w.PushEnd(push=number, fence=number), [])
        told.set()
        bench.ended()
    assert bench.served(bench.desk.commit(1, zero), engine)


def test_a_model_that_is_no_whole_words_is_served_from_copies(tmp_path: Path) -> None:
    """Rows of 252 bytes in bf16."""
    bench = Bench(tmp_path, toys.make(tmp_path / "toy", "qwen3", hidden_size=126))
    one = bench.desk.commit(1, bench.desk.commit(0, None))
    refused = bench.refused(bench.push(one, bench.engine("engine")))
    assert refused.transfer == "direct" and "serves copies" in refused.reason
    snapshot, found = bench.desk.trainer.snapshot_of(one), dict(on_disk(one, bench.spec))
    assert snapshot is not None and [entry.name for entry in snapshot.entries] == list(found)
    assert all(entry.sha256 and entry.sum64 is None for entry in snapshot.entries)
    assert all(torch.equal(tensor, found[entry.name]) for entry, tensor in snapshot.tensors)


def test_weights_that_are_not_committed_are_not_offered(tmp_path: Path, toy_folders: dict[str, Path]) -> None:
    bench = Bench(tmp_path, toy_folders["qwen3"])
    engine = bench.engine("engine")
    staged = bench.desk.stage(bench.desk.order(0, None))
    refused = bench.refused(bench.push(staged, engine))
    assert refused.transfer is None and "does not hold" in refused.reason and not engine.meeting.exists()


def test_a_snapshot_of_before_is_refused(tmp_path: Path, toy_folders: dict[str, Path]) -> None:
    """The push's thread comes too late: the next step is staged already."""
    bench = Bench(tmp_path, toy_folders["qwen3"])
    zero = bench.desk.commit(0, None)
    snapshot = bench.desk.trainer.snapshot_of(zero)
    engine = bench.engine("engine")
    bench.desk.commit(1, zero)
    message = msgspec.structs.replace(push_of(zero, engine.meeting), transfer="direct")
    bench.worker._pusher.push(message, snapshot)
    assert "trained these weights further" in bench.refused(1).reason


def test_a_trainer_of_several_processes_is_pulled_from_or_sends_copies(
    toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no whole tensors on a GPU: for a way that wants them it keeps copies from the start."""
    spec = spec_for(toy_folders["qwen3"], trainer=TrainerSpec(tensor_parallel=2))
    assert serving.transfers(spec, MemoryPort()) == ("direct", "stock")
    monkeypatch.setattr(placement, "device_of", lambda spec: "cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(serving, "Cuda", lambda index: f"gpu {index}")
    ways = {
        way: msgspec.structs.replace(spec, engine=EngineSpec(transfer=way))
        for way in ("auto", "staged", "in_place", "stock", "nccl")
    }
    assert [way for way, one in ways.items() if serving.port_of(one) == "gpu 1"] == ["auto", "staged", "in_place"]
    assert serving.transfers(ways["stock"], serving.port_of(ways["stock"])) == ("stock",)


def test_what_cannot_be_planned_is_refused_by_name(
    tmp_path: Path, toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, toy_folders["qwen3"])
    zero = bench.desk.commit(0, None)

    def refused(name: str, says: str, edit: Any = None) -> None:
        engine = bench.engine(name)
        table = engine_table(engine.model)
        if edit:
            engine.write(edit(table))
        found = bench.refused(bench.push(zero, engine))
        assert says in found.reason and found.transfer == "direct"
        assert not (engine.meeting / "offer").exists()

    change = msgspec.structs.replace
    refused("a", "layers.1.attn: MLA", lambda t: change(t, obstacles=(Obstacle("layers.1.attn", "MLA"),)))
    refused("b", "model.embed_tokens.weight", lambda t: change(t, tensors=t.tensors[1:]))
    refused("c", "float16", lambda t: change(t, tensors=tuple(change(one, dtype="float16") for one in t.tensors)))

    def share(port: MemoryPort, tensor: Tensor) -> Any:
        raise DeviceError("memory of expandable segments cannot be shared")

    assert bench.desk.trainer.transfers() == ("direct", "nccl", "stock")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryPort, "share", share)
        refused("d", "expandable segments")
        assert bench.desk.trainer.transfers() == ("nccl", "stock")
    gone = bench.engine("e")
    (gone.meeting.parent / "table").unlink()
    assert "table is missing" in bench.refused(bench.push(zero, gone)).reason


def test_a_base_that_was_rounded_is_served_from_copies(toy_folders: dict[str, Path]) -> None:
    base = BaseWeights(toy_folders["qwen3"])
    assert base.dtypes() == {torch.float32}
    assert "stored in torch.float32" in explain_rounding(base, {torch.bfloat16})
    assert not explain_rounding(base, {torch.float32})
    assert not explain_rounding({"a": torch.ones(1, dtype=torch.bfloat16)}, {torch.bfloat16, torch.float32})


def test_a_trainer_that_rounds_its_base_offers_no_direct_push(toy_folders: dict[str, Path]) -> None:
    """Before it has built a model, so that no engine is restarted for it."""
    stored_in_fp32 = RunSpec(model=str(toy_folders["qwen3"]), trainer=TrainerSpec(dtype="bfloat16"))
    assert serving.transfers(stored_in_fp32, MemoryPort()) == ("stock",)
    exact = msgspec.structs.replace(stored_in_fp32, trainer=TrainerSpec(dtype="float32"))
    assert serving.transfers(exact, MemoryPort()) == ("direct", "nccl", "stock")
    every_weight = msgspec.structs.replace(stored_in_fp32, parameters="full")
    assert serving.transfers(every_weight, MemoryPort()) == ("direct", "nccl", "stock")


def test_the_copy_has_one_reader_at_a_time() -> None:
    """And changes only when it has none: the reader's deadline is what `renew` waits for."""
    live = torch.ones(3)
    weight_lock, aborted = WeightLock({"a": live}), threading.Event()
    version = weight_lock.renew()
    weight_lock.copy_adapter()
    renewed = threading.Thread(target=lambda: (weight_lock.renew(), weight_lock.copy_adapter()))
    with weight_lock.read(version, Deadline(0.1), aborted.set):
        with pytest.raises(TimeoutError, match="another push"), weight_lock.read(version, Deadline(0.02), lambda: None):
            raise AssertionError
        live.mul_(2)
        renewed.start()
        assert aborted.wait(WAIT_S) and renewed.is_alive()
        assert weight_lock.adapter["a"].tolist() == [1, 1, 1]
    renewed.join(WAIT_S)
    assert weight_lock.adapter["a"].tolist() == [2, 2, 2] and weight_lock.flat.numel() == 64
