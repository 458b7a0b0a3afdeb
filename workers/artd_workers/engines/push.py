"""The push state machine of one engine: a checkpoint becomes live after it is verified, or not at all.

Phases of a merged push: fence, hold, pause, transfer, load, resume, verify. The gateway holds requests from the end of `hold`
on. A paused engine answers no canary, so the engine resumes first, and only `Live` releases the gateway. A direct push has two
more phases before the hold, beside running requests: open, and stage where the weights are pulled into spare memory first.
Phases of a lora push: load and verify, beside running requests.

It owns the greatest fence taken, and the loaded adapters with their folders. An attempt that is older than one taken is refused
before it touches the engine. No adapter leaves while a push loads one. An engine is paused, and its weights are touched, only
after the gateway holds. Any error leaves the engine unknown, and the caller ends it. One push runs at a time, in the caller's
thread.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from artd_schema.crashpoint import reach
from artd_schema.data.manifest import WEIGHTS_FILE
from artd_schema.run.spec import RunSpec
from artd_schema.wire.direct import OFFER
from artd_schema.wire.worker import Live, Push, Transfer
from artd_workers.deadline import Deadline, Patient
from artd_workers.transfer.nccl.stock import size_of

from . import canary, checkpoint
from .adapter import Adapter, DiskLoad, EngineError, Fence

DIRECT: tuple[Transfer, ...] = ("direct", "nccl")
"""Transfers that are verified before the engine resumes, so that requests in flight may continue across the push."""


class Stale(Exception):
    """The push is older than one already taken; the engine was not touched."""


class _Adopted(NamedTuple):
    """An adapter that the engine has loaded. `folder`: its copy here; `sha`: of its checkpoint."""

    folder: Path
    sha: str


@dataclass
class _Left:
    """The folder of an adapter that the server has forgotten. `looked`: `tidy` has seen it before."""

    name: str
    folder: Path
    looked: bool = False


class PushError(Exception):
    """A push did not become live: the engine's weights are unknown, and it must be ended."""

    def __init__(self, phase: str, error: str) -> None:
        super().__init__(error)
        self.phase = phase


