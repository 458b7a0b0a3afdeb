"""A trainer of several processes that is pulled from: real gloo ranks, real jobs, and an engine's session in this process.

The engine reads the ranks' memory by `tests.other_memory`; nothing else is shared with them but files.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from artd_schema.run.spec import EngineSpec, TrainerSpec
from artd_schema.wire import worker as w
from artd_schema.wire.direct import Offer
from artd_workers.transfer import checksum
from artd_workers.transfer.contracts import DeviceError, PullError
from tests import toys
from tests.awake import wait_until
from tests.other_memory import OtherPort

from .jobs import push_of, spec_for, table_of
from .test_push_direct import Engine, on_disk

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
LAYOUTS: dict[str, tuple[str, dict[str, int], str, int]] = {
    "tensor": ("qwen3_moe", {"tensor_parallel": 2}, "bfloat16", 2),
    "expert": ("qwen3_moe", {"expert_parallel": 2}, "bfloat16", 2),
    "tensor, dense": ("qwen3", {"tensor_parallel": 2}, "float32", 2),
    "stages": ("qwen3_moe", {"pipeline_parallel": 2}, "bfloat16", 2),
    "context": ("qwen3", {"context_parallel": 2}, "bfloat16", 1),
    "tensor and expert": ("qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2}, "bfloat16", 2),
    "tensor and context": ("qwen3_moe", {"tensor_parallel": 2, "context_parallel": 2}, "bfloat16", 2),
    "tensor and stages": ("qwen3_moe", {"tensor_parallel": 2, "pipeline_parallel": 2}, "bfloat16", 4),
    "expert over tensor": ("qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 4}, "bfloat16", 4),
    "expert and stages": ("qwen3_moe", {"expert_parallel": 2, "pipeline_parallel": 2}, "float32", 4),
}
"""Toy, sizes, the engine's dtype, how many ranks give something."""
FOUR = list(LAYOUTS)[6:]


