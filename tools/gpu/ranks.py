"""A trainer of two ranks pulled by one engine: `STACK=/tmp/stack python -m tools.gpu.ranks [--out DIR] [--tiny]`.

Purpose: on two GPUs a trainer with tensor-parallel size 2 (4 layers of the 30B-A3B shape, rank 1 through torchrun as in a run) trains
a step, and its `Pusher` serves it to one stock vLLM (tensor-parallel size 1, on the second GPU): in place, staged, beside training, and
what must be refused. Run it with the trainer's packages on PYTHONPATH; the server gets those of $STACK/vllm. `--tiny`: the same
on a CPU, with modules for the engine that read the ranks' memory. Owner of: a temporary folder, the server. Invariants: a push
counts only when the engine's checksums were the table's, and the table's are compared with the merge of what is on disk.
artd itself with such a trainer: `python -m tools.gpu.loop --tensor-parallel 2 --gpus 2`.
"""

from __future__ import annotations

from tools.gpu import lines  # first: it sets what torch reads  # isort: skip

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from artd_schema.data.manifest import WeightTable
from artd_schema.run.spec import EngineSpec, LoraSpec, OptimizerSpec, RunSpec, TrainerSpec
from artd_schema.wire.direct import OFFER, TABLE, EngineTable, Offer
from artd_schema.wire.worker import CheckpointRef, Push, Run
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.trainer import placement
from artd_workers.trainer.parallel import launch
from artd_workers.trainer.push.direct.feeder import write_offer
from artd_workers.transfer import checksum
from artd_workers.transfer.merge import merged_tensors, open_base
from tools.gpu import parallel, shape
from tools.gpu.push_refusals import changed, error_of

Line = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
ROUNDS = 5


def pushes(tiny: bool) -> Iterator[Line]:
    """The most valuable first."""
    with tempfile.TemporaryDirectory(prefix="artd-ranks-") as made:
        folder = Path(made)
        parallel.prepare(folder, tiny)
        with engine(folder, tiny) as served, bench(folder, tiny, served) as one:
            zero = one.train(0)
            one.meet()
            yield {"what": "first push, in place, with plan and offer", **one.push(zero)} | one.offered()
            yield {"what": "the table's sums are those of the merge on disk", "equal": one.true(zero)}
            step = one.train(1, zero)
            yield {"what": "a trained step", **one.push(step), "true": one.true(step), "seconds": one.seconds}
            for number in range(ROUNDS):
                yield {"what": "in place", "round": number, **one.push(step)}
            for number in range(ROUNDS):
                yield {"what": "staged", "round": number, **one.push(step, staged=True)}
            yield from one.refusals(step)
            yield {"what": "beside training", **one.beside(step)}


