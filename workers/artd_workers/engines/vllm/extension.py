"""artd inside vLLM's worker process (`--worker-extension-cls`): what the stock server cannot do.

It adds the fence, loads from disk, the direct push, the sums of adapters, routes, who sampled each token, the warm-up, and
death with the harness. vLLM imports this module before it builds the model, and mixes `Extension` into its worker class, so
/collective_rpc reaches the methods. It owns the worker's `Update`, its `RouteCapture` and its `SampleBook`. Every write of
weights passes the one gate of this process: between `artd_begin` and `artd_finish`, or within a direct pull or swap. What only
vLLM 0.32 on a CPU has is imported there alone.

When the harness dies, however it dies, this process group dies. The API server dies with the harness by PR_SET_PDEATHSIG, but
EngineCore and this worker would go on as orphans. They inherit no pipe of the harness, and only this process runs code of artd,
so its thread ends the group for all three. A harness that was killed before this module is imported is noticed at the import.
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
from vllm.platforms import current_platform

from artd_schema.data.trajectory import RouteShape
from artd_schema.paths import process_ticks
from artd_schema.run.scratch import remove
from artd_workers.engines.adapter import Fence
from artd_workers.engines.gate import FenceError, own_gate
from artd_workers.engines.process import process_group
from artd_workers.engines.vllm.direct.extension import DirectExtension, table_of
from artd_workers.engines.vllm.tokens.sample_book import SampleBook, watch
from artd_workers.engines.vllm.weights import slots
from artd_workers.engines.vllm.weights.disk import served_tensors
from artd_workers.engines.vllm.weights.hashing import entries
from artd_workers.engines.vllm.weights.load import InPlace, Load, Update
from artd_workers.engines.vllm.weights.reload import Reload

from . import guard
from .command import CPU_BACKEND, CUDA_BACKEND
from .warm import warm

CAPTURES: list[Any] = []
"""The capture of this worker, empty before `artd_capture_routes`."""
BOOKS: list[SampleBook] = []
"""The sample-book of this worker, empty before its first label; nothing is served before that."""
UPDATE = Update(own_gate())


class Extension(DirectExtension):
    """The RPC methods; `self` is vLLM's worker. The harness sees every error as a failed call, and ends the engine."""

    def artd_begin(self, fence: dict[str, Any]) -> dict[str, Any]:
        """Open a weight update. Raises FenceError."""
        UPDATE.begin(Fence(**fence))
        return {}

    def artd_expect(self, fence: dict[str, Any], table: list[list[Any]]) -> dict[str, Any]:
        """Require that vLLM's own transfer calls, which carry no hashes, bring the tensors of this table in the open update."""
        UPDATE.gate.check(Fence(**fence))
        UPDATE.wanted = {entry.name: entry for entry in entries(table)}
        return {}

    def artd_load_merged(
        self, fence: dict[str, Any], base: str | None, checkpoint: str, scale: float, dtype: str, table: list[list[Any]]
    ) -> dict[str, Any]:
        """Replace the model's weights by those of a checkpoint, read here and checked against the table's hashes.

        They are base + scale * B A, or without a base every weight of the checkpoint.
        """
        UPDATE.gate.check(Fence(**fence))
        worker: Any = self
        wanted = entries(table)
        names = [entry.name for entry in wanted]
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            load = _load_into(worker)
            load.start()
            load.load(wanted, served_tensors(base, Path(checkpoint), scale, dtype, names, str(worker.device)))
            load.finish()
        UPDATE.figures = load.seconds | {"bytes": float(load.bytes)}
        return {}

    def artd_finish(self, fence: dict[str, Any]) -> dict[str, Any]:
        """Close the update. Returns the bytes loaded, and seconds (transfer, load) as measured here."""
        UPDATE.gate.check(Fence(**fence))
        if not UPDATE.figures:
            raise RuntimeError("the update loaded nothing")
        UPDATE.gate.finish()
        return dict(UPDATE.figures)

    def artd_check_adapter(self, folder: str, table: list[list[Any]]) -> dict[str, float]:
        """Compare the adapter that was read from this folder, where the kernels read it, with the table; see `slots.check`."""
        return slots.check(self.model_runner, folder, entries(table))  # type: ignore[attr-defined]

    def artd_label(self, owner: str, name: str, cleared: bool) -> dict[str, Any]:
        """Name the weights `name` from the next step on, see `SampleBook.label`. Raises FenceError for another owner (see
        `guard`).

        The harness calls it while the engine is paused.
        """
        if owner != guard.own():
            raise FenceError(f"a label of {owner}, but this engine belongs to instance and spawn {guard.own()}")
        if not BOOKS:
            BOOKS.append(SampleBook())
            watch(self.model_runner, BOOKS[0])  # type: ignore[attr-defined]
        BOOKS[0].label(name, cleared)
        return {}

    def artd_take_sampled(self, choices: list[str]) -> dict[str, Any]:
        """Return who sampled each token of these choices (`REQUEST#CHOICE`), see `SampleBook.take`."""
        return BOOKS[0].take(choices) if BOOKS else {}

    def artd_warm(self, timeout_s: float) -> dict[str, float]:
        """Make the forms of the experts' kernel ready, before anything is served; see `warm`. A failure only costs time."""
        return warm(self.model_runner, timeout_s)  # type: ignore[attr-defined]

    def artd_capture_routes(self, layers: int, topk: int, experts: int) -> dict[str, Any]:
        """Capture the experts of every token from now on. Raises CaptureError when the model has another shape."""
        from artd_workers.engines.vllm.tokens.capture import RouteCapture

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        CAPTURES.append(RouteCapture(runner, RouteShape(layers=layers, topk=topk, experts=experts)))
        return {}

    def artd_take_routes(self, request_ids: list[str]) -> dict[str, Any]:
        """Return what was captured for these requests, see `RouteCapture.take`; requests without routes are left out."""
        return CAPTURES[0].take(request_ids) if CAPTURES else {}

    def artd_drop_routes(self, request_ids: list[str]) -> dict[str, Any]:
        """Drop the routes of these requests, whether they have ended or not: nobody will take them."""
        if CAPTURES:
            CAPTURES[0].drop(request_ids)
        return {}

    def artd_held_routes(self) -> dict[str, int]:
        """Return what is captured and not yet taken, see `RouteCapture.held`; empty when nothing is captured."""
        return CAPTURES[0].count_held() if CAPTURES else {}


