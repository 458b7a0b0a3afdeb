"""The real vLLM server under a harness under a fake daemon, and the trainer's end of live pushes; shared by the real tests."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from artd.runtimes import registry
from artd_schema.data.manifest import CheckpointManifest, WeightTable
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import EngineSpec, LoraSpec, Mode, Parameters, RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Fence
from artd_workers.engines.http import call
from artd_workers.engines.vllm import guard
from artd_workers.engines.vllm.adapter import VllmAdapter
from tests.awake import LOOK_S, SOON_S, Awake
from tests.engine import folders
from tests.fake_daemon import INSTANCE, ROOT, SPAWN, WorkerDaemon, start_engine
from tests.process.helpers import session_members
from tests.spare_cpu import leave_a_cpu

HERE = Path(__file__).parent
TOOL_ENV = {"PYTHONPATH": f"{ROOT / 'workers'}:{ROOT / 'schema'}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
START_S = 240.0


def tool(*argv: str, python: str = "", env: Mapping[str, str] = TOOL_ENV) -> None:
    """Run a script in the megatron interpreter, or another."""
    command = [python or str(registry.find("megatron").python), *argv]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, f"{argv[0]}: {done.stderr[-3000:]}"


def serving_tool(*argv: str, python: str = "", env: Mapping[str, str] = TOOL_ENV) -> subprocess.Popen[str]:
    """A script in the megatron interpreter, or another, that answers on stdout what it is asked on stdin."""
    command = [python or str(registry.find("megatron").python), *argv]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | env, **pipes)


class HuggingFace:
    """A toy's model with the weights `step`, in a process of its own."""

    def __init__(self, toys: Path, step: str) -> None:
        self._process = serving_tool(str(HERE / "routes_reference.py"), str(toys / "toy"), str(toys / step))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, sequences: list[list[int]]) -> list[dict[str, Any]]:
        """What `routes_reference.py` answers of each sequence."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(sequences) + "\n")
        self._process.stdin.flush()
        answers: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return answers


@dataclass
class Engine:
    """A real server under a harness under a fake daemon."""

    daemon: WorkerDaemon
    toys: Path
    mode: Mode
    socket: str = ""
    fences: int = 0
    scratch: set[str] = field(default_factory=set)

    def push(self, checkpoint: str, **changes: Any) -> w.Push:
        self.fences += 1
        folder = self.toys / checkpoint
        step = int(checkpoint[1:])
        ref = w.CheckpointRef(run="toy", step=step, epoch=step, lineage=0, sha=folders.sha(folder), dir=str(folder))
        values = {"push": self.fences, "fence": self.fences, "checkpoint": ref, "mode": self.mode, "source": "disk",
                  "name": f"toy@{step}", "drain_s": 20.0, "deadline_s": 60.0}  # fmt: skip
        return w.Push(**(values | changes))

    def live(self, push: w.Push) -> w.Live:
        self.daemon.send(push)
        answer = self.daemon.expect((w.Live, w.PushFailed), 120.0)
        assert isinstance(answer, w.Live), answer
        assert answer.max_abs <= 1e-5
        return answer

    def adapter(self) -> VllmAdapter:
        """An adapter of its own, as the harness has one."""
        return VllmAdapter(Path(self.socket), Deadline(SOON_S), guard.owner(INSTANCE, SPAWN))

    def fence(self) -> Fence:
        self.fences += 1
        return Fence(INSTANCE, SPAWN, self.fences, self.fences)

    def call(self, route: str, body: Any, timeout_s: float = 60.0) -> Any:
        return call(self.socket, "POST", route, body, deadline=Deadline(timeout_s))

    def generate(self, prompt: list[int], model: str = "toy", salt: str = "", **sampling: Any) -> dict[str, Any]:
        """One choice of /inference/v1/generate."""
        body = {"model": model, "token_ids": prompt, "sampling_params": {"logprobs": 0} | sampling}
        return self.call("/inference/v1/generate", body | ({"cache_salt": salt} if salt else {}))["choices"][0]

    def runs(self, requests: int = 1) -> None:
        """Return when it works on so many requests."""
        end = time.monotonic() + SOON_S
        while self._running() < requests:
            assert time.monotonic() < end, f"it never worked on {requests} requests at once"
            time.sleep(0.01)

    def runs_none(self) -> None:
        """Return when it works on no request."""
        end = time.monotonic() + SOON_S
        while self._running():
            assert time.monotonic() < end, "it still works"
            time.sleep(0.01)

    def _running(self) -> float:
        page = str(call(self.socket, "GET", "/metrics", deadline=Deadline(SOON_S))).splitlines()
        return sum(float(line.split()[-1]) for line in page if line.startswith("vllm:num_requests_running{"))

    def manifest(self, checkpoint: str) -> CheckpointManifest:
        return msgspec.json.decode((self.toys / checkpoint / "manifest.json").read_bytes(), type=CheckpointManifest)

    def pids(self) -> list[int]:
        """Live processes in the harness's session."""
        return [one.pid for one in session_members(self.daemon.process.pid)]

    def listeners(self) -> list[str]:
        """Addresses (as /proc/net/tcp writes them) that processes of the session listen on by TCP."""
        held = {os.readlink(fd) for pid in self.pids() for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
        rows = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        ]
        return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held]

    def nothing_left(self, within_s: float) -> None:
        with Awake() as passed:
            while self.pids() and passed.seconds < within_s:
                time.sleep(LOOK_S)
        assert self.pids() == []
        assert not [path for path in self.scratch if Path(path).exists()]


