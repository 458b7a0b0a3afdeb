"""How a run's checkpoints are listed and kept for pushes: as copies on the host, or as the weights lie on a GPU.

Purpose: `Serving` makes a checkpoint's weight table and its `Snapshot`; `serving_of` chooses. Owner of: no state. Invariants: the
table tells the bits that the one merge of `merge.py` gives from the base on disk, whoever made it; where the trainer's own base
weights are not those bits, they are not served.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from artd_schema.spec import RunSpec
from artd_schema.worker import Transfer

from ..engines.direct.device import Cuda, DeviceError, Port
from ..models.seeded import SeededWeights
from . import checkpoint, placement
from .direct.frozen import Frozen
from .direct.holdings import Holdings
from .direct.plan import PlanError
from .direct.served import Served
from .grouped import slots
from .lora import Lora
from .merge import BaseWeights, open_base
from .model import Policy
from .parameters import Trained
from .snapshot import Snapshot

log = logging.getLogger(__name__)


class Serving(Protocol):
    """How a trainer lists what the engine is served, and keeps it."""

    def before(self) -> None:
        """The next job is about to change the trained parameters: returns when nobody needs them as they are. Raises
        TimeoutError."""

    def stage(self) -> Snapshot:
        """Of the parameters as they are now. Raises TimeoutError."""


class OnHost:
    """Copies in this machine's memory, known by their sha256."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def before(self) -> None:
        """Snapshots are copies."""

    def stage(self) -> Snapshot:
        tensors = tuple((checkpoint.entry_of(name, tensor), tensor) for name, tensor in self._trained.served())
        return Snapshot(tuple(entry for entry, _ in tensors), tensors)


def port_of(spec: RunSpec) -> Port | None:
    """The GPU that a run's weights are served from; None where copies are."""
    if spec.rollout_weights_mode != "merged" or placement.device_of(spec) != "cuda":
        return None
    return Cuda(torch.cuda.current_device())


def transfers(spec: RunSpec, port: Port | None) -> tuple[Transfer, ...]:
    """What a trainer can send by, best first. No direct push out of expandable segments, whose memory cannot be shared, nor of
    base weights that are not the stored ones. Raises ValueError for a folder that is no base model."""
    cuda = placement.device_of(spec) == "cuda"
    if port is None:
        return ("stock",) if cuda else ("gloo",)
    try:
        port.share(torch.empty(1, device="cuda" if cuda else "cpu"))
    except DeviceError as error:
        log.warning("no direct push from this trainer: %s", error)
        return ("stock",)
    if spec.parameters == "lora" and (lost := rounded(open_base(spec.model), {getattr(torch, spec.trainer.dtype)})):
        log.warning("no direct push from this trainer: %s", lost)
        return ("stock",)
    return ("direct", "stock")


def serving_of(policy: Policy, trained: Trained, spec: RunSpec, port: Port | None) -> Serving:
    """port: as `port_of` gives it."""
    if port is None:
        return OnHost(trained)
    weights, codec = slots(policy.model), policy.plan.codec
    held = {weights[row.megatron].dtype for row in codec.rows}
    if trained.kind == "lora" and (lost := rounded(trained.base, held)):
        return _on_host(trained, lost)
    frozen = Frozen({}, device=policy.device)
    if isinstance(lora := trained.parameters, Lora):
        live = {name: parameter.detach() for name, parameter in lora.named()}
        frozen = Frozen(live, lora.outward, lora.scale, policy.device)
    dtype = getattr(torch, spec.engine.dtype)
    try:
        return Served(Holdings(port, codec, weights, frozen, dtype), tuple(trained.base))
    except PlanError as error:
        return _on_host(trained, str(error))


def _on_host(trained: Trained, why: str) -> Serving:
    log.warning("weights are served from copies, and no push is direct: %s", why)
    return OnHost(trained)


def rounded(base: Mapping[str, Tensor], held: set[torch.dtype]) -> str:
    """Why weights of these dtypes are not the stored ones; "" = they are, bit for bit."""
    stored = base.dtypes() if isinstance(base, BaseWeights | SeededWeights) else {next(iter(base.values())).dtype}
    lossy = [(a, b) for a in stored for b in held if b not in (a, torch.float32)]
    return "".join(f"the base model is stored in {a}, and trained beside in {b}" for a, b in lossy[:1])