class Family:
    """Ranks that have met. toys: folders by family."""

    def __init__(self, root: Path, size: int = 2) -> None:
        self.root, self.size, self.torn = root, size, False
        self.toys = {name: toys.make(root / name, name, num_hidden_layers=2) for name in ("qwen3", "qwen3_moe")}
        self.ranks = [self._start(rank) for rank in range(size)]
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._pushes = 0

    def _start(self, rank: int) -> subprocess.Popen[str]:
        environment = {
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        job = {"rank": rank, "world": self.size, "folder": str(self.root)}
        with (self.root / f"rank-{rank}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.trainer.push_child", json.dumps(job)], cwd=ROOT, env=os.environ | environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def _listen(self) -> None:
        stdout = self.ranks[0].stdout
        assert stdout is not None
        for line in stdout:
            self._said.put(json.loads(line))

    def end(self) -> None:
        for rank in self.ranks:
            with rank:  # closes its pipes
                rank.kill()

    def tell(self, rank: int, line: dict[str, Any]) -> None:
        stdin = self.ranks[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(line) + "\n")
        stdin.flush()

    def lead(self, what: str, **rest: Any) -> None:
        self.tell(0, {"do": what, "with": rest})

    def heard(self, what: str) -> Any:
        """What rank 0 says next of this kind."""
        end = time.monotonic() + WAIT_S
        while True:
            try:
                line = self._said.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                pytest.fail("rank 0 is silent: " + (self.root / "rank-0.log").read_text()[-3000:])
            if what in line:
                return line[what]
            if line.keys() & {"failed", "refused"}:
                pytest.fail(str(line))


class Layout:
    """A run's trainer of several ranks, and engines."""

    def __init__(self, family: Family, name: str, fault: str | None = None) -> None:
        toy, sizes, dtype, self.giving = LAYOUTS[name]
        self.family, self.folder = family, family.root / f"{name} {fault}"
        self.config = json.loads((family.toys[toy] / "config.json").read_text())
        self.spec = spec_for(
            family.toys[toy],
            expert_replay=False,
            engine=EngineSpec(dtype=dtype),
            trainer=TrainerSpec(device="cpu", **sizes),
        )
        self.port, self._engines = OtherPort(), list[Engine]()
        for rank in range(family.size):
            spec = msgspec.to_builtins(self.spec)
            family.tell(rank, {"do": "layout", "name": self.folder.name, "spec": spec, "fault": fault})

    def __enter__(self) -> Layout:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for engine in self._engines:
            engine.session.close()
        if kind is not None:
            self.family.torn = True
            return
        self.family.tell(0, {"do": "over"})
        self.family.heard("over")
        for rank in range(1, self.family.size):
            self.family.tell(rank, {"do": "over"})

    def engine(self, name: str, **rest: Any) -> Engine:
        dtype = getattr(torch, self.spec.engine.dtype)
        self._engines.append(Engine(self.folder / name, self.config, dtype, port=self.port, **rest))
        return self._engines[-1]

    def train(self, step: int, parent: w.CheckpointRef | None = None) -> None:
        self.family.lead("commit", step=step, parent=msgspec.to_builtins(parent) if parent else None)

    def commit(self, step: int, parent: w.CheckpointRef | None = None) -> w.CheckpointRef:
        self.train(step, parent)
        return self.committed()

    def committed(self) -> w.CheckpointRef:
        return msgspec.convert(self.family.heard("committed"), w.CheckpointRef)

    def push(self, ref: w.CheckpointRef, engine: Engine, **changes: Any) -> int:
        self.family._pushes += 1
        message = push_of(ref, engine.meeting, self.family._pushes, self.family._pushes)
        message = msgspec.structs.replace(message, **{"transfer": "direct", **changes})
        self.family.lead("push", message=msgspec.to_builtins(message))
        return message.push

    def refused(self, ref: w.CheckpointRef, engine: Engine, **changes: Any) -> w.Refused:
        self.push(ref, engine, **changes)
        return msgspec.convert(self.family.heard("refused"), w.Refused)

    def idle(self) -> bool:
        self.family.lead("idle")
        return self.family.heard("idle")

    def served(self, ref: w.CheckpointRef, engine: Engine) -> bool:
        """A whole push."""
        engine.pull(ref, self.push(ref, engine))
        return self.idle() and engine.holds(ref, self.spec)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Family]]:
    made: list[Family] = []
    yield made
    for one in made:
        one.end()