class Pusher:
    """Runs the pushes of one engine.

    `instance`, `spawn`: of this engine. `base_name`: name of the base weights on the server. `folder`: for copies of adapters.
    `hold` returns when the gateway admits nothing more to the engine, or raises EngineError. `mark()` changes with every tensor
    that the engine has loaded.
    """

    def __init__(
        self, adapter: Adapter, spec: RunSpec, base_name: str, folder: Path, instance: str, spawn: int,
        hold: Callable[[Push, Deadline], None], log: Callable[[str], None] = lambda text: None,
        mark: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._adapter = adapter
        self._spec = spec
        self._base_name = base_name
        self._folder = folder
        self._instance = instance
        self._spawn = spawn
        self._hold = hold
        self._log = log
        self._mark = mark
        self._seen = -1
        self._phase = "fence"
        self._loaded: dict[str, _Adopted] = {}
        self._leaving: set[str] = set()
        self._left: list[_Left] = []
        self._lock = threading.Lock()
        self._moving = threading.Lock()

    @property
    def phase(self) -> str:
        """The phase of the running push, or of the last one."""
        return self._phase

    def progress(self) -> tuple[str, object]:
        """Return a value that changes with each phase and each loaded tensor. Any thread."""
        return self._phase, self._mark()

    def run(self, push: Push) -> Live:
        """Make the push's checkpoint live. Raises Stale, or PushError with the phase that failed."""
        if push.fence <= self._seen:
            raise Stale(f"push {push.push} has fence {push.fence}, but fence {self._seen} was taken before")
        self._seen = push.fence
        self._phase = "fence"
        reach("engine.fenced")
        seconds: dict[str, float] = {}
        try:
            agreement = self._push_merged(push, seconds) if push.mode == "merged" else self._push_lora(push, seconds)
        except EngineError as error:
            raise PushError(self._phase, str(error)) from error
        reach("engine.verified")
        live = Live(push=push.push, fence=push.fence, seconds=seconds)
        if agreement is None:
            return live
        return replace(live, max_abs=agreement.max_abs, mean_abs=agreement.mean_abs)

    def unload(self, name: str) -> None:
        """Note an adapter that `tidy` unloads when no request uses it. Any thread."""
        with self._lock:
            if name in self._loaded:
                self._leaving.add(name)
            else:
                self._log(f"asked to unload {name}, which is not loaded here")

    def tidy(self, deadline: Deadline) -> list[str]:
        """Unload noted adapters whose last request has ended, and remove the folders of those unloaded before.

        Returns the unloaded names. While a push loads an adapter it does nothing, because the caller's thread must not wait.
        Raises EngineError.
        """
        if not self._moving.acquire(blocking=False):
            return []
        try:
            with self._lock:
                waiting = sorted(self._leaving)
            gone = [name for name in waiting if not self._adapter.in_flight(name, deadline)]
            self._remove_left(deadline)
            for name in gone:
                self._drop(name, deadline)
            return gone
        finally:
            self._moving.release()

    # ---- merged -------------------------------------------------------------------------------------------------------

    def _push_merged(self, push: Push, seconds: dict[str, float]) -> canary.Agreement | None:
        """Push merged weights. Returns None where requests continue across the push.

        There every checksum was compared before they continued. A canary would have to wait for room beside them, and the
        gateway with it.
        """
        committed = self._open(push)
        fence = Fence(self._instance, self._spawn, push.push, push.fence)
        direct = push.source == "live" and push.transfer in DIRECT
        in_flight = self._spec.engine.in_flight if direct else "drain"
        ahead = Deadline(push.deadline_s)
        staged = direct and self._prepare(push, fence, committed, seconds, ahead)
        with self._time_phase("hold", seconds):
            self._hold(push, ahead)
        # Waiting for users' requests does not count against the engine's deadline.
        pause = Deadline(push.drain_s + push.deadline_s)
        with self._time_phase("pause", seconds):
            self._adapter.pause(push.drain_s, pause, in_flight)
        reach("engine.paused")
        deadline = Patient(push.deadline_s, self.progress)
        if direct:
            self._pull(fence, staged, seconds, deadline)
        else:
            self._update(push, fence, committed, seconds, deadline)
        reach("engine.updated")
        with self._time_phase("load", seconds):
            self._adapter.finish(push.name, deadline)
        with self._time_phase("resume", seconds):
            self._adapter.resume(deadline)
        reach("engine.resumed")
        if in_flight != "drain":
            return None
        return self._verify(self._base_name, committed, seconds, deadline)

    def _prepare(
        self, push: Push, fence: Fence, committed: checkpoint.Checkpoint, seconds: dict[str, float], deadline: Deadline
    ) -> bool:
        """Do the part of a direct push that runs beside the engine. Returns whether the weights are staged."""
        wanted = self._spec.engine.transfer
        with self._time_phase("open", seconds):
            self._adapter.direct_open(Path(push.rendezvous) / OFFER, deadline)
            self._adapter.direct_expect(committed.folder / WEIGHTS_FILE, deadline)
            staged = wanted == "staged" or (wanted in ("auto", "nccl") and self._adapter.direct_room(deadline))
        if staged:
            with self._time_phase("stage", seconds):
                self._adapter.direct_stage(fence, deadline)
        return staged

    def _pull(self, fence: Fence, staged: bool, seconds: dict[str, float], deadline: Deadline) -> None:
        """Bring the weights in and compare their checksums."""
        with self._time_phase("transfer", seconds):
            (self._adapter.direct_swap if staged else self._adapter.direct_pull)(fence, deadline)

    def _update(
        self, push: Push, fence: Fence, committed: checkpoint.Checkpoint, seconds: dict[str, float], deadline: Deadline
    ) -> None:
        """Bring the weights in, tensor by tensor.

        The engine reports its own share of the time; the rest is the trainer's, or that of the disk and the merge.
        """
        with self._time_phase("transfer", seconds):
            self._adapter.begin(fence, deadline)
            figures = self._load_tensors(push, fence, committed, deadline)
        loaded = figures.get("load", 0.0)
        seconds["transfer"] = max(0.0, seconds["transfer"] - loaded)
        seconds["load"] = loaded
        with self._time_phase("load", seconds):
            self._check_bytes(committed, int(figures.get("bytes", 0.0)))

    def _load_tensors(
        self, push: Push, fence: Fence, committed: checkpoint.Checkpoint, deadline: Deadline
    ) -> dict[str, float]:
        table = committed.weights.tensors
        if push.source == "live":
            self._adapter.join(push.rendezvous, deadline, push.transfer)
            return self._adapter.receive(fence, table, deadline, push.transfer)
        scale = self._spec.lora.scale
        base = None if committed.manifest.parameters == "full" else Path(self._spec.model)
        load = DiskLoad(base, committed.folder, scale, self._spec.engine.dtype)
        return self._adapter.load_merged(fence, table, load, deadline)

    def _check_bytes(self, committed: checkpoint.Checkpoint, found: int) -> None:
        expected = sum(size_of(entry) for entry in committed.weights.tensors)
        if found != expected:
            raise EngineError(f"the engine loaded {found} bytes, the weight table has {expected}")

    # ---- lora ---------------------------------------------------------------------------------------------------------

    def _push_lora(self, push: Push, seconds: dict[str, float]) -> canary.Agreement:
        committed = self._open(push)
        deadline = Patient(push.deadline_s, self.progress)
        with self._moving:
            with self._lock:
                there = push.name in self._loaded and self._loaded[push.name].sha == push.checkpoint.sha
                if there:
                    self._leaving.discard(push.name)  # after a rollback it may be in use, so it stays as it is
            if not there:
                self._load(push, committed, seconds, deadline)
        reach("engine.updated")
        return self._verify_adapter(push.name, committed, seconds, deadline)

    def _load(
        self, push: Push, committed: checkpoint.Checkpoint, seconds: dict[str, float], deadline: Deadline
    ) -> None:
        folder = self._folder / f"{push.push}-{push.fence}"
        with self._time_phase("transfer", seconds):
            checkpoint.adopt_adapter(committed, folder)
        with self._time_phase("load", seconds):
            if push.name in self._loaded:  # the same step number of another lineage
                self._drop(push.name, deadline)
            self._adapter.load_adapter(push.name, folder, deadline)
        with self._lock:
            self._loaded[push.name] = _Adopted(folder, push.checkpoint.sha)

    def _verify_adapter(
        self, name: str, committed: checkpoint.Checkpoint, seconds: dict[str, float], deadline: Deadline
    ) -> canary.Agreement:
        """Verify an adapter by the sums of what the kernels read, and by what they compute with it and without it."""
        told = committed.manifest.canary
        with self._time_phase("verify", seconds):
            folder = self._loaded[name].folder
            found = self._adapter.check_adapter(folder, committed.weights.held, deadline)
            if found.get("tensors") != len(committed.weights.tensors):
                raise EngineError(
                    f"the engine compared {found.get('tensors')} of {len(committed.weights.tensors)} tensors"
                )
            base, step = (self._adapter.score(model, told.prompts, deadline) for model in (self._base_name, name))
            agreement, change = canary.verify_adapter(told, base, step)
        self._log(
            f"{name}: the engine's change is {change.slope:.3f} times the trainer's, correlation {change.correlation:.3f}, at "
            f"{change.times:.1f} times the rounding"
        )
        return agreement

    def _drop(self, name: str, deadline: Deadline) -> None:
        """Make the server forget the name.

        The folder stays: a request in flight may need it again, because engines reload an adapter that they have evicted from
        their slots.
        """
        self._adapter.unload_adapter(name, deadline)
        with self._lock:
            adopted = self._loaded.pop(name)
            self._leaving.discard(name)
        self._left.append(_Left(name, adopted.folder))

    def _remove_left(self, deadline: Deadline) -> None:
        """Remove the folders that no request can need any more.

        A request that the server was about to admit when it forgot the name shows in its metrics a moment later, so a folder is
        looked at twice. Requests for a newer adapter of the same name keep the folder, too.
        """
        for left in list(self._left):
            if left.looked and not self._adapter.in_flight(left.name, deadline):
                shutil.rmtree(left.folder, ignore_errors=True)
                self._left.remove(left)
            left.looked = True

    # ---- both ---------------------------------------------------------------------------------------------------------

    def _open(self, push: Push) -> checkpoint.Checkpoint:
        committed = checkpoint.read(push.checkpoint)
        if committed.weights.mode != push.mode or push.mode != self._spec.rollout_weights_mode:
            raise EngineError(
                f"a {push.mode} push of a {committed.weights.mode} checkpoint to a {self._spec.rollout_weights_mode} engine"
            )
        if committed.manifest.parameters != self._spec.parameters:
            raise EngineError(
                f"{committed.folder} holds {committed.manifest.parameters} parameters, the run trains "
                f"{self._spec.parameters}: it is not a checkpoint of this run"
            )
        return committed

    def _verify(
        self, model: str, committed: checkpoint.Checkpoint, seconds: dict[str, float], deadline: Deadline
    ) -> canary.Agreement:
        with self._time_phase("verify", seconds):
            scores = self._adapter.score(model, committed.manifest.canary.prompts, deadline)
            return canary.verify(committed.manifest.canary, scores)

    @contextmanager
    def _time_phase(self, phase: str, seconds: dict[str, float]) -> Iterator[None]:
        self._phase = phase
        began = time.perf_counter()
        yield
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began
