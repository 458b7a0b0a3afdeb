"""Captures the experts that vLLM's routers choose, in vLLM's worker, step by step.

The CPU engine cannot report them: its `routed_experts` field needs a model runner that has no CPU form. vLLM 0.32 lets
every router call a function with the ids that it has just chosen. These ids go to the experts, so ties and rounding
need no care. The ids of each token and layer are stored in rising order, so that equal choices are equal bytes.

Owns the rows of the step under way, and the worker's `RouteBook`. A step's rows reach the book only if every layer
reported every token. The tokens of a step are in the order of the runner's batch, those of a sequence from its
`num_computed_tokens` on. The cost is one copy for each layer, and one for each sequence and step.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.platforms import current_platform

from artd_schema.data.trajectory import RouteShape

from .row_book import RouteBook, Rows

log = logging.getLogger(__name__)
_SWEEP_S = 5.0
_MARK = "artd_route_capture"


class CaptureError(Exception):
    """The engine cannot capture routes, or not of this shape. The text says what prevents it and what to do."""


class RouteCapture:
    """Captures the routes of a worker's model runner, from its creation on. vLLM's thread and a sweeper's thread call
    it."""

    def __init__(self, runner: Any, shape: RouteShape) -> None:
        """Attach to `runner`. Raises CaptureError before it has changed anything."""
        routers = _routers(runner.get_model())
        _check_shape(routers, shape)
        _check_runner(runner)
        tokens = runner.scheduler_config.max_num_batched_tokens
        self._step: Rows = np.empty((tokens, shape.layers, shape.topk), f"<u{shape.width}")
        self._told = np.zeros(shape.layers, np.int64)
        self._runner = runner
        self._book = RouteBook(shape)
        self._lock = threading.Lock()
        self._execute = runner.execute_model
        for layer, (_, router) in enumerate(routers):
            router.set_capture_fn(partial(self._tell, layer))
        runner.execute_model = self._capture
        setattr(runner, _MARK, self)
        threading.Thread(target=self._sweep, name="artd-route-sweep", daemon=True).start()

    def take(self, request_ids: Iterable[str]) -> dict[str, Any]:
        """Return the routes of these requests and forget them, as JSON: `REQUEST#CHOICE` -> routes (base64), start,
        rows, recomputed."""
        with self._lock:
            found = self._book.take(request_ids)
        return {
            key: {
                "routes": base64.b64encode(taken.rows.tobytes()).decode(),
                "start": taken.start,
                "rows": len(taken.rows),
                "recomputed": [list(span) for span in taken.recomputed],
            }
            for key, taken in found.items()
        }

    def drop(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            self._book.drop(request_ids)

    def count_held(self) -> dict[str, int]:
        """Count what is held: `sequences` that have rows and their `bytes`; `known` sequences, which run, or have ended
        and nobody took them."""
        with self._lock:
            return {"sequences": self._book.held, "bytes": self._book.bytes, "known": self._book.known}

    def _tell(self, layer: int, chosen: torch.Tensor) -> None:
        """Store the ids [tokens, topk] of one layer. The layer's router calls this."""
        self._told[layer] = count = len(chosen)
        self._step[:count, layer] = chosen.numpy()

    def _capture(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step and put its rows into the book. Replaces the runner's `execute_model`."""
        self._told[:] = -1
        result = self._execute(scheduled, *args, **kwargs)
        with self._lock:
            if scheduled.finished_req_ids:
                self._book.end(scheduled.finished_req_ids)
            if scheduled.total_num_scheduled_tokens:
                self._store(scheduled)
        return result

    def _store(self, scheduled: Any) -> None:
        batch, total = self._runner.input_batch, scheduled.total_num_scheduled_tokens
        if (self._told < total).any():
            log.warning("routes of a step with %d tokens are lost: the layers reported %s", total, self._told.tolist())
            for worker_id in batch.req_ids:
                self._book.lose(worker_id)
            return
        rows, at = np.sort(self._step[:total], axis=-1), 0
        for worker_id, first in zip(batch.req_ids, batch.num_computed_tokens_cpu[: batch.num_reqs], strict=True):
            end = at + scheduled.num_scheduled_tokens[worker_id]
            self._book.add(worker_id, int(first), rows[at:end])
            at = end

    def _sweep(self) -> None:
        """Sweep the book at intervals, because an idle engine runs no steps and must not hold rows for ever either."""
        while True:
            time.sleep(_SWEEP_S)
            with self._lock:
                self._book.sweep()


def _check_runner(runner: Any) -> None:
    if hasattr(runner, _MARK):  # `execute_model` shows nothing, because others wrap it, too
        raise CaptureError("routes are captured already")
    if not current_platform.is_cpu():
        raise CaptureError("routes are captured by hooks on the CPU only: set expert_replay=false")
    config = runner.vllm_config
    if config.cache_config.enable_prefix_caching:
        raise CaptureError("prefix caching is on: tokens of a cached prefix are never routed, start without it")
    if config.speculative_config is not None or config.scheduler_config.async_scheduling:
        raise CaptureError("speculative decoding or asynchronous scheduling is on: positions of a step are not certain")
    if config.parallel_config.world_size > 1:
        raise CaptureError(f"{config.parallel_config.world_size} workers: routes are captured in one, start one")


def _routers(model: torch.nn.Module) -> list[tuple[str, BaseRouter]]:
    """Return (name, router) of every MoE layer, in the order of the layers. Raises CaptureError."""
    found = [(module.layer_id, name, module) for name, module in model.named_modules() if isinstance(module, MoERunner)]
    for _, name, module in found:
        if module._quant_method.is_monolithic or not isinstance(module.router, BaseRouter):
            raise CaptureError(
                f"{name}: its kernel chooses the experts itself and does not report them; set expert_replay=false"
            )
    return [(name, module.router) for _, name, module in sorted(found, key=lambda item: item[0])]


def _check_shape(routers: list[tuple[str, BaseRouter]], shape: RouteShape) -> None:
    if len(routers) != shape.layers:
        raise CaptureError(f"the engine's model has {len(routers)} MoE layers, the run's has {shape.layers}")
    for name, router in routers:
        if (router.top_k, router.global_num_experts) != (shape.topk, shape.experts):
            raise CaptureError(
                f"{name} routes to {router.top_k} of {router.global_num_experts} experts, "
                f"the run's model to {shape.topk} of {shape.experts}"
            )