@pytest.fixture
def family(families: list[Family], tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Of two ranks; a new one where a test has left the last one in the middle of something."""
    if not families or families[-1].torn:
        families.append(Family(tmp_path_factory.mktemp("family")))
    return families[-1]


@pytest.fixture
def own_family(tmp_path: Path) -> Iterator[Family]:
    """One that may be killed."""
    made = Family(tmp_path)
    yield made
    made.end()


def whole_pushes(family: Family, name: str) -> None:
    """Of each step, bit for bit; the table has the sums of one process; a second engine of the same trainer has it too."""
    with Layout(family, name) as layout:
        zero = layout.commit(0)
        first = layout.engine("first")
        assert layout.served(zero, first)
        offer = msgspec.msgpack.decode((first.meeting / "offer").read_bytes(), type=Offer)
        assert len(offer.feeds) == len({feed.pid for feed in offer.feeds}) == layout.giving
        one = layout.commit(1, zero)
        found, table = dict(on_disk(one, layout.spec)), table_of(one).tensors
        assert [entry.name for entry in table] == list(found)
        assert all(entry.sum64 == checksum.sum_of(found[entry.name]) for entry in table)
        assert all((tuple(entry.shape), entry.sha256) == (tuple(found[entry.name].shape), "") for entry in table)
        assert layout.served(one, first) and not first.holds(zero, layout.spec)
        assert layout.served(one, layout.engine("second", turned=True))
        assert layout.refused(one, layout.engine("stock"), transfer="stock").transfer == "stock"
    assert not layout.port.opened


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in FOUR])
def test_the_engine_holds_the_merge_on_disk(family: Family, name: str) -> None:
    whole_pushes(family, name)


def test_so_does_that_of_four_ranks(tmp_path: Path) -> None:
    four = Family(tmp_path, 4)
    try:
        for name in FOUR:
            whole_pushes(four, name)
    finally:
        four.end()


@pytest.mark.parametrize(
    ("fault", "name", "says"),
    [
        ("column", "tensor", "are in two pieces"),
        ("twice", "expert", "are in two pieces"),
        ("missing", "tensor", "are in no piece"),
    ],
)
def test_a_part_that_is_wrong_is_never_served(family: Family, fault: str, name: str, says: str) -> None:
    """Neither table nor push is made of it: the weights are served from copies."""
    with Layout(family, name, fault) as layout:
        zero = layout.commit(0)
        assert all(entry.sha256 and entry.sum64 is None for entry in table_of(zero).tensors)
        assert "serves copies" in layout.refused(zero, layout.engine("engine")).reason
    assert says in (family.root / "rank-0.log").read_text()


@pytest.mark.parametrize("fault", ["offer lacks a run", "offer has another column"])
def test_an_offer_that_is_no_whole_is_refused(family: Family, fault: str) -> None:
    with Layout(family, "tensor", fault) as layout:
        zero = layout.commit(0)
        engine = layout.engine("engine")
        refused = layout.refused(zero, engine)
        assert refused.transfer == "direct" and "the engine's model.layers.0" in refused.reason, refused
        assert "piece" in refused.reason and not (engine.meeting / "offer").exists()


def test_training_goes_on_beside_a_push(family: Family) -> None:
    """The next step is trained and waits to be staged; what is pulled meanwhile is what was pushed."""
    with Layout(family, "tensor", None) as layout:
        zero = layout.commit(0)
        engine = layout.engine("beside")
        number = layout.push(zero, engine)
        wait_until((engine.meeting / "offer").exists)
        layout.train(1, zero)
        time.sleep(0.5)
        engine.pull(zero, number)
        assert engine.holds(zero, layout.spec)
        one = layout.committed()
        assert layout.idle() and layout.served(one, engine)


def test_a_push_that_nobody_takes_ends_on_all_ranks(family: Family) -> None:
    """At the daemon's word; and at its deadline, when the next step waits for it."""
    with Layout(family, "tensor", None) as layout:
        zero = layout.commit(0)
        first, second = layout.engine("told"), layout.engine("late")
        number = layout.push(zero, first)
        wait_until((first.meeting / "offer").exists)
        layout.family.lead("end", push=number)
        assert layout.idle()
        with pytest.raises(PullError, match="failed to fill"):
            first.pull(zero, number)
        assert "failed before" in layout.refused(zero, first).reason
        layout.push(zero, second, deadline_s=0.3, drain_s=0.1)
        one = layout.commit(1, zero)
        assert layout.idle() and layout.served(one, layout.engine("next"))


def test_a_rank_that_dies_under_a_push_ends_it(own_family: Family) -> None:
    layout = Layout(own_family, "tensor", None)
    zero = layout.commit(0)
    engine = layout.engine("engine")
    number = layout.push(zero, engine)
    wait_until((engine.meeting / "offer").exists)
    time.sleep(0.2)  # both wait with full buffers
    own_family.ranks[1].kill()
    with pytest.raises((PullError, DeviceError)):
        engine.pull(zero, number)
    assert layout.idle() and not engine.holds(zero, layout.spec)
    wait_until(lambda: not layout.port.opened)
    assert "failed before" in layout.refused(zero, engine).reason
    assert "rank 1" in layout.refused(zero, layout.engine("other")).reason
