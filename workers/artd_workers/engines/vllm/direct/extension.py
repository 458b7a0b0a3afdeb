"""artd inside the worker of a vLLM on a GPU (`--worker-extension-cls`): the calls of the direct push.

Purpose: `DirectExtension` gives `Session` to /collective_rpc; arguments and results are JSON, and documents come as paths.
Owner of: the worker's `Session`. Invariants: a call that raises leaves the update open, and the caller ends the engine.
Seen running with vLLM 0.25.1, tensor-parallel size 1. Its executor ignores time-outs of /collective_rpc, so every call that
waits takes its own.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from artd_schema.direct import Checksums, EngineTable, Offer

from ...base import Fence
from ...direct.device import Cuda
from ...direct.session import Session
from ...fence import Gate
from .survey import parameters, survey


class NotDirect(Exception):
    """This engine's weights cannot be written directly; names the first reason."""


class DirectExtension:
    """RPC methods; `self` is vLLM's worker."""

    _artd_session: Session | None = None

    def artd_direct_table(self) -> dict[str, Any]:
        """The `EngineTable` of this worker."""
        return msgspec.to_builtins(_table(self))

    def artd_direct_open(self, offer: str) -> dict[str, float]:
        """Open the `Offer` in the file `offer` (MessagePack). Raises NotDirect, CoverError, DeviceError."""
        return _session(self).open(msgspec.msgpack.decode(Path(offer).read_bytes(), type=Offer))

    def artd_direct_expect(self, checksums: str) -> dict[str, Any]:
        """The next push must bring these: path of a `Checksums` file (JSON), beside the committed manifest."""
        _session(self).expect(msgspec.json.decode(Path(checksums).read_bytes(), type=Checksums).sums)
        return {}

    def artd_direct_pull(self, fence: dict[str, Any], timeout_s: float) -> dict[str, float]:
        """Pull in place, the engine being paused; checked when it returns. Returns seconds."""
        return _session(self).pull(Fence(**fence), timeout_s)

    def artd_direct_stage(self, fence: dict[str, Any], timeout_s: float) -> dict[str, float]:
        """Begin to pull into spare memory beside the running engine."""
        return _session(self).stage(Fence(**fence), timeout_s)

    def artd_direct_staged(self) -> dict[str, float]:
        """Seconds that staging took; empty while it is under way."""
        return _session(self).staged()

    def artd_direct_swap(self, fence: dict[str, Any]) -> dict[str, float]:
        """Copy in what was staged, the engine being paused; checked when it returns. Returns seconds."""
        return _session(self).swap(Fence(**fence))

    def artd_direct_check(self) -> dict[str, float]:
        """Check the engine's tensors as they are now. Returns seconds."""
        return _session(self).check()

    def artd_direct_drop_spare(self) -> dict[str, Any]:
        """Give the spare memory back."""
        _session(self).drop_spare()
        return {}

    def artd_direct_close(self) -> dict[str, Any]:
        """Close the mappings of the trainer's memory."""
        _session(self).close()
        return {}


def settings_of(config: Any) -> dict[str, Any]:
    """What stands against the direct push in a VllmConfig, by name; nothing is in the way where the value is false."""
    parallel = config.parallel_config
    return {
        "tensor_parallel_size": parallel.tensor_parallel_size if parallel.tensor_parallel_size > 1 else 0,
        "pipeline_parallel_size": parallel.pipeline_parallel_size if parallel.pipeline_parallel_size > 1 else 0,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "enable_eplb": parallel.enable_eplb,
        "quantization": config.model_config.quantization,
        "enable_lora": config.lora_config is not None,
        "speculative_config": config.speculative_config is not None,
    }


def _table(worker: Any) -> EngineTable:
    version = metadata.version("vllm")
    return survey(worker.model_runner.get_model(), settings_of(worker.vllm_config), version)


def _session(worker: Any) -> Session:
    if worker._artd_session is None:
        if obstacles := _table(worker).obstacles:
            first = obstacles[0]
            raise NotDirect(
                f"{first.where}: {first.why} (and {len(obstacles) - 1} more): use the engine's own transfer calls"
            )
        found = parameters(worker.model_runner.get_model())
        gate = Gate(os.environ.get("ARTD_INSTANCE", ""), int(os.environ["ARTD_SPAWN"]))
        port = Cuda(next(iter(found.values())).device.index)
        worker._artd_session = Session(gate, port, tuple(found), tuple(found.values()))
    return worker._artd_session
