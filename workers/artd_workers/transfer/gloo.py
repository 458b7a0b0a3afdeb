"""The process group of a live push between CPUs: trainer rank 0, engine rank 1, and their only collective, a
broadcast.

Trainer and engine both import this, so it defines rendezvous, prefix and wire form once, and needs only torch. Wire
form of a tensor: its bytes, contiguous and in native order, as one flat uint8 broadcast from rank 0. Order, dtype and
shape come from the committed `weights.json`; nothing else is exchanged.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PREFIX = "artd"
TRAINER, ENGINE = 0, 1


def join(rendezvous: str, rank: int, timeout_s: float) -> dist.ProcessGroupGloo:
    """Meet the other side in the FileStore file `rendezvous`. Raises RuntimeError (torch) after timeout_s.

    Traffic stays on loopback only when the environment has GLOO_SOCKET_IFNAME=lo.
    """
    timeout = timedelta(seconds=timeout_s)
    store = dist.FileStore(rendezvous, 2)
    store.set_timeout(timeout)
    return dist.ProcessGroupGloo(dist.PrefixStore(PREFIX, store), rank, 2, timeout)


def broadcast(group: dist.ProcessGroupGloo, tensor: Tensor, timeout_s: float) -> None:
    """Send (rank 0) or fill (rank 1) a contiguous CPU tensor. Raises RuntimeError at the timeout or when the peer is gone."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = TRAINER, 0
    options.timeout = timedelta(seconds=timeout_s)
    group.broadcast([tensor.detach().view(-1).view(torch.uint8)], options).wait()
