"""Scripted servers as `Kind`s: vLLM's, and that of an engine from outside the package (`abacus`). No model, no torch, a second a spawn."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import EngineSpec, LoraSpec, Mode, RunSpec
from artd_schema.wire.direct import OFFER
from artd_schema.wire.worker import Push, Transfer
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Adapter, Capabilities
from artd_workers.engines.vllm.adapter import VllmAdapter
from artd_workers.engines.vllm.versions import VERSIONS
from artd_workers.transfer.nccl.stock import ID_BYTES, leave_id
from tests.engine import folders
from tests.fake_daemon import ROOT

from .abacus import engine as abacus
from .abacus.speech import SPEECH as ABACUS
from .abacus.speech import AbacusClient
from .spawn import Flaw, rendezvous
from .speech import Speech
from .vllm import SPEECH as VLLM
from .vllm import VllmClient


class FakeFeed:
    """A trainer's side without torch: the tensors' bytes, one after the other, into a Unix socket."""

    def __init__(self, folder: Path, transfer: Transfer) -> None:
        self.transfer: Transfer = transfer
        meeting = rendezvous(folder)
        meeting.mkdir()
        self._wire = meeting / "wire"
        self._offer = meeting / OFFER
        where = {"direct": meeting, "gloo": self._wire, "stock": meeting / "id"}
        self.rendezvous = str(where[transfer])
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self._wire))
        self._socket.listen()
        self._taken: list[socket.socket] = []

    def send(self, push: Push, flaw: Flaw = "") -> None:
        if self.transfer == "stock" and not Path(self.rendezvous).exists():
            leave_id(Path(self.rendezvous), str(self._wire).encode().ljust(ID_BYTES, b"\0"))
        self._offer.write_text(flaw)
        threading.Thread(target=self._send, args=(push.checkpoint.step, flaw), daemon=True).start()

    def close(self) -> None:
        for one in [*self._taken, self._socket]:
            one.close()

    def _send(self, step: int, flaw: Flaw) -> None:
        try:
            if not self._taken:
                self._taken.append(self._socket.accept()[0])
            first, second = folders.tensors_of("merged", step).values()
            halves = {"dies": first, "stalls": first, "wrong": first + second[:-1] + b"\1", "short": first}
            self._taken[0].sendall(halves.get(flaw, first + second))
            if flaw == "dies":
                self._taken.pop().close()
        except OSError:
            return  # closed from either side


class Fake:
    """See `spawn.Kind`. server_file: the scripted server; engine: its kind; ways that this interpreter can push."""

    deadline_s = 2.0
    patience_s = 30.0
    tokens = 300
    workers = False
    ahead = 1
    server_file: Path
    engine: str
    version: str
    harness: str
    versions: Sequence[Capabilities]
    speech: Speech

    def __init__(self, folder: Path, way: str = "gloo", routes: RouteShape | None = None) -> None:
        """way: of its live pushes, or "lora"."""
        self._folder = folder
        self.ways: tuple[str, ...] = () if way == "lora" else (way,)
        self.mode: Mode = "lora" if way == "lora" else "merged"
        self.routes = routes
        self.python = sys.executable
        fake = folder / "python"
        fake.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {self.server_file} "$@"\n')
        fake.chmod(0o700)
        self.server = str(fake)
        self.script = folder / "script"
        self.say({})
        self.env = {"FAKE_VLLM": str(self.script), "PYTHONPATH": f"{ROOT / 'workers'}:{ROOT / 'schema'}:{ROOT}"}
        direct = {"transfer": way} if way in ("in_place", "staged") else {}
        self.spec = RunSpec(model=str(folder / "model"), rollout_weights_mode=self.mode, lora=LoraSpec(rank=4, alpha=8),
                            engine=EngineSpec(kind=self.engine, max_model_len=64, **direct))  # fmt: skip

    def say(self, script: dict[str, object]) -> None:
        """The script of servers to come."""
        own: dict[str, object] = {
            "version": self.version,
            "calls": str(self._folder / "calls"),
            "shm": f"/dev/shm/psm_artd_test_{self._folder.parent.name}_{self._folder.name}",
        }
        if (shape := self.routes) is not None:
            own |= {"shape": [shape.layers, shape.topk, shape.experts]}
        self.script.write_text(json.dumps(own | script))

    def checkpoint(self, step: int) -> Path:
        folder = self._folder / f"checkpoint-{step}"
        if not folder.exists():
            folders.write(folder, self.mode, step)
        return folder

    def feed(self, folder: Path, way: str) -> FakeFeed:
        transfers: dict[str, Transfer] = {"gloo": "gloo", "stock": "stock"}
        return FakeFeed(folder, transfers.get(way, "direct"))


class FakeVllm(Fake):
    server_file = Path(folders.__file__).with_name("fake_vllm.py")
    engine, version = "vllm", "0.32.0"
    harness, versions, speech = "artd_workers.engines", VERSIONS, VLLM

    def client(self, socket: str) -> VllmClient:
        return VllmClient(socket)

    def adapter(self, socket: Path, deadline: Deadline, owner: str) -> Adapter:
        return VllmAdapter(socket, deadline, owner)


class FakeAbacus(Fake):
    server_file = Path(abacus.__file__).with_name("serve.py")
    engine, version = "abacus", abacus.VERSION
    harness, versions, speech = "tests.conformance.abacus", abacus.VERSIONS, ABACUS

    def client(self, socket: str) -> AbacusClient:
        return AbacusClient(socket)

    def adapter(self, socket: Path, deadline: Deadline, owner: str) -> Adapter:
        return abacus.AbacusAdapter(socket, deadline, owner)
