"""A trainer's sender and an engine for `tools.gpu.stock`, and one push between them by the adapter's own calls.

Owner of: the server, the number of the last fence. Invariants: seconds are from sending /pause to the reply of /resume.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from artd_schema.data.manifest import WeightEntry
from artd_schema.run.spec import EngineSpec, RunSpec
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Fence
from artd_workers.engines.vllm import command, guard
from artd_workers.engines.vllm.adapter import VllmAdapter
from artd_workers.engines.vllm.server import Server
from artd_workers.engines.vllm.weights import stock_calls
from artd_workers.trainer.push.stock import Sender
from tools.gpu.push_server import ROOT, model_folder, visible

Line = dict[str, Any]
START_S, PUSH_S = 240.0, 60.0
INSTANCE, SPAWN = "i", 1


class Engine(VllmAdapter):
    """The server as the harness starts it, with `stock_engine.Probe` in its worker; `ready` before anything else."""

    def __init__(self, folder: Path, config: dict[str, Any], log: Path, gpu: int = 1) -> None:
        command.EXTENSION = "tools.gpu.stock_engine.Probe"
        model = model_folder(folder / "model", config)
        engine = EngineSpec(device="cuda", dtype="bfloat16", transfer="stock", max_model_len=4096, max_num_seqs=8,
                            kv_cache_mib=4096)  # fmt: skip
        spec = RunSpec(model=str(model), rollout_weights_mode="merged", engine=engine)
        self.folder = folder / "e"
        self.server = Server(
            EngineConfig(run="r", spec=spec, dir=str(self.folder), log=str(log), python=sys.executable)
        )
        path = [*(str(ROOT / part) for part in ("", "workers", "schema")), os.environ.get("PYTHONPATH", "")]
        own = {
            "CUDA_VISIBLE_DEVICES": visible(gpu),
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",  # CUDA's own: `lines` sets the trainer's
            "ARTD_INSTANCE": INSTANCE,
            "ARTD_SPAWN": str(SPAWN),
            "PYTHONPATH": os.pathsep.join(path),
        }
        with changed(own):
            self.server.spawn()
        self._number = 0

    def ready(self) -> None:
        end = time.monotonic() + START_S
        while not self.server.serving():
            if time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {self.server.tail()}")
            time.sleep(0.2)
        super().__init__(self.server.socket, Deadline(10.0), owner=guard.owner(INSTANCE, SPAWN))

    def stop(self) -> None:
        self.server.stop(0.0)

    def probe(self, method: str, **arguments: Any) -> None:
        self._rpc(method, arguments, Deadline(30.0))

    def fence(self) -> Fence:
        self._number += 1
        return Fence(INSTANCE, SPAWN, self._number, self._number)

    def take(self, table: Sequence[WeightEntry], plain: bool, deadline: Deadline) -> None:
        """start, update, finish. plain: the calls alone, without artd's fence and hashes around them."""
        if not plain:
            self.receive(self._opened_update, table, deadline, "stock")
            return
        self._call("POST", "/start_weight_update", deadline=deadline)
        self._call("POST", "/update_weights", stock_calls.update_body(table), deadline=deadline)
        self._call("POST", "/finish_weight_update", deadline=deadline)

    def open(self, deadline: Deadline) -> None:
        self._opened_update = self.fence()
        self.begin(self._opened_update, deadline)


@contextmanager
def engines(config: dict[str, Any], tiny: bool, count: int = 1) -> Iterator[tuple[Path, list[Any]]]:
    """Started at once, not waited for; a folder of theirs."""
    with tempfile.TemporaryDirectory(prefix="artd-st-") as name:
        folder, made = Path(name), []
        try:
            for number in range(count):
                if tiny:
                    from tools.gpu.stock_tiny import TinyEngine

                    made.append(TinyEngine())
                else:
                    log = Path(os.environ.get("OUT", name)) / f"stock-vllm-{number}.log"
                    made.append(Engine(folder / str(number), config, log))
            yield folder, made
        finally:
            for one in made:
                one.stop()


def push(
    engine: Any,
    sender: Sender,
    table: Sequence[WeightEntry],
    tensors: Iterable[Tensor],
    plain: bool,
    seconds: float = PUSH_S,
) -> Line:
    """One push; seconds of its phases. Raises what either side raises, the engine's first."""
    deadline, errors = Deadline(seconds), []

    def send() -> None:
        try:
            sender.send(table, tensors, deadline.left)
        except Exception as error:
            errors.append(error)

    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    engine.pause(0.0, deadline)
    mark()
    if not plain:
        engine.open(deadline)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        engine.take(table, plain, deadline)
    except BaseException:
        sender.abort()
        raise
    finally:
        thread.join()
    mark()
    if errors:
        raise errors[0]
    engine.finish("r@1", deadline)
    mark()
    engine.resume(deadline)
    mark()
    names = ("pause", "update", "finish", "resume")
    line = {name: b - a for name, a, b in zip(names, marks, marks[1:], strict=False)}
    return line | {"total": marks[-1] - marks[0]}


def meet(engine: Any, sender: Sender, rendezvous: Path) -> Line:
    """Both sides join, vLLM's backend being the plain one; returns seconds."""
    errors: list[Exception] = []

    def join() -> None:
        try:
            sender.join(PUSH_S)
        except Exception as error:
            errors.append(error)

    began = time.perf_counter()
    thread = threading.Thread(target=join)
    thread.start()
    try:
        engine.join(str(rendezvous), Deadline(PUSH_S), "stock")
    finally:
        thread.join()
    if errors:
        raise errors[0]
    return {"what": "join", "seconds": time.perf_counter() - began}


@contextmanager
def changed(variables: dict[str, str]) -> Iterator[None]:
    """These environment variables within."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def gpu_mib(gpu: int) -> int:
    """Memory in use on a GPU, by whomever."""
    query = ["nvidia-smi", f"--id={visible(gpu)}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