def _load_into(worker: Any) -> Load:
    """Return a load in place where the model's tensors are those of the checkpoint, at most fused; else a layerwise reload."""
    model = worker.model_runner.get_model()
    if worker.device.type == "cuda" and not table_of(worker).obstacles:
        return InPlace(model)
    return Reload(model, worker.model_config)


def _end_with_harness(pid: int, ticks: int) -> None:
    """Wait for the harness's death, then remove the group's scratch files and kill the group, this process included."""
    try:
        descriptor = os.pidfd_open(pid)
        if process_ticks(pid) == ticks:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll()
    except ProcessLookupError:
        pass  # the harness was already dead
    finally:
        own = os.getpgrp()
        remove(process_group.scratch_files(process_group.members(own), 0.0))
        os.killpg(own, signal.SIGKILL)


def _install() -> None:
    slots.install()
    if current_platform.is_cpu():
        from artd_workers.engines.vllm.weights.gloo_backend import make_backend

        from .lora_experts import install as install_lora_experts

        install_lora_experts()
        WeightTransferEngineFactory.register_engine(CPU_BACKEND, make_backend(UPDATE))
    else:
        from artd_workers.engines.vllm.weights.nccl_backend import make_checked

        WeightTransferEngineFactory.register_engine(CUDA_BACKEND, make_checked(UPDATE))
    watch = (int(os.environ["ARTD_HARNESS_PID"]), int(os.environ["ARTD_HARNESS_START"]))
    threading.Thread(target=_end_with_harness, args=watch, name="artd-harness-watch", daemon=True).start()


_install()
