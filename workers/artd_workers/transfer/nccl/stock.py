"""What trainer and engine agree on for a push over the engine's own NCCL transfer calls.

It defines rendezvous and wire form once for both sides, as `gloo.py` does for the CPU. The trainer leaves the
communicator's id (128 bytes) in the file `rendezvous`, below the engine's folder, which only this user can enter.
Wire form: the tensors of weights.json in its order, one after the other without a gap, cut into chunks; each chunk is
one broadcast of bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from artd_schema.data.manifest import WeightEntry
from artd_workers.transfer.atomic_file import write_whole

CHUNK_BYTES = 256 << 20
"""A chunk ends with the first tensor that makes it larger than this. This is the engine's rule, with the size that it is
given.
"""
ID_BYTES = 128
TRAINER, ENGINE, WORLD = 0, 1, 2
"""The ranks, and their number: the engine is one process."""
ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
"""Environment of both processes; ranks that differ in such settings hang. Without the first setting NCCL's rendezvous
listens on any interface. Multicast over NVLink needs rights that a container may lack, and a broadcast between two
ranks gains nothing from it.
"""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_POLL_S = 0.002


def size_of(entry: WeightEntry) -> int:
    """Return the bytes of a tensor."""
    return math.prod(entry.shape) * ITEM_BYTES[entry.dtype]


def chunks(table: Sequence[WeightEntry], limit: int = CHUNK_BYTES) -> list[list[WeightEntry]]:
    """Cut the table as the engine does. Every chunk has at least one row; a tensor of more than `limit` bytes ends its
    chunk.
    """
    cut: list[list[WeightEntry]] = []
    room = -1
    for entry in table:
        if room < 0:
            cut.append([])
            room = limit
        cut[-1].append(entry)
        room -= size_of(entry)
    return cut


def leave_id(rendezvous: Path, unique_id: bytes) -> None:
    """Publish the communicator's id for the engine. The trainer calls it."""
    write_whole(rendezvous, unique_id)


def await_id(rendezvous: Path, timeout_s: float) -> bytes:
    """Return the id that the trainer left. Raises TimeoutError when there is none in time, and ValueError when the
    file holds something else. The engine calls it.
    """
    end = time.monotonic() + timeout_s
    while not rendezvous.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"the trainer left no communicator's id in {rendezvous} within {timeout_s:.1f} s")
        time.sleep(_POLL_S)
    found = rendezvous.read_bytes()
    if len(found) != ID_BYTES:
        raise ValueError(f"{rendezvous} has {len(found)} bytes, a communicator's id has {ID_BYTES}")
    return found
