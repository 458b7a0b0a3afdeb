"""vLLM's own NCCL transfer calls, 0.22 to 0.33: the JSON of each version, and the meeting with the trainer.

Purpose: what differs between versions is a row of a table; the adapter calls the same four routes for all.
Owner of: for the time of one call, a key-value store on loopback. Invariants: nothing listens beyond 127.0.0.1.
vLLM 0.30 and later take the communicator's id from the call. Earlier ones want torch's key-value store over TCP and unpickle
the id from there: those bytes are built here, by hand, and nothing is ever unpickled. While the first call of a pair runs (a
second or so), another user of this machine who finds the port could put other bytes in their place (SECURITY.md).
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from artd_schema.manifest import WeightEntry
from artd_workers.engines.adapter import EngineError
from artd_workers.transfer.stock import CHUNK_BYTES, ENGINE, WORLD

LOOPBACK = "127.0.0.1"
_KEY = "broadcast_from/0/0"
_PICKLED = (
    b"\x80\x03c_ctypes\n_unpickle\ncvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n}C\x80",
    b"\x86\x86R.",
)
"""The `ncclUniqueId` of vLLM's wrapper as pickle writes a ctypes structure: before and after its 128 bytes."""


@dataclass(frozen=True)
class Dialect:
    """What versions from `first` on expect. start_body: /start_weight_update must carry JSON. packed: the call that tells how
    tensors are packed. by_id: /init_weight_transfer_engine takes the communicator's id itself. evidence: `run` = seen
    running, `read` = read in its source only."""

    first: tuple[int, int]
    evidence: Literal["run", "read"]
    start_body: bool
    packed: Literal["init", "update"]
    by_id: bool


DIALECTS: tuple[Dialect, ...] = (
    Dialect((0, 22), "read", start_body=True, packed="update", by_id=False),
    Dialect((0, 25), "run", start_body=False, packed="update", by_id=False),
    Dialect((0, 26), "read", start_body=False, packed="update", by_id=False),
    Dialect((0, 28), "read", start_body=False, packed="init", by_id=False),
    Dialect((0, 30), "read", start_body=False, packed="init", by_id=True),
)
LAST = (0, 33)
"""The newest version whose source was read."""


def dialect(version: str) -> Dialect:
    """The row for a version such as `0.25.1+cu130`. Raises EngineError for one that was not read."""
    major, minor = version.split(".")[:2]
    series = (int(major), int(minor))
    fitting = [row for row in DIALECTS if row.first <= series]
    if not fitting or series > LAST:
        known = ".".join(map(str, DIALECTS[0].first)), ".".join(map(str, LAST))
        raise EngineError(f"the transfer calls of vLLM {version} are not known, those of {known[0]} to {known[1]} are")
    return fitting[-1]


def init_body(row: Dialect, meeting: dict[str, Any]) -> dict[str, Any]:
    """Of /init_weight_transfer_engine. meeting: of `meet`."""
    ranks = {"rank_offset": ENGINE, "world_size": WORLD}
    return {"init_info": meeting | ranks | (_PACKING if row.packed == "init" else {})}


def start_body(row: Dialect) -> dict[str, Any] | None:
    """Of /start_weight_update: names and layouts are those of the checkpoint. None: no body."""
    return {"is_checkpoint_format": True} if row.start_body else None


def update_body(row: Dialect, table: Sequence[WeightEntry]) -> dict[str, Any]:
    """Of /update_weights."""
    info = {
        "names": [entry.name for entry in table],
        "dtype_names": [entry.dtype for entry in table],
        "shapes": [list(entry.shape) for entry in table],
    }
    return {"update_info": info | (_PACKING if row.packed == "update" else {})}


_PACKING = {"packed": True, "packed_buffer_size_bytes": CHUNK_BYTES, "packed_num_buffers": 1}
"""One buffer: with more, vLLM before 0.33 loads a layer whose tensors came in two chunks on another stream than they came on.
It costs nothing, for the trainer packs the next chunk meanwhile."""


@contextmanager
def meet(row: Dialect, unique_id: bytes, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Within it the engine can be told to join: yields the part of `init_body` that says where."""
    if row.by_id:
        yield {"nccl_unique_id_b64": base64.b64encode(unique_id).decode()}
        return
    store, port = _store(timeout_s)
    try:
        store.set(_KEY, unique_id.join(_PICKLED))
        yield {"master_address": LOOPBACK, "master_port": port}
    finally:
        del store  # closes the port


def _store(timeout_s: float) -> tuple[Any, int]:
    """(torch's store, its port). It listens on loopback alone because it is given the socket: its own would be open to all."""
    from torch.distributed import TCPStore  # the harness needs torch for nothing else

    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK, port, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        master_listen_fd=listener.detach(), use_libuv=False,
    )  # fmt: skip
    return store, port
