"""The ways by which the weights of a push leave the trainer.

`Way` is one (trainer spawn, engine spawn) pair over one transfer; `pusher.Pusher` runs it. `Gloo` sends between CPUs.
`Stock` uses the engine's own calls between GPUs. `direct.pair.DirectWay` lets the engine pull from the trainer's
memory, and `direct.nccl_pair.NcclWay` sends the same over NCCL. A way owns the connection of its pair, and never says
that a push has succeeded. Any thread may call `abort` at any time; whatever waits in the way then raises soon.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from artd_schema.wire.worker import Push, Transfer
from artd_workers.deadline import Deadline
from artd_workers.transfer import gloo

from .snapshot import Snapshot

if TYPE_CHECKING:
    from .stock import Sender


class Unable(Exception):
    """The pair cannot do the push in this way, and no engine was touched: the reason, and where."""


class Broken(Exception):
    """Nothing more is sent, and the engine cannot see that: it would wait until its deadline."""


class Way(Protocol):
    """One pair's way, made from the pair's rendezvous. One thread at a time uses it; only `abort` may come from any
    thread.
    """

    def prepare(self, snapshot: Snapshot) -> None:
        """Do what comes before the first push and needs no engine; later calls do nothing. Raises Unable."""

    def send(self, message: Push, snapshot: Snapshot, deadline: Deadline) -> None:
        """Send the weights of `snapshot`, which the caller holds. Returns when the weights may change.

        Raises at the deadline, after an abort, or when the engine is gone; raises Broken when the engine cannot see
        the failure by itself.
        """

    def abort(self) -> None:
        """End whatever waits, and send nothing any more."""

    def close(self) -> None:
        """Give back what the pair holds. No call follows."""


class Gloo:
    """A gloo group of two CPU processes, which sends tensor by tensor in the order of weights.json."""

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
        """Do nothing: the group ends with its last reference."""


class Stock:
    """The engine's own transfer calls over NCCL. Tensors that are not copies are made one by one on the trainer's
    GPU.
    """

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
        from artd_workers.transfer.nccl.communicator import NcclError

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
    """Return the way of a new pair."""
    if transfer == "direct":
        from artd_workers.trainer.push.direct.pair import DirectWay

        return DirectWay(rendezvous)
    if transfer == "nccl":
        from artd_workers.trainer.push.direct.nccl_pair import NcclWay

        return NcclWay(rendezvous)
    return Stock(rendezvous) if transfer == "stock" else Gloo(rendezvous)
