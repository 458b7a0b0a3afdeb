"""How a push's weights travel from the trainer.

Purpose: `Way` is one (trainer spawn, engine spawn) pair by one transfer; `push.Pusher` runs it. `Gloo` is between CPUs, `Stock`
by the engine's own calls between GPUs, `direct.pair.DirectWay` gives the engine the memory to pull, `direct.wired.NcclWay` sends it
the same over NCCL. Owner of: what its pair has joined.
Invariants: a way never says that a push has succeeded; after `abort`, which any thread may call at any time, whatever waits in
it raises soon.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from artd_schema.worker import Push, Transfer
from artd_workers.deadline import Deadline
from artd_workers.transfer import gloo

from .snapshot import Snapshot

if TYPE_CHECKING:
    from .stock import Sender


class Unable(Exception):
    """This pair cannot do the push this way, and no engine was touched: what stands against it, and where."""


class Broken(Exception):
    """Nothing more is sent, and the engine cannot see that: it would wait until its deadline."""


class Way(Protocol):
    """Made with its pair's rendezvous. But for `abort`, one thread at a time calls it."""

    def prepare(self, snapshot: Snapshot) -> None:
        """What comes before the first push, and needs no engine; later calls do nothing. Raises Unable."""

    def send(self, message: Push, snapshot: Snapshot, deadline: Deadline) -> None:
        """Give the weights of `snapshot`, which is held meanwhile; returns when they may change. Raises at the deadline, when
        aborted, or when the engine is gone; Broken where the engine does not see that by itself."""

    def abort(self) -> None:
        """End what waits; nothing is sent any more."""

    def close(self) -> None:
        """Give back what the pair holds; nothing is called after it."""


class Gloo:
    """A group of two between CPUs; tensor by tensor, in the order of weights.json."""

    def __init__(self, rendezvous: str) -> None:
        self._rendezvous = rendezvous
        self._group: dist.ProcessGroupGloo | None = None
        self._aborted = False

    def prepare(self, snapshot: Snapshot) -> None:
        if snapshot.device != "cpu":
            raise Unable(f"the trainer's weights lie on {snapshot.device}, and gloo sends only from a CPU")

    def send(self, message: Push, snapshot: Snapshot, deadline: Deadline) -> None:
        if self._group is None:
            self._group = gloo.join(self._rendezvous, gloo.TRAINER, deadline.left)
        for entry, tensor in snapshot.tensors:
            if self._aborted or deadline.passed:
                raise TimeoutError(f"aborted or past its deadline before {entry.name}")
            gloo.broadcast(self._group, tensor, deadline.left)

    def abort(self) -> None:
        self._aborted = True
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """The group ends with its last reference."""


class Stock:
    """The engine's own transfer calls over NCCL; tensors that are not copies are made one by one on the trainer's GPU."""

    def __init__(self, rendezvous: str) -> None:
        self._rendezvous = Path(rendezvous)
        self._sender: Sender | None = None
        self._aborted = False

    def prepare(self, snapshot: Snapshot) -> None:
        if self._sender is not None:
            return
        if snapshot.device != "cuda" and not torch.cuda.is_available():
            raise Unable(
                f"the trainer's weights lie on {snapshot.device}, and there is no GPU that NCCL could send from"
            )
        from artd_workers.transfer.nccl import NcclError

        from .stock import Sender

        try:
            self._sender = Sender(self._rendezvous, torch.device("cuda", torch.cuda.current_device()))
        except NcclError as error:
            raise Unable(str(error)) from None

    def send(self, message: Push, snapshot: Snapshot, deadline: Deadline) -> None:
        sender = self._sender
        assert sender is not None, "prepare comes first"
        if self._aborted:
            raise Broken("aborted before it was sent")
        try:
            if not sender.joined:
                sender.join(deadline.left)
            sender.send(snapshot.entries, (tensor for _, tensor in snapshot.tensors), deadline.left)
        except Exception as error:
            if sender.joined or self._aborted:
                raise Broken(str(error)) from error
            raise Unable(f"the engine was not met over NCCL: {error}") from error

    def abort(self) -> None:
        self._aborted = True
        if self._sender is not None:
            self._sender.abort()

    def close(self) -> None:
        self.abort()


def open_way(transfer: Transfer, rendezvous: str) -> Way:
    """A new pair's way."""
    if transfer == "direct":
        from artd_workers.trainer.push.direct.pair import DirectWay

        return DirectWay(rendezvous)
    if transfer == "nccl":
        from artd_workers.trainer.push.direct.nccl_pair import NcclWay

        return NcclWay(rendezvous)
    return Stock(rendezvous) if transfer == "stock" else Gloo(rendezvous)
