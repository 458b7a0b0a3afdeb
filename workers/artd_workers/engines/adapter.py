"""What artd asks of an inference engine: the adapter contract, its errors and the capability table.

Purpose: the push state machine and the harness speak to any engine through `Adapter`; a version's differences are rows of
a table, picked by what the running server says of itself, never `if`s in the code that pushes.
Owner of: no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from artd_schema.direct import EngineTable
from artd_schema.manifest import WeightEntry
from artd_schema.spec import InFlight
from artd_schema.trajectory import RouteShape
from artd_schema.worker import EngineConfig, Transfer
from artd_workers.deadline import Deadline

Routes = Literal["hooks", "field"]
"""How an engine tells routed experts. hooks: artd's extension catches them in the worker, and they are asked for by request;
a cached prefix is never routed, so there is none. field: the server puts them into its replies, by a flag."""


class EngineError(Exception):
    """A call to the engine failed: what was asked, what came back, what to do next."""


class EngineTimeout(EngineError):
    """The engine did not answer before the deadline; what it does now is unknown."""


@dataclass(frozen=True)
class Capabilities:
    """What one engine version can do, as it was seen running under artd.

    weight_version: replies are stamped with a label that `/update_weight_version` sets. abort_route: `/abort_requests` ends
    everything in flight. scale_out_flag: rendering and generating by tokens must be asked for by `--enable-scale-out` (else
    they are always there). routes: how it tells the experts of a mixture of experts. own_transfer: artd can push by the calls that
    the engine itself has for that (`stock`).
    """

    series: str
    weight_version: bool
    abort_route: bool
    scale_out_flag: bool
    routes: Routes
    own_transfer: bool


def capabilities(table: Sequence[Capabilities], version: str) -> Capabilities:
    """The row for a version such as `0.32.0+cpu`. Raises EngineError for one that the table does not know."""
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
    """Who pushes: a data directory's instance, a spawn of this engine, and an attempt of a push. Later = greater."""

    instance: str
    spawn: int
    push: int
    fence: int

    def as_json(self) -> dict[str, Any]:
        return {"instance": self.instance, "spawn": self.spawn, "push": self.push, "fence": self.fence}


@dataclass(frozen=True)
class DiskLoad:
    """A merged load from disk: base model folder (None: the checkpoint holds every weight), checkpoint folder, scale =
    alpha / rank, torch dtype name as served."""

    base: Path | None
    checkpoint: Path
    scale: float
    dtype: str


def model_name(config: EngineConfig) -> str:
    """Return the name of the base weights on the server.

    merged: `RUN`, whatever step its weights are of, so that it is the same across pushes. lora: `RUN@base`, which no client
    can ask for; clients get `RUN@STEP`, so a slip in routing can never serve the untrained model as the run.
    """
    return config.run if config.spec.rollout_weights_mode == "merged" else f"{config.run}@base"


class Adapter(Protocol):
    """One engine over its control routes. Every call ends by its deadline; every failure is an EngineError.

    A failed call between `begin` and `finish` leaves the weights unknown: the caller must end the engine.
    """

    version: str
    capabilities: Capabilities

    def healthy(self, deadline: Deadline) -> bool:
        """Whether the server answers that it can serve."""

    def pause(self, drain_s: float, deadline: Deadline, in_flight: InFlight = "drain") -> bool:
        """Stop generating, and begin nothing. in_flight, of requests: `drain` waits drain_s for them, then aborts them; `keep`
        and `recompute` stop them where they are until `resume`, the second dropping the KV cache, theirs included.
        Returns whether any were aborted."""

    def resume(self, deadline: Deadline) -> None:
        """Generate again."""

    def begin(self, fence: Fence, deadline: Deadline) -> None:
        """Open a weight update in the engine's worker; it refuses a fence below one that it has seen."""

    def join(self, rendezvous: str, deadline: Deadline, transfer: Transfer = "gloo") -> None:
        """Meet the trainer in the file `rendezvous`, for a push by gloo or stock; once per file, later calls do nothing."""

    def receive(
        self, fence: Fence, table: Sequence[WeightEntry], deadline: Deadline, transfer: Transfer = "gloo"
    ) -> dict[str, float]:
        """Load the tensors that the trainer broadcasts in the table's order, as `join` met it. Returns named seconds."""

    def load_merged(
        self, fence: Fence, table: Sequence[WeightEntry], load: DiskLoad, deadline: Deadline
    ) -> dict[str, float]:
        """Load a checkpoint in the engine's worker, base and adapter merged there. Returns named seconds."""

    def direct_table(self, deadline: Deadline) -> EngineTable:
        """What its kernels read, with what stands against a direct push, if anything does."""

    def direct_open(self, offer: Path, deadline: Deadline) -> None:
        """Wait until the file is there and open the `Offer` in it, in place of the one before; once per path, later calls
        do nothing."""

    def direct_expect(self, weights: Path, deadline: Deadline) -> None:
        """The next direct push must bring the tensors of this weights.json, by their sum64."""

    def direct_room(self, deadline: Deadline) -> bool:
        """Whether the weights fit into the GPU once more, beside all that it holds."""

    def direct_stage(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        """Pull into spare memory while the engine generates; returns when all is there. Returns named seconds."""

    def direct_pull(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        """Open an update, pull in place, compare the checksums, close the update. Returns named seconds."""

    def direct_swap(self, fence: Fence, deadline: Deadline) -> dict[str, float]:
        """Open an update, copy in what was staged, compare the checksums, close the update. Returns named seconds."""

    def finish(self, name: str, deadline: Deadline) -> None:
        """Label the new weights, and drop every cached prefix of the old ones; but nothing after a pause that kept requests
        with their cache: there a prefix of another epoch has another salt."""

    def load_adapter(self, name: str, folder: Path, deadline: Deadline) -> None:
        """Serve a LoRA adapter under a new name."""

    def check_adapter(self, folder: Path, table: Sequence[WeightEntry], deadline: Deadline) -> dict[str, float]:
        """Compare the adapter of this folder, as the engine's kernels read it, with the table's sums; refused when any differs.
        Returns how many `tensors` and `bytes` were compared."""

    def unload_adapter(self, name: str, deadline: Deadline) -> None:
        """Serve it no more; requests in flight under the name go on to their end."""

    def in_flight(self, name: str, deadline: Deadline) -> bool:
        """Whether any request under this adapter name runs or waits."""

    def score(self, model: str, prompts: Sequence[Sequence[int]], deadline: Deadline) -> list[list[float]]:
        """Natural-log probabilities of tokens 1..n-1 of each prompt (token ids), temperature 1."""

    def warm(self, deadline: Deadline) -> dict[str, float]:
        """Make kernels ready for every size of a step, before anything is served. Returns `forms` of the kernel there are, `run` of
        them, `kernels` made ready, `seconds`. When it fails nothing is lost but time."""

    def capture_routes(self, shape: RouteShape, deadline: Deadline) -> None:
        """From now on capture the experts of every token; refused when the engine's model is of another shape."""

    def abort_all(self, deadline: Deadline) -> None:
        """End every request in flight."""
