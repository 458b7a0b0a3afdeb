"""artd inside vLLM's worker process (`--worker-extension-cls`): fence, load from disk, and death with the harness.

Purpose: what the stock server cannot do. vLLM imports this module before it builds the model, and mixes `Extension` into
its worker class, so its methods are reachable by /collective_rpc.
Owner of: the worker's `Session` (fence gate). Invariants: every write of weights happens between `artd_begin` and
`artd_finish`; when the harness dies, however it dies, this process group dies.
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
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from ...trainer.merge import BaseWeights, merged_tensors
from .. import group
from ..base import Fence
from ..checkpoint import ADAPTER
from ..fence import Gate
from .server import BACKEND
from .transfer import Reload, Session, entries, make_backend

SESSION = Session(Gate(os.environ.get("ARTD_INSTANCE", ""), int(os.environ["ARTD_SPAWN"])))


class Extension:
    """RPC methods; `self` is vLLM's worker. Every error reaches the harness as a failed call, and it ends the engine."""

    def artd_begin(self, fence: dict[str, Any]) -> dict[str, Any]:
        """Open a weight update. Raises FenceError."""
        SESSION.gate.begin(Fence(**fence))
        SESSION.figures = {}
        return {}

    def artd_load_merged(
        self, fence: dict[str, Any], base: str, checkpoint: str, scale: float, dtype: str, table: list[list[Any]]
    ) -> dict[str, Any]:
        """Replace the model's weights by base + scale * B A, read and merged here, checked against the table's hashes."""
        SESSION.gate.check(Fence(**fence))
        worker: Any = self
        adapter = load_file(Path(checkpoint) / ADAPTER)
        source = merged_tensors(BaseWeights(base), adapter, scale, getattr(torch, dtype))
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            reload = Reload(worker.model_runner.get_model(), worker.model_config)
            reload.start()
            reload.load(entries(table), source)
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
    WeightTransferEngineFactory.register_engine(BACKEND, make_backend(SESSION))
    watch = (int(os.environ["ARTD_HARNESS_PID"]), int(os.environ["ARTD_HARNESS_START"]))
    threading.Thread(target=_end_with_harness, args=watch, name="artd-harness-watch", daemon=True).start()


_install()
