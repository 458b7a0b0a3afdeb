"""The calls of the direct push in the worker of a vLLM on a GPU: a part of artd's worker extension.

`DirectExtension` makes `Session` reachable by /collective_rpc. Arguments and results are JSON; documents come as paths. It owns
the worker's `Session`, whose gate is the one of this process. A call that raises leaves the update open, and the caller ends
the engine. A call of another spawn's harness, told by its fence or owner, changes nothing. It imports no vLLM. Seen running
with vLLM 0.25.1, tensor-parallel size 1. Its executor ignores time-outs of /collective_rpc, so every call that waits takes its
own.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from artd_schema.data.manifest import WeightTable
from artd_schema.wire.direct import EngineTable, Offer
from artd_workers.engines.adapter import Fence
from artd_workers.engines.gate import FenceError, own_gate
from artd_workers.engines.pull.session import OPEN_S, Session
from artd_workers.engines.vllm import guard
from artd_workers.transfer.device import Cuda

from .survey import parameters, survey


class NotDirect(Exception):
    """The engine's weights cannot be written directly, or not from this checkpoint; the text names the first reason."""


class DirectExtension:
    """The RPC methods; `self` is vLLM's worker."""

    _artd_session: Session | None = None
    _artd_table: EngineTable | None = None

    def artd_direct_table(self) -> dict[str, Any]:
        """Return the present `EngineTable` of this worker."""
        self._artd_table = table_of(self)
        return msgspec.to_builtins(self._artd_table)

    def artd_direct_open(self, offer: str, timeout_s: float = OPEN_S, owner: str | None = None) -> dict[str, float]:
        """Open the `Offer` in the file `offer` (MessagePack). `owner`: see `guard`; None = a script's call.

        Raises NotDirect, CoverError, DeviceError, PullError, FenceError.
        """
        _check_owner(owner)
        return _session(self).open(msgspec.msgpack.decode(Path(offer).read_bytes(), type=Offer), timeout_s)

    def artd_direct_expect(self, weights: str, owner: str | None = None) -> dict[str, Any]:
        """Require that the next push brings the tensors of this weights.json, by their sum64.

        Raises NotDirect for a table without sums, and FenceError.
        """
        _check_owner(owner)
        table = msgspec.json.decode(Path(weights).read_bytes(), type=WeightTable)
        sums = {entry.name: entry.sum64 for entry in table.tensors if entry.sum64 is not None}
        if len(sums) < len(table.tensors):
            raise NotDirect(
                f"{weights} has no sum64 for {len(table.tensors) - len(sums)} of its tensors: push from disk"
            )
        _session(self).expect(sums)
        return {}

    def artd_direct_room(self) -> dict[str, bool]:
        """Return whether the weights fit into the GPU a second time."""
        return {"room": _session(self).room()}

    def artd_direct_pull(self, fence: dict[str, Any], timeout_s: float) -> dict[str, float]:
        """Pull in place and check, while the engine is paused. Returns named seconds."""
        return _session(self).pull(Fence(**fence), timeout_s)

    def artd_direct_stage(self, fence: dict[str, Any], timeout_s: float) -> dict[str, float]:
        """Start to pull into spare memory while the engine runs."""
        return _session(self).stage(Fence(**fence), timeout_s)

    def artd_direct_staged(self) -> dict[str, float]:
        """Return the seconds that staging took; empty while it runs."""
        return _session(self).poll_staging()

    def artd_direct_swap(self, fence: dict[str, Any]) -> dict[str, float]:
        """Copy in what was staged and check it, while the engine is paused. Returns named seconds."""
        return _session(self).swap(Fence(**fence))

    def artd_direct_check(self) -> dict[str, float]:
        """Check the engine's present tensors. Returns named seconds."""
        return _session(self).check()

    def artd_direct_drop_spare(self) -> dict[str, Any]:
        """Free the spare memory."""
        _session(self).drop_spare()
        return {}


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings of a VllmConfig that prevent the direct push, by name; a false value prevents nothing."""
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


def table_of(worker: Any) -> EngineTable:
    """Return the tensors that the worker's kernels read."""
    version = metadata.version("vllm")
    return survey(worker.model_runner.get_model(), settings_of(worker.vllm_config), version)


def _check_owner(owner: str | None) -> None:
    """Raise FenceError for another owner: a harness that was replaced could otherwise close this engine's feeds or change its
    sums."""
    if owner is not None and owner != guard.own():
        raise FenceError(f"a call of {owner}, but this engine belongs to instance and spawn {guard.own()}")


def _session(worker: Any) -> Session:
    if worker._artd_session is None:
        if obstacles := (worker._artd_table or table_of(worker)).obstacles:
            first = obstacles[0]
            raise NotDirect(
                f"{first.where}: {first.why} (and {len(obstacles) - 1} more): use the engine's own transfer calls"
            )
        found = parameters(worker.model_runner.get_model())
        port = Cuda(next(iter(found.values())).device.index)
        worker._artd_session = Session(own_gate(), port, tuple(found), tuple(found.values()))
    return worker._artd_session
