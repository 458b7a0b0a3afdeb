"""The trainer: runs jobs, writes checkpoint folders, and keeps the newest weights in memory between jobs.

`Trainer` runs init and train jobs, and knows which committed checkpoint its weights are. It owns the model, the
trained parameters, the optimizer, the `resident` tag, and the snapshot of weights that a live push sends. Only
`mark_committed` sets the tag, and the start of a job removes it. Without the tag the next job reads parameters,
optimizer and RNG from its parent's folder. A snapshot never changes while a push holds it.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from artd_schema.codec import digest, to_json
from artd_schema.crashpoint import reach
from artd_schema.data.manifest import OPTIMIZER_FILE, Canary
from artd_schema.wire.worker import CheckpointRef, Run, Transfer
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.base_files import BaseFiles
from artd_workers.models import registry
from artd_workers.trainer.batch.replay_bundle import ReplayFiles
from artd_workers.trainer.batch.rows import Batch, read_batch
from artd_workers.trainer.checkpoint import canary, folder, merge_loss
from artd_workers.trainer.checkpoint.folder import Staging, State
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.parallel.ranks import Ranks
from artd_workers.trainer.parameters.trained import Trained, open_model
from artd_workers.trainer.push import serving
from artd_workers.trainer.push.serving import Serving
from artd_workers.trainer.push.snapshot import Snapshot
from artd_workers.trainer.step.job import train_job
from artd_workers.trainer.step.objective import Objective, adopt
from artd_workers.trainer.step.step import Cancelled, NonFinite, Optimizer
from artd_workers.transfer.contracts import Port

from . import placement


@dataclass(frozen=True)
class Resident:
    """The committed checkpoint that the weights in memory are. `fence` is that of the job that made it."""

    run: str
    step: int
    sha: str
    fence: int


@dataclass(frozen=True)
class Staged:
    """A finished job: what the message `Staged` reports, and what `mark_committed` will make resident."""

    sha: str
    metrics: dict[str, float]
    seconds: dict[str, float]


class Phases(dict[str, float]):
    """Seconds of each finished phase of a job. Each entry counts as progress."""

    def __init__(self, progress: Callable[[], None]) -> None:
        self.progress = progress

    def __setitem__(self, name: str, seconds: float) -> None:
        super().__setitem__(name, seconds)
        self.progress()


class Order(Struct, frozen=True, kw_only=True):
    """What rank 0 sends the other ranks: a job, and whether the weights in memory are its parent (`held`)."""

    job: Run
    held: bool


class Trainer:
    """The trainer of one run. One thread uses it; only `snapshot_of` may come from any thread."""

    _trained: Trained
    _serving: Serving
    _optimizer: Optimizer
    _state: State

    def __init__(
        self, config: TrainerConfig, versions: dict[str, str], ranks: Ranks | None = None, port: Port | None = None
    ) -> None:
        """Prepare a trainer; the first job builds the model. `ranks` are the processes that train one model, of which
        this is one. `port` replaces the GPU's memory in tests."""
        self.config, self.spec = config, config.spec
        self._base_files = BaseFiles(config.spec.model, config.base, hashing=False)
        self.resident: Resident | None = None
        self._staged: tuple[str, Snapshot] | None = None
        self._base: canary.Base | None = None
        self._versions = versions
        self._policy: Policy | None = None
        self.ranks = ranks or Ranks()
        self.threads = self.spec.threads or max(1, len(os.sched_getaffinity(0)) // self.ranks.parallel.world)
        torch.set_num_threads(self.threads)
        self._cuda = placement.device_of(self.spec) == "cuda"
        # On a GPU some kernels of a step have no deterministic form.
        torch.use_deterministic_algorithms(not self._cuda)
        self._port = port or serving.port_of(self.spec)

    # ---- jobs ---------------------------------------------------------------------------------------------------------

    def run(
        self, job: Run, progress: Callable[[], None] = lambda: None, cancelled: Callable[[], bool] = lambda: False
    ) -> Staged:
        """Run a job on all ranks and stage its checkpoint in job.dir. Rank 0 calls it. Raises what `worker.classify`
        classifies.

        progress() is called, from other threads too, whenever a part of the job is done: the daemon takes a job
        without progress for stuck.
        """
        resident, self.resident, self._staged = self.resident, None, None
        parent = job.parent
        if job.kind == "train" and parent is None:
            raise ValueError(f"train job {job.job} names no parent checkpoint: report this as a bug of the daemon")
        held = (
            parent is not None
            and resident is not None
            and (resident.run, resident.step, resident.sha) == (parent.run, parent.step, parent.sha)
        )
        self.ranks.send_order(msgspec.msgpack.encode(Order(job=job, held=held)))
        return self._do(job, held, progress, cancelled)

    def follow(self, order: Order) -> None:
        """Run the same job on a rank other than 0. Raises what rank 0 raises, or an error of this rank alone; see
        `Ranks.broken`.
        """
        self._do(order.job, order.held, lambda: None, lambda: False)

    def _do(self, job: Run, held: bool, progress: Callable[[], None], cancelled: Callable[[], bool]) -> Staged:
        seconds = Phases(progress)
        policy = self._load_policy(seconds)
        with self.ranks.share_errors():
            self._serving.await_readers()
            state = self._state if held else self._begin(job, seconds)
            batch = self._read_batch(policy, job, seconds) if job.parent is not None else None
        metrics: dict[str, float] = {}
        with self.ranks.in_step(NonFinite, Cancelled, ArithmeticError):
            if batch is not None and job.parent is not None:
                started, asked = time.perf_counter(), self.ranks.poll(cancelled)
                learning = job.learning or self.spec.learning
                metrics = train_job(
                    policy, self._optimizer, batch, learning, job.parent.epoch, progress, asked, asked.now
                )
                seconds["train"] = time.perf_counter() - started
                reach("train.stepped")
                metrics |= _rewards(batch)
                tokens = state.trained_tokens + batch.trained
                state = State(step=job.step, batches=state.batches + 1, trained_tokens=tokens)
                state = folder.with_rng(state, self._cuda)
            self._state = state
            started = time.perf_counter()
            probe = canary.score(policy, self.spec.engine.dtype, self.ranks.all_reduce_min, self._base_scores(policy))
            seconds["canary"] = time.perf_counter() - started
            if batch is not None and (lost := merge_loss.metrics(policy, self._trained.base, self.spec)):
                metrics |= lost
                seconds["merge_loss"] = time.perf_counter() - started - seconds["canary"]
            started = time.perf_counter()
            self._trained.collect()
            moments = self._optimizer.state()
            seconds["collect"] = time.perf_counter() - started
        started = time.perf_counter()
        snapshot = self._serving.stage()
        seconds["merge"] = time.perf_counter() - started
        sha = self._stage(policy, job, state, metrics, seconds, probe, moments, snapshot) if self.ranks.first else ""
        self._trained.release()
        return Staged(sha, metrics, dict(seconds))

    def mark_committed(self, ref: CheckpointRef, fence: int) -> None:
        """Record that the staged result is durable. If it is still in memory, the weights are now this checkpoint."""
        if self._staged is not None and self._staged[0] == ref.sha:
            self.resident = Resident(ref.run, ref.step, ref.sha, fence)

    def discard(self) -> None:
        """Forget what memory holds: the next job reads its parent from disk."""
        self.resident, self._staged = None, None

    def snapshot_of(self, ref: CheckpointRef) -> Snapshot | None:
        """Return what a committed checkpoint serves, or None when it is not resident."""
        resident, staged = self.resident, self._staged
        if (
            resident is None
            or staged is None
            or (resident.run, resident.step, resident.sha) != (ref.run, ref.step, ref.sha)
        ):
            return None
        return staged[1]

    def transfers(self) -> tuple[Transfer, ...]:
        """Return how this process can send a live push, best first."""
        return serving.transfers(self.spec, self._port)

    # ---- parts --------------------------------------------------------------------------------------------------------

    def _load_policy(self, seconds: dict[str, float]) -> Policy:
        """Return the model, built by the first job. Collective: every rank calls it."""
        if self._policy is None:
            started = time.perf_counter()
            with self.ranks.share_errors():
                adopt(self.config.loss)
                registry.adopt(self.config.family)
                Objective(self.spec.loss)  # a run whose loss cannot be had fails before its first step
                policy, self._trained = open_model(self.spec, self.ranks.parallel)
                self._base_files.check_unchanged()
            with self.ranks.in_step():
                self._serving = serving.serving_of(policy, self._trained, self.spec, self._port, self.ranks)
            self._policy = policy
            seconds["build"] = time.perf_counter() - started
        else:  # the served weights are made from the base files, which are read again
            with self.ranks.share_errors():
                self._base_files.check_unchanged()
        return self._policy

    def _base_scores(self, policy: Policy) -> canary.Base | None:
        """Return the canary of the base model, scored once, or None when the engine does not get the adapter alone.
        Collective: every rank calls it.
        """
        if self.spec.rollout_weights_mode == "lora" and self._base is None:
            self._base = canary.score_base(policy)
        return self._base

    def _begin(self, job: Run, seconds: dict[str, float]) -> State:
        return self._start(seconds) if job.parent is None else self._restore(job.parent, seconds)

    def _start(self, seconds: dict[str, float]) -> State:
        started = time.perf_counter()
        self._trained.initialise(self.spec.seed)
        self._optimizer = Optimizer.make(self._trained.parameters, self.spec.optimizer)
        torch.manual_seed(self.spec.seed)
        seconds["initialise"] = time.perf_counter() - started
        return folder.with_rng(State(step=0), self._cuda)

    def _restore(self, parent: CheckpointRef, seconds: dict[str, float]) -> State:
        started = time.perf_counter()
        loaded = folder.read(parent, self._trained.file)
        self._trained.load(loaded.weights)
        self._optimizer = Optimizer.make(self._trained.parameters, self.spec.optimizer)
        self._optimizer.load(loaded.optimizer)
        folder.set_rng_state(loaded.state, self._cuda)
        seconds["restore"] = time.perf_counter() - started
        return loaded.state

    def _read_batch(self, policy: Policy, job: Run, seconds: dict[str, float]) -> Batch:
        started = time.perf_counter()
        shape = policy.plan.routes if self.spec.expert_replay else None
        replay = ReplayFiles(Path(job.replay), Path(job.replay_manifest)) if job.replay else None
        batch = read_batch(Path(job.batch), Path(job.manifest), job.batch_sha, policy.plan.vocab_size, shape, replay)
        seconds["read_batch"] = time.perf_counter() - started
        return batch

    def _stage(
        self, policy: Policy, job: Run, state: State, metrics: dict[str, float], seconds: Phases, probe: Canary,
        moments: dict[str, Tensor], snapshot: Snapshot,
    ) -> str:  # fmt: skip
        started = time.perf_counter()
        with Staging(Path(job.dir), seconds.progress) as staging:
            self._trained.stage(staging)
            staging.add_shards(OPTIMIZER_FILE, moments)
            staging.json(folder.STATE, state)
            staging.weights(self.spec.rollout_weights_mode, snapshot.entries, self._trained.held_entries())
            sha = staging.finish(
                run=self.config.run, step=job.step, epoch=job.epoch, lineage=job.lineage,
                parent=job.parent.sha if job.parent else "", batch=job.batch_sha, base_digest=self.config.base_digest,
                spec_digest=digest(to_json(self.spec)), instance=job.instance, job=job.job, fence=job.fence,
                canary=probe, parameters=self._trained.kind, metrics=_finite(metrics), environment=self._environment(),
                loss=self.config.loss or msgspec.UNSET, family=self.config.family or msgspec.UNSET,
                learning=job.learning or msgspec.UNSET,
            )  # fmt: skip
        seconds["stage"] = time.perf_counter() - started
        self._staged = sha, snapshot
        return sha

    def _environment(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            "versions": self._versions,
        } | ({"gpu": torch.cuda.get_device_name()} if self._cuda else {})


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return only the finite metrics: JSON has no words for the others."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _rewards(batch: Batch) -> dict[str, float]:
    members = batch.manifest.trajectories
    rewards = torch.tensor([member.reward for member in members], dtype=torch.float64)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "trajectories": float(len(members)),
        "logical_tokens": float(batch.manifest.logical_tokens),
        "physical_tokens": float(batch.manifest.physical_tokens),
    }