class Bench:
    """Rank 0 of the trainer, as the worker has it, and an engine."""

    def __init__(self, trainer: Any, served: Any, folder: Path) -> None:
        from artd_workers.trainer.push.pusher import Pusher

        self._trainer, self._engine, self._folder = trainer, served, folder / "engine"
        self._base, self._refused = folder, list[str]()
        self._pusher = Pusher(lambda refused: self._refused.append(refused.reason))
        self._number, self._opened = 0, False
        self.seconds: dict[str, float] = {}

    @property
    def meeting(self) -> Path:
        return self._folder / "direct-1"

    def train(self, step: int, parent: CheckpointRef | None = None) -> CheckpointRef:
        files = json.loads((self._base / f"batch-{step}.json").read_text()) if step else {}
        job = Run(job=step + 1, fence=1, kind="train" if step else "init", step=step, epoch=step, lineage=0,
                  dir=str(self._base / f"step-{step}"), instance="i", parent=parent, **files)  # fmt: skip
        staged = self._trainer.run(job)
        self.seconds = staged.seconds
        ref = CheckpointRef(run="gpu", step=step, epoch=step, lineage=0, sha=staged.sha, dir=job.dir)
        self._trainer.mark_committed(ref, 1)
        return ref

    def meet(self) -> None:
        """The engine's table, as the harness writes it."""
        self._folder.mkdir(mode=0o700)
        table = msgspec.convert(self._engine.rpc("artd_direct_table"), EngineTable)
        (self._folder / TABLE).write_bytes(msgspec.msgpack.encode(table))

    def begin(self, ref: CheckpointRef) -> Line:
        """Have the trainer feed a push; the engine's fence."""
        self._number += 1
        message = Push(push=self._number, fence=self._number, checkpoint=ref, mode="merged", source="live", name="gpu",
                       drain_s=1.0, deadline_s=60.0, rendezvous=str(self.meeting), transfer="direct")  # fmt: skip
        self._pusher.push(message, self._trainer.snapshot_of(ref))
        while not (self.meeting / OFFER).exists() and not self._refused:
            time.sleep(0.001)
        if self._refused:
            raise RuntimeError(self._refused.pop())
        return {"instance": "i", "spawn": 1, "push": self._number, "fence": self._number}

    def ended(self) -> None:
        while self._pusher._running:
            time.sleep(0.001)

    def push(self, ref: CheckpointRef, staged: bool = False) -> Line:
        """One push; seconds of its phases, and from sending /pause to the reply of /resume."""
        began = time.perf_counter()
        fence, line = self.begin(ref), dict[str, Any]()
        line["began"] = time.perf_counter() - began
        if not self._opened:
            line["opened"] = self._engine.rpc("artd_direct_open", str(self.meeting / OFFER))
            self._opened = True
        self._engine.rpc("artd_direct_expect", str(Path(ref.dir) / "weights.json"))
        if staged:
            began = time.perf_counter()
            self._engine.rpc("artd_direct_stage", fence, TIMEOUT_S)
            while not self._engine.rpc("artd_direct_staged"):
                time.sleep(0.002)
            line["staged"] = time.perf_counter() - began
        else:
            time.sleep(0.003)  # the first buffers are filled before the pause
        began = time.perf_counter()
        self._engine.pause()
        paused = time.perf_counter()
        call = ("artd_direct_swap", fence) if staged else ("artd_direct_pull", fence, TIMEOUT_S)
        inside = self._engine.rpc(*call)
        updated = time.perf_counter()
        self._engine.resume()
        line |= {"pause": paused - began, "update": updated - paused, "total": time.perf_counter() - began}
        self.ended()
        return line | inside

    def offered(self) -> Line:
        offer = self._offer()
        runs = [[run for unit in feed.units for run in unit.runs] for feed in offer.feeds]
        return {
            "feeds": len(offer.feeds), "runs": [len(one) for one in runs], "with_rows": [sum(r.width > 0 for r in one) for one in runs],
            "gb": [sum(r.count for r in one) * offer.itemsize / 1e9 for one in runs],
        }  # fmt: skip

    def _offer(self) -> Offer:
        return msgspec.msgpack.decode((self.meeting / OFFER).read_bytes(), type=Offer)

    def true(self, ref: CheckpointRef) -> bool:
        """Whether a checkpoint's table has the sums of what is on disk, merged by torch in this process alone."""
        spec, device = self._trainer.spec, "cuda" if placement.device_of(self._trainer.spec) == "cuda" else "cpu"
        adapter = {k: v.to(device) for k, v in load_file(Path(ref.dir) / "adapter_model.safetensors").items()}
        dtype, scale = getattr(torch, spec.engine.dtype), spec.lora.alpha / spec.lora.rank
        table = msgspec.json.decode((Path(ref.dir) / "weights.json").read_bytes(), type=WeightTable).tensors
        found = merged_tensors(open_base(spec.model, device), adapter, scale, dtype)
        return [(e.name, e.sum64) for e in table] == [(name, checksum.sum_of(tensor)) for name, tensor in found]

    # ---- what must be refused ---------------------------------------------------------------------------------------------

    def refusals(self, ref: CheckpointRef) -> Iterator[Line]:
        offer = self._offer()
        rows = [run for unit in offer.feeds[1].units for run in unit.runs if run.width]
        moved = msgspec.structs.replace(rows[0], at=rows[0].at - rows[0].width, first=rows[0].first - rows[0].width)
        wrong = {
            "rank 1's columns in rank 0's place": changed(offer, lambda run: moved if run == rows[0] else run),
            "a part of rank 1 left out": changed(offer, lambda run: None if run == rows[0] else run),
            "rank 0 alone": msgspec.structs.replace(offer, feeds=offer.feeds[:1]),
            "rank 1 twice": msgspec.structs.replace(offer, feeds=(*offer.feeds, offer.feeds[1])),
        }
        for what, one in wrong.items():
            write_offer(one, self._base / "wrong")
            yield {"what": what, **error_of(lambda: self._engine.rpc("artd_direct_open", str(self._base / "wrong")))}
        self._opened = False
        weight = dict(self._trainer._policy.model.named_parameters())[
            "decoder.layers.1.self_attention.linear_proj.weight"
        ]
        byte = weight.detach().view(-1).view(torch.uint8)[4323:4324]
        byte.bitwise_xor_(1)
        yield {"what": "one flipped bit behind the staging", **error_of(lambda: self.push(ref))}
        byte.bitwise_xor_(1)
        self.ended()
        self._engine.rpc("probe_forgive")
        yield {"what": "a right push", **self.push(ref)}

    def beside(self, parent: CheckpointRef) -> Line:
        """A step that is trained while a push of the one before is fed, and the push of it."""
        fence = self.begin(parent)
        self._engine.rpc("artd_direct_expect", str(Path(parent.dir) / "weights.json"))
        done: list[CheckpointRef] = []
        job = threading.Thread(target=lambda: done.append(self.train(2, parent)))
        job.start()
        time.sleep(0.2)
        found = self._engine.rpc("artd_direct_pull", fence, TIMEOUT_S)
        job.join()
        self.ended()
        return {"while_training": found, "next": self.push(done[0]), "true": self.true(done[0])}


