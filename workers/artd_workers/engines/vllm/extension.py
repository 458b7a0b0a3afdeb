"""artd inside vLLM's worker process (`--worker-extension-cls`): fence, load from disk, routes, and death with the harness.

Purpose: what the stock server cannot do. vLLM imports this module before it builds the model, and mixes `Extension` into
its worker class, so its methods are reachable by /collective_rpc.
Owner of: the worker's `Session` (fence gate) and its `RouteCapture`. Invariants: every write of weights happens between
`artd_begin` and `artd_finish`; when the harness dies, however it dies, this process group dies.
Why the thread is here: the API server dies with the harness by PR_SET_PDEATHSIG, but EngineCore and this worker would live
on as orphans, inherit no pipe of the harness, and only this one runs code of artd. It ends the group for all three. A
harness killed before this module is imported is noticed when it is.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from artd_schema.trajectory import RouteShape

from .. import group
from ..base import Fence
from ..fence import Gate
from .capture import RouteCapture
from .disk import served_tensors
from .lora_experts import install as install_lora_experts
from .server import BACKEND
from .transfer import Reload, Session, entries, make_backend

CAPTURES: list[RouteCapture] = []
"""The one capture of this worker, once it has begun."""
SESSION = Session(Gate(os.environ.get("ARTD_INSTANCE", ""), int(os.environ["ARTD_SPAWN"])))


class Extension:
    """RPC methods; `self` is vLLM's worker. Every error reaches the harness as a failed call, and it ends the engine."""

    def artd_begin(self, fence: dict[str, Any]) -> dict[str, Any]:
        """Open a weight update. Raises FenceError."""
        SESSION.gate.begin(Fence(**fence))
        SESSION.figures = {}
        return {}

    def artd_load_merged(
        self, fence: dict[str, Any], base: str | None, checkpoint: str, scale: float, dtype: str, table: list[list[Any]]
    ) -> dict[str, Any]:
        """Replace the model's weights by those of a checkpoint, read here (base + scale * B A, or without a base every
        weight), checked against the table's hashes."""
        SESSION.gate.check(Fence(**fence))
        worker: Any = self
        wanted = entries(table)
        source = served_tensors(base, Path(checkpoint), scale, dtype, [entry.name for entry in wanted])
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            reload = Reload(worker.model_runner.get_model(), worker.model_config)
            reload.start()
            reload.load(wanted, source)
            reload.finish()
        worker.model_runner.reset_lora_state()
        SESSION.figures = reload.seconds | {"bytes": float(reload.bytes)}
        return {}

    def artd_finish(self, fence: dict[str, Any]) -> dict[str, Any]:
        """Close the update; returns bytes loaded and seconds (transfer, load) as measured here."""
        SESSION.gate.check(Fence(**fence))
        if not SESSION.figures:
            raise RuntimeError("the update loaded nothing")
        SESSION.gate.finish()
        return dict(SESSION.figures)

    def artd_capture_routes(self, layers: int, topk: int, experts: int) -> dict[str, Any]:
        """From now on capture the experts of every token. Raises CaptureError when the model is of another shape."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        CAPTURES.append(RouteCapture(runner, RouteShape(layers=layers, topk=topk, experts=experts)))
        return {}

    def artd_take_routes(self, request_ids: list[str]) -> dict[str, Any]:
        """What was captured for these requests, see `RouteCapture.take`; requests without any are left out."""
        return CAPTURES[0].take(request_ids) if CAPTURES else {}

    def artd_drop_routes(self, request_ids: list[str]) -> dict[str, Any]:
        """Nobody will take the routes of these requests, whether they have ended or not."""
        if CAPTURES:
            CAPTURES[0].drop(request_ids)
        return {}

    def artd_held_routes(self) -> dict[str, int]:
        """What is captured and not yet taken, see `RouteCapture.held`; empty when nothing is captured."""
        return CAPTURES[0].held() if CAPTURES else {}


def _end_with_harness(pid: int, ticks: int) -> None:
    """Wait for the harness's death, then remove the group's scratch files and kill the group, this process included."""
    try:
        descriptor = os.pidfd_open(pid)
        if group.start_ticks(pid) == ticks:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll()
    except ProcessLookupError:
        pass  # it was dead before this began
    finally:
        own = os.getpgrp()
        group.remove(group.scratch_files(group.members(own), 0.0))
        os.killpg(own, signal.SIGKILL)


def _install() -> None:
    install_lora_experts()
    WeightTransferEngineFactory.register_engine(BACKEND, make_backend(SESSION))
    watch = (int(os.environ["ARTD_HARNESS_PID"]), int(os.environ["ARTD_HARNESS_START"]))
    threading.Thread(target=_end_with_harness, args=watch, name="artd-harness-watch", daemon=True).start()


_install()
