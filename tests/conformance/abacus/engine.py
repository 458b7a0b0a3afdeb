"""The abacus behind a harness: nothing in it is as vLLM has it. `serve.py` is the other side."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from artd_schema.data.manifest import WeightEntry
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import EngineSpec, InFlight
from artd_schema.wire.direct import EngineTable
from artd_schema.wire.worker import Transfer
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import (
    Capabilities,
    DiskLoad,
    EngineError,
    EngineTimeout,
    Fence,
    capabilities,
    model_name,
)
from artd_workers.engines.http import call
from artd_workers.engines.process.progress import Work
from artd_workers.engines.process.server import ServerProcess
from artd_workers.engines.registry import Device, Engine
from artd_workers.transfer.nccl.stock import await_id

VERSIONS = (
    Capabilities("7.1", weight_version=True, abort_route=True, scale_out_flag=False, routes="hooks", own_transfer=True),
)
VERSION = "7.1.4"
OWNER = "x-abacus-hand"
"""The header that says whose the call is: INSTANCE/SPAWN."""
POLL_S = 0.005


def owner_of(environ: Mapping[str, str] = os.environ) -> str:
    return f"{environ.get('ARTD_INSTANCE', '')}/{environ.get('ARTD_SPAWN', '')}"


def ask(socket: str, verb: str, body: Any = None, *, deadline: Deadline, owner: str = "") -> dict[str, Any]:
    """What the abacus has done. Raises EngineError, also for an answer that is none of its."""
    reply = call(socket, "POST", f"/abacus/{verb}", body or {}, deadline=deadline, headers={OWNER: owner})
    done = reply.get("done") if isinstance(reply, dict) else None
    if not isinstance(done, dict):
        raise EngineError(f"{verb} answered {str(reply)[:200]!r}: this is no abacus")
    return done


class AbacusServer(ServerProcess):
    def command(self) -> list[str]:
        options = ["--uds", str(self.socket), "--served-model-name", model_name(self.config)]
        return [self.config.python, "-m", "abacus.serve", *options]

    def environment(self) -> dict[str, str]:
        return os.environ | {"TMPDIR": str(self.scratch)}

    def check_health(self, deadline: Deadline) -> None:
        ask(str(self.socket), "upright", deadline=deadline)

    def prove(self) -> None:
        """There is nothing to try."""

    def end_requests(self, deadline: Deadline) -> None:
        ask(str(self.socket), "drop", deadline=deadline, owner=owner_of())


class AbacusAdapter:
    """See `adapter.Adapter`."""

    def __init__(self, socket: Path, deadline: Deadline, owner: str = "") -> None:
        self._socket, self._owner = str(socket), owner or owner_of()
        self._met, self._opened, self._kept = "", Path(), False
        self.version = str(self._ask("about", deadline).get("release"))
        self.capabilities = capabilities(VERSIONS, self.version)

    def healthy(self, deadline: Deadline) -> bool:
        try:
            self._ask("upright", deadline)
        except EngineError:
            return False
        return True

    def pause(self, drain_s: float, deadline: Deadline, in_flight: InFlight = "drain") -> bool:
        self._kept = in_flight == "keep"
        if in_flight != "drain":
            self._ask("halt", deadline, how="freeze", forget=not self._kept)
            return False
        try:
            if drain_s > 0:
                self._ask("halt", Deadline(drain_s), how="finish", forget=True)
                return False
        except EngineTimeout:
            pass
        self._ask("halt", deadline, how="drop", forget=True)
        return True

    def resume(self, deadline: Deadline) -> None:
        self._ask("go", deadline)

    def begin(self, fence: Fence, deadline: Deadline) -> None:
        self._ask("frame", deadline, fence=fence.as_json())

    def join(self, rendezvous: str, deadline: Deadline, transfer: Transfer = "gloo") -> None:
        if rendezvous == self._met:
            return
        place = rendezvous
        if transfer == "stock":
            try:
                place = await_id(Path(rendezvous), deadline.left).rstrip(b"\0").decode()
            except (TimeoutError, ValueError) as error:
                raise EngineError(str(error)) from None
        self._ask("meet", deadline, place=place)
        self._met = rendezvous

    def receive(
        self, fence: Fence, table: Sequence[WeightEntry], deadline: Deadline, transfer: Transfer = "gloo"
    ) -> dict[str, float]:
        self._ask("slide", deadline, fence=fence.as_json(), rods=rods(table), seconds=deadline.left)
        return self._ask("seal", deadline, fence=fence.as_json())

    def load_merged(
        self, fence: Fence, table: Sequence[WeightEntry], load: DiskLoad, deadline: Deadline
    ) -> dict[str, float]:
        self._ask("string", deadline, fence=fence.as_json(), rods=rods(table), folder=str(load.checkpoint))
        return self._ask("seal", deadline, fence=fence.as_json())

    def direct_table(self, deadline: Deadline) -> EngineTable:
        try:
            return msgspec.convert(self._ask("table", deadline), EngineTable)
        except msgspec.ValidationError as error:
            raise EngineError(f"table answered what is no table: {error}") from None

    def direct_open(self, offer: Path, deadline: Deadline) -> None:
        if offer == self._opened:
            return
        while not offer.exists():
            if deadline.passed:
                raise EngineTimeout(f"the trainer left no offer in {offer} within {deadline.seconds:.1f} s")
            time.sleep(POLL_S)
        self._opened = Path()
        self._ask("open", deadline, offer=str(offer))
        self._opened = offer

    def direct_expect(self, weights: Path, deadline: Deadline) -> None:
        self._ask("expect", deadline, weights=str(weights))

    def direct_room(self, deadline: Deadline) -> bool:
        return self._ask("room", deadline).get("room") is True

    def direct_stage(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        self._ask("stage", deadline, fence=fence.as_json(), timeout_s=0.9 * deadline.left)
        while not (figures := self._ask("staged", deadline)):
            if deadline.passed:
                raise EngineTimeout(f"stage: not all was there within {deadline.seconds:.1f} s")
            time.sleep(POLL_S)
        return figures

    def direct_pull(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        return self._ask("pull", deadline, fence=fence.as_json(), timeout_s=0.9 * deadline.left)

    def direct_swap(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        return self._ask("swap", deadline, fence=fence.as_json())

    def finish(self, name: str, deadline: Deadline) -> None:
        self._ask("name", deadline, name=name)
        while not self._kept and self._ask("sweep", deadline).get("held"):
            if deadline.passed:
                raise EngineError("sweep: requests still hold beads of the old weights")
            time.sleep(POLL_S)

    def load_adapter(self, name: str, folder: Path, deadline: Deadline) -> None:
        self._ask("hang", deadline, name=name, folder=str(folder))

    def check_adapter(self, folder: Path, table: Sequence[WeightEntry], deadline: Deadline) -> dict[str, float]:
        return self._ask("compare", deadline, folder=str(folder), rods=rods(table))

    def unload_adapter(self, name: str, deadline: Deadline) -> None:
        self._ask("unhang", deadline, name=name)

    def in_flight(self, name: str, deadline: Deadline) -> bool:
        names = self._ask("moving", deadline).get("names")
        if not isinstance(names, list):
            raise EngineError("moving names no requests")
        return name in names

    def score(self, model: str, prompts: Sequence[Sequence[int]], deadline: Deadline) -> list[list[float]]:
        done = self._ask("count", deadline, model=model, prompts=[list(prompt) for prompt in prompts], tokens=1)
        try:
            return msgspec.convert(done["beads"], list[list[float]])
        except (KeyError, msgspec.ValidationError) as error:
            raise EngineError(f"count gave no beads: {error!r}") from None

    def warm(self, deadline: Deadline) -> dict[str, float]:
        return self._ask("warm", deadline)

    def capture_routes(self, shape: RouteShape, deadline: Deadline) -> None:
        self._ask("watch", deadline, shape=[shape.layers, shape.topk, shape.experts])

    def abort_all(self, deadline: Deadline) -> None:
        self._ask("drop", deadline)

    def _ask(self, verb: str, deadline: Deadline, **body: Any) -> dict[str, Any]:
        return ask(self._socket, verb, body, deadline=deadline, owner=self._owner)


def rods(table: Sequence[WeightEntry]) -> list[list[Any]]:
    """A weight table as JSON: [name, dtype, shape, sha256 or sum64] per tensor."""
    return [[one.name, one.dtype, list(one.shape), one.sha256 if one.sum64 is None else one.sum64] for one in table]


class Abacus:
    """See `registry.Engine`."""

    def server(self, config: EngineConfig) -> AbacusServer:
        return AbacusServer(config)

    def adapter(self, socket: Path, deadline: Deadline) -> AbacusAdapter:
        return AbacusAdapter(socket, deadline)

    def read_version(self) -> Capabilities:
        return VERSIONS[0]

    def device(self, spec: EngineSpec) -> Device:
        return "cpu"

    def work(self, socket: Path) -> Work:
        done = ask(str(socket), "moving", deadline=Deadline(5.0))
        return Work(len(done["names"]), str(done["moved"]), False)


ENGINE: Engine = Abacus()