def start(
    toys: Path, mode: Mode, parameters: Parameters = "lora", routes: RouteShape | None = None, stall_s: float = 0.0,
    **engine: Any,
) -> Iterator[Engine]:  # fmt: skip
    """A server of the model `toys/toy`; stall_s: see EngineConfig; `engine`: changes of the engine's spec."""
    python = str(registry.find("vllm").python)
    with tempfile.TemporaryDirectory(prefix="artd-r-") as name:
        settings = {"max_model_len": 512, "max_num_seqs": 16, "kv_cache_mib": 64} | engine
        spec = RunSpec(model=str(toys / "toy"), parameters=parameters, rollout_weights_mode=mode,
                       lora=LoraSpec(rank=4, alpha=8), engine=EngineSpec(**settings))  # fmt: skip
        config = EngineConfig(
            run="toy", spec=spec, dir=f"{name}/e", log=f"{name}/engine.log", python=python, routes=routes,
            stall_s=stall_s,
        )  # fmt: skip
        with start_engine(config, python) as daemon:
            started = Engine(daemon, toys, mode)
            answer = daemon.expect((w.Ready, w.Down), START_S)
            assert isinstance(answer, w.Ready), answer
            started.socket = answer.socket
            started.scratch = held_scratch(daemon.process.pid)
            assert started.scratch, "the real server holds files in /dev/shm: the tests no longer see them"
            leave_a_cpu(pid for pid in started.pids() if pid != daemon.process.pid)
            yield started


def held_scratch(session: int) -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                lines = (entry / "maps").read_text().splitlines()
                found |= {line.split()[-1] for line in lines if " /dev/shm/" in line and "(deleted)" not in line}
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


class Sender:
    """The trainer's end of live pushes, in the megatron interpreter."""

    def __init__(self, engine: Engine, rendezvous: str) -> None:
        self.rendezvous = str(Path(engine.socket).parent / rendezvous)
        self.table = Path(engine.socket).parent / f"{rendezvous}.json"
        self.process = serving_tool(str(HERE / "sender.py"), str(engine.toys / "toy"), self.rendezvous)
        self._folder = engine.toys

    def order(self, checkpoint: str, **changes: Any) -> WeightTable:
        """Have it send a checkpoint's tensors; returns the table of what it is sending."""
        assert self.process.stdin is not None
        order = {"checkpoint": str(self._folder / checkpoint), "table": str(self.table)} | changes
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self._line("ready")
        return msgspec.json.decode(self.table.read_bytes(), type=WeightTable)

    def sent(self) -> None:
        self._line("sent")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _line(self, text: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == text


def logprob(choice: dict[str, Any]) -> float:
    return choice["logprobs"]["content"][0]["logprob"]


def load(adapter: VllmAdapter, engine: Engine, sender: Sender, checkpoint: str, **order: Any) -> None:
    """A live transfer without the harness and its canary, of possibly disturbed weights with honest hashes."""
    deadline = Deadline(60)
    fence = engine.fence()
    adapter.pause(5.0, deadline)
    adapter.begin(fence, deadline)
    table = sender.order(checkpoint, **order)
    adapter.join(sender.rendezvous, deadline)
    adapter.receive(fence, table.tensors, deadline)
    sender.sent()
    adapter.finish("test", deadline)
    adapter.resume(deadline)
