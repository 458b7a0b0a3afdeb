"""artd inside vLLM's worker process (`--worker-extension-cls`): fence, load from disk, direct push, adapters' sums, routes, who
sampled each token, warm-up, and death with the harness.

Purpose: what the stock server cannot do. vLLM imports this module before it builds the model, and mixes `Extension` into
its worker class, so its methods are reachable by /collective_rpc.
Owner of: the worker's `Update`, its `RouteCapture` and its `SampleBook`. Invariants: every write of weights passes the one gate of this process:
between `artd_begin` and `artd_finish`, or within a direct pull or swap; when the harness dies, however it dies, this process
group dies. What only the CPU's vLLM 0.32 has is imported there alone.
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
from vllm.platforms import current_platform

from artd_schema.paths import process_ticks
from artd_schema.scratch import remove
from artd_schema.trajectory import RouteShape
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
"""The one capture of this worker, once it has begun."""
BOOKS: list[SampleBook] = []
"""The one sample-book of this worker, from its first label on: before that nothing is served."""
UPDATE = Update(own_gate())


class Extension(DirectExtension):
    """RPC methods; `self` is vLLM's worker. Every error reaches the harness as a failed call, and it ends the engine."""

    def artd_begin(self, fence: dict[str, Any]) -> dict[str, Any]:
        """Open a weight update. Raises FenceError."""
        UPDATE.begin(Fence(**fence))
        return {}

    def artd_expect(self, fence: dict[str, Any], table: list[list[Any]]) -> dict[str, Any]:
        """vLLM's own transfer calls, which carry no hashes, must bring the tensors of this table in the open update."""
        UPDATE.gate.check(Fence(**fence))
        UPDATE.wanted = {entry.name: entry for entry in entries(table)}
        return {}

    def artd_load_merged(
        self, fence: dict[str, Any], base: str | None, checkpoint: str, scale: float, dtype: str, table: list[list[Any]]
    ) -> dict[str, Any]:
        """Replace the model's weights by those of a checkpoint, read here (base + scale * B A, or without a base every
        weight), checked against the table's hashes."""
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
        """Close the update; returns bytes loaded and seconds (transfer, load) as measured here."""
        UPDATE.gate.check(Fence(**fence))
        if not UPDATE.figures:
            raise RuntimeError("the update loaded nothing")
        UPDATE.gate.finish()
        return dict(UPDATE.figures)

    def artd_check_adapter(self, folder: str, table: list[list[Any]]) -> dict[str, float]:
        """Compare the adapter that was read from this folder, where the kernels read it, with the table; see `slots.check`."""
        return slots.check(self.model_runner, folder, entries(table))  # type: ignore[attr-defined]

    def artd_label(self, owner: str, name: str, cleared: bool) -> dict[str, Any]:
        """The weights are `name` from the next step on, see `SampleBook.label`; called while the engine is paused, by its own
        harness (see `guard`). Raises FenceError."""
        if owner != guard.own():
            raise FenceError(f"a label of {owner}, but this engine belongs to instance and spawn {guard.own()}")
        if not BOOKS:
            BOOKS.append(SampleBook())
            watch(self.model_runner, BOOKS[0])  # type: ignore[attr-defined]
        BOOKS[0].label(name, cleared)
        return {}

    def artd_take_sampled(self, choices: list[str]) -> dict[str, Any]:
        """Who sampled each token of these choices (`REQUEST#CHOICE`), see `SampleBook.take`."""
        return BOOKS[0].take(choices) if BOOKS else {}

    def artd_warm(self, timeout_s: float) -> dict[str, float]:
        """Make the forms of the experts' kernel ready, before anything is served; see `warm`. Nothing but time hangs on it."""
        return warm(self.model_runner, timeout_s)  # type: ignore[attr-defined]

    def artd_capture_routes(self, layers: int, topk: int, experts: int) -> dict[str, Any]:
        """From now on capture the experts of every token. Raises CaptureError when the model is of another shape."""
        from artd_workers.engines.vllm.tokens.capture import RouteCapture

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


def _load_into(worker: Any) -> Load:
    """In place where the model's tensors are those of the checkpoint, fused and nothing else; else layer by layer."""
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
        pass  # it was dead before this began
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
