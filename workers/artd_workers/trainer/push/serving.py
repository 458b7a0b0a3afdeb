"""How a run's checkpoints are listed and kept for pushes: as copies in the host's memory, or as the weights in a
GPU's memory.

`Serving` makes a checkpoint's weight table and its `Snapshot`; `serving_of` chooses one. Whoever makes the table, it
describes the bits that `transfer.merge` gives from the base model on disk. When the trainer's own base weights have
other bits, they are not served.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from artd_schema.run.spec import RunSpec
from artd_schema.wire.worker import Transfer
from artd_workers.models.codec import Codec
from artd_workers.trainer import placement
from artd_workers.trainer.checkpoint import folder
from artd_workers.trainer.model.experts.grouped import slots
from artd_workers.trainer.model.lora import Lora
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.parallel.ranks import Ranks
from artd_workers.trainer.parameters.trained import Trained
from artd_workers.trainer.push.direct.checksums import ServedWeights
from artd_workers.trainer.push.direct.layout import Shard, Sharding
from artd_workers.trainer.push.direct.member import Member
from artd_workers.trainer.push.direct.plan import PlanError, whole_tensors
from artd_workers.trainer.push.direct.team import Team
from artd_workers.trainer.push.direct.weight_lock import WeightLock
from artd_workers.trainer.push.direct.weight_source import WeightSource
from artd_workers.transfer.checksum import WORD
from artd_workers.transfer.contracts import DeviceError, Port
from artd_workers.transfer.coverage import CoverError
from artd_workers.transfer.device import Cuda
from artd_workers.transfer.merge import explain_rounding, open_base

from .rank_shards import own_shards
from .snapshot import Snapshot

log = logging.getLogger(__name__)


class Serving(Protocol):
    """How a trainer lists what the engine gets, and keeps it."""

    def await_readers(self) -> None:
        """Return when no push needs the trained parameters as they are now, because the next job is about to change
        them. Raises TimeoutError.
        """

    def stage(self) -> Snapshot:
        """Return a snapshot of the parameters as they are now; only rank 0's is usable. Raises TimeoutError.
        Collective: every rank calls it.
        """


class OnHost:
    """Copies in the host's memory, identified by their sha256."""

    def __init__(self, trained: Trained, ranks: Ranks) -> None:
        self._trained, self._ranks = trained, ranks

    def await_readers(self) -> None:
        """Do nothing: snapshots are copies."""

    def stage(self) -> Snapshot:
        if not self._ranks.first:
            return Snapshot((), ())
        tensors = tuple((folder.entry_of(name, tensor), tensor) for name, tensor in self._trained.served_tensors())
        return Snapshot(tuple(entry for entry, _ in tensors), tensors)


def port_of(spec: RunSpec) -> Port | None:
    """Return the GPU that serves a run's weights, or None when copies in the host's memory do."""
    if spec.rollout_weights_mode != "merged" or placement.device_of(spec) != "cuda":
        return None
    if spec.trainer.processes > 1 and spec.engine.transfer in ("nccl", "stock"):
        return None  # these ways send whole tensors, and each process has only parts
    return Cuda(torch.cuda.current_device())


def transfers(spec: RunSpec, port: Port | None) -> tuple[Transfer, ...]:
    """Return the ways by which a trainer can send, best first. Raises ValueError for a folder that is not a base
    model.

    There is no direct push from expandable segments, whose memory cannot be shared, nor of base weights that differ
    from the stored ones, nor of tensors that have no checksum.
    """
    cuda = placement.device_of(spec) == "cuda"
    if port is None:
        return ("stock",) if cuda else ("gloo",)
    ways: tuple[Transfer, ...] = ("direct", "nccl", "stock") if spec.trainer.processes == 1 else ("direct", "stock")
    try:
        port.share(torch.empty(1, device="cuda" if cuda else "cpu"))
    except DeviceError as error:
        log.warning("no direct push from this trainer by CUDA IPC: %s", error)
        ways = tuple(way for way in ways if way != "direct")
    base = open_base(spec.model)
    lost = explain_rounding(base, {getattr(torch, spec.trainer.dtype)}) if spec.parameters == "lora" else ""
    if lost := lost or explain_uneven(base.sizes(), getattr(torch, spec.engine.dtype)):
        log.warning("no direct push from this trainer: %s", lost)
        return ("stock",)
    return ways


def serving_of(policy: Policy, trained: Trained, spec: RunSpec, port: Port | None, ranks: Ranks) -> Serving:
    """Choose how this run serves weights. `port` is this rank's result of `port_of`. Collective: every rank calls it."""
    if port is None:
        return OnHost(trained, ranks)
    weights = slots(policy.model)
    codec, shards = own_shards(policy.plan, ranks.parallel)
    held = {weights[row.megatron].dtype for row in codec.rows}
    lost = explain_rounding(trained.base, held) if trained.kind == "lora" else ""
    if lost := ranks.first_nonempty(lost):
        return _on_host(trained, ranks, lost)
    weight_lock = WeightLock({}, device=policy.device)
    if isinstance(lora := trained.parameters, Lora):
        live = {name: parameter.detach() for name, parameter in lora.list_parameters()}
        weight_lock = WeightLock(live, partial(Lora.outward, lora), lora.scale, policy.device)
    sharding = None if ranks.alone else _find_sharding(codec, weights, shards, ranks)
    weight_source = WeightSource(
        port, codec, weights, weight_lock, getattr(torch, spec.engine.dtype), sharding=sharding
    )
    try:
        served = ServedWeights(weight_source, tuple(trained.base), ranks)
    except (PlanError, CoverError) as error:
        return _on_host(trained, ranks, str(error))
    served.team = team_of(weight_source, ranks)
    return served


def _find_sharding(codec: Codec, weights: Mapping[str, Tensor], shards: Mapping[str, Shard], ranks: Ranks) -> Sharding:
    """Return how the model is split over the ranks. Collective: every rank calls it."""
    own = whole_tensors(codec, {row.megatron: tuple(weights[row.megatron].shape) for row in codec.rows}, shards)
    told = (
        msgspec.msgpack.decode(one, type=dict[str, tuple[int, ...]])
        for one in ranks.all_gather(msgspec.msgpack.encode(own))
    )
    return Sharding(shards, {name: shape for shapes in told for name, shape in shapes.items()})


def team_of(weight_source: WeightSource, ranks: Ranks) -> Team | None:
    """Return the other ranks that give a part, on rank 0 when there are any. From now on they follow rank 0's orders,
    beside their jobs. Collective: every rank calls it.
    """
    if ranks.alone:
        return None
    giving = [rank for rank, one in enumerate(ranks.all_gather(b"1" if weight_source.weights else b"")) if one]
    if ranks.first:
        team = Team()
        team.lines = {rank: ranks.channel(rank, partial(team.take, rank)) for rank in giving if rank}
        return team if team.lines else None
    if ranks.rank in giving:
        member = Member(ranks.rank, weight_source)
        member.line = ranks.channel(0, member.take)
    return None


def _on_host(trained: Trained, ranks: Ranks, why: str) -> Serving:
    log.warning("weights are served from copies, and no push is direct: %s", why)
    return OnHost(trained, ranks)


def explain_uneven(sizes: Mapping[str, int], dtype: torch.dtype) -> str:
    """Return why tensors of these sizes have no 64-bit checksums in the served dtype, or "" when they have."""
    odd = [name for name, size in sizes.items() if size * dtype.itemsize % WORD]
    return "".join(
        f"{name} of the base model is not a whole number of {WORD}-byte words in {dtype}" for name in odd[:1]
    )