@contextmanager
def bench(folder: Path, tiny: bool, served: Any) -> Iterator[Bench]:
    kind = TrainerSpec(device="cpu") if tiny else TrainerSpec(device="cuda", dtype="bfloat16")
    spec = RunSpec(
        model=str(folder / "base"), seed=3, rollout_weights_mode="merged", row_length=parallel.SIZES[tiny][4],
        lora=LoraSpec(), optimizer=OptimizerSpec(lr=1e-3), threads=1 if tiny else 0, engine=EngineSpec(dtype="bfloat16"),
        trainer=msgspec.structs.replace(kind, tensor_parallel=2),
    )  # fmt: skip
    placement.prepare(spec)
    from artd_workers.trainer.trainer import Trainer
    from artd_workers.trainer.worker import SWITCH_S

    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if tiny:
        from tools.gpu import ranks_peer

        ranks_peer.stand_in()
        launch.PEER = ranks_peer.__name__
    config = TrainerConfig(run="gpu", spec=spec, base_digest="base")
    with launch.start_ranks(launch.layout(spec), cuda=not tiny) as ranks:
        ranks.send_order(msgspec.msgpack.encode(config))
        yield Bench(Trainer(config, {}, ranks), served, folder)


@contextmanager
def engine(folder: Path, tiny: bool) -> Iterator[Any]:
    config = shape.config(parallel.LAYERS, tiny)
    if tiny:
        from tools.gpu.ranks_peer import OtherEngine

        one: Any = OtherEngine(config)
    else:
        one = _server(folder, config)
    try:
        if not tiny:
            one.ready()
        yield one
    finally:
        one.stop()


def _server(folder: Path, config: dict[str, Any]) -> Any:
    """A stock vLLM on the second GPU, with packages of its own."""
    from tools.gpu.push_server import Server

    code = (
        "import json, sys, pathlib; from tools.gpu.push_server import model_folder; "
        "model_folder(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))"
    )
    stack, kept = f"{os.environ['STACK']}/vllm", dict(os.environ)
    path = os.pathsep.join([*(str(ROOT / part) for part in ("", "workers", "schema")), stack])
    words = [sys.executable, "-c", code, str(folder / "model"), json.dumps(config)]
    subprocess.run(words, check=True, env=kept | {"PYTHONPATH": path}, cwd=ROOT)
    os.environ["PYTHONPATH"] = stack
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # which is for the trainer
    try:
        return Server(folder / "model", 1, 0.4, Path(os.environ.get("OUT", ".")) / "vllm.log")
    finally:
        os.environ.update(kept)


if __name__ == "__main__":
    sys.exit(lines.main("ranks", {"pushes": pushes}))
