"""The contract of an inference engine: what artd calls, the errors, and the table of what each version can do.

The push state machine and the harness reach any engine through `Adapter`. A version's differences are rows of a table, chosen
by the version that the running server reports. The code that pushes has no `if` for a version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from artd_schema.data.manifest import WeightEntry
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import InFlight
from artd_schema.wire.direct import EngineTable
from artd_schema.wire.worker import Transfer
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline

Routes = Literal["hooks", "field"]
"""How an engine reports experts.

- `hooks`: artd's extension catches them in the worker, and the gateway asks for them by request. Tokens of a cached
  prefix are never routed, so prefix
  caching is off.
- `field`: the server puts them into its replies, by a flag.
"""


class EngineError(Exception):
    """A call to the engine failed; the text says what was called, what came back and what to do next."""


class EngineTimeout(EngineError):
    """The engine did not answer before the deadline; what it does now is unknown."""


@dataclass(frozen=True)
class Capabilities:
    """What one engine version can do, as it was seen running under artd.

    `weight_version`: replies carry a label that `/update_weight_version` sets. `abort_route`: `/abort_requests` ends everything
    in flight. `scale_out_flag`: rendering, and generating by tokens, need the flag `--enable-scale-out`; otherwise they are
    always there. `routes`: how it reports the experts of a mixture of experts. `own_transfer`: artd can push by the engine's
    own transfer calls (`stock`).
    """

    series: str
    weight_version: bool
    abort_route: bool
    scale_out_flag: bool
    routes: Routes
    own_transfer: bool


def capabilities(table: Sequence[Capabilities], version: str) -> Capabilities:
    """Return the row for a version such as `0.32.0+cpu`. Raises EngineError for one that the table does not know."""
    series = ".".join(version.split(".")[:2])
    for row in table:
        if row.series == series:
            return row
    known = ", ".join(row.series for row in table)
    raise EngineError(
        f"engine version {version} is not in artd's capability table (it knows {known}); install one of these"
    )


@dataclass(frozen=True)
class Fence:
    """Identifies an attempt of a push: a data folder's instance, a spawn of this engine, and the push's fence, which rises with
    each attempt."""

    instance: str
    spawn: int
    push: int
    fence: int

    def as_json(self) -> dict[str, Any]:
        return {"instance": self.instance, "spawn": self.spawn, "push": self.push, "fence": self.fence}


@dataclass(frozen=True)
class DiskLoad:
    """A load of merged weights from disk.

    `base`: folder of the base model, None when the checkpoint holds every weight. `checkpoint`: its folder. `scale`: alpha /
    rank. `dtype`: torch's name of the served dtype.
    """

    base: Path | None
    checkpoint: Path
    scale: float
    dtype: str


def model_name(config: EngineConfig) -> str:
    """Return the name of the base weights on the server.

    In merged mode it is `RUN`, whatever step the weights are of, so that pushes do not change it. In lora mode it is
    `RUN@base`, which no client can request; clients get `RUN@STEP`, so a routing error never serves the untrained model as the
    run.
    """
    return config.run if config.spec.rollout_weights_mode == "merged" else f"{config.run}@base"


class Adapter(Protocol):
    """One engine and its control routes. Every call ends by its deadline; every failure is an EngineError.

    A failed call between `begin` and `finish` leaves the weights unknown: the caller must end the engine.
    """

    version: str
    capabilities: Capabilities

    def healthy(self, deadline: Deadline) -> bool:
        """Return whether the server answers that it can serve."""

    def pause(self, drain_s: float, deadline: Deadline, in_flight: InFlight = "drain") -> bool:
        """Stop generating, and start no request. Returns whether any request was aborted.

        `in_flight` says what happens to running requests: `drain` waits `drain_s` seconds for them, then aborts them; `keep`
        and `recompute` stop them where they are until `resume`, and `recompute` also drops the KV cache.
        """

    def resume(self, deadline: Deadline) -> None:
        """Generate again."""

    def begin(self, fence: Fence, deadline: Deadline) -> None:
        """Open a weight update in the engine's worker, which refuses a fence below one that it has seen."""

    def join(self, rendezvous: str, deadline: Deadline, transfer: Transfer = "gloo") -> None:
        """Meet the trainer in the file `rendezvous`, for a push by gloo or stock; once per file, later calls do nothing."""

    def receive(
        self, fence: Fence, table: Sequence[WeightEntry], deadline: Deadline, transfer: Transfer = "gloo"
    ) -> dict[str, float]:
        """Load the tensors that the trainer of `join` broadcasts, in the table's order. Returns named seconds."""

    def load_merged(
        self, fence: Fence, table: Sequence[WeightEntry], load: DiskLoad, deadline: Deadline
    ) -> dict[str, float]:
        """Load a checkpoint in the engine's worker, which merges base and adapter. Returns named seconds."""

    def direct_table(self, deadline: Deadline) -> EngineTable:
        """Return the tensors that the engine's kernels read, and the obstacles to a direct push."""

    def direct_open(self, offer: Path, deadline: Deadline) -> None:
        """Wait until the file exists and open the `Offer` in it, in place of the earlier one.

        Further calls with the same path do nothing.
        """

    def direct_expect(self, weights: Path, deadline: Deadline) -> None:
        """Require that the next direct push brings the tensors of this weights.json, by their sum64."""

    def direct_room(self, deadline: Deadline) -> bool:
        """Return whether the weights fit into the GPU a second time, beside all that it holds."""

    def direct_stage(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        """Pull into spare memory while the engine generates, and wait until all is there. Returns named seconds."""

    def direct_pull(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        """Open an update, pull in place, compare the checksums, close the update. Returns named seconds."""

    def direct_swap(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        """Open an update, copy in what was staged, compare the checksums, close the update. Returns named seconds."""

    def finish(self, name: str, deadline: Deadline) -> None:
        """Label the new weights, and drop every cached prefix of the old ones.

        After a pause that kept requests with their cache nothing is dropped: there, prefixes of other epochs have other salts.
        """

    def load_adapter(self, name: str, folder: Path, deadline: Deadline) -> None:
        """Serve a LoRA adapter under a new name."""

    def check_adapter(self, folder: Path, table: Sequence[WeightEntry], deadline: Deadline) -> dict[str, float]:
        """Compare the adapter of this folder, as the engine's kernels read it, with the table's sums.

        Returns how many `tensors` and `bytes` were compared. Raises EngineError when any sum differs.
        """

    def unload_adapter(self, name: str, deadline: Deadline) -> None:
        """Stop serving an adapter; its requests in flight continue to their end."""

    def in_flight(self, name: str, deadline: Deadline) -> bool:
        """Return whether any request of this adapter runs or waits."""

    def score(self, model: str, prompts: Sequence[Sequence[int]], deadline: Deadline) -> list[list[float]]:
        """Return the logprobs (natural logarithm) of tokens 1..n-1 of each prompt (token ids), at temperature 1."""

    def warm(self, deadline: Deadline) -> dict[str, float]:
        """Make kernels ready for every size of a step, before anything is served. A failure only costs time later.

        Returns `forms` of the kernel that exist, `run` of them that ran, `kernels` made ready, and `seconds`.
        """

    def capture_routes(self, shape: RouteShape, deadline: Deadline) -> None:
        """Capture the experts of every token from now on. Raises EngineError when the engine's model has another shape."""

    def abort_all(self, deadline: Deadline) -> None:
        """End every request in flight."""
