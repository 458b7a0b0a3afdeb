"""Builds the JSON of vLLM's own NCCL transfer calls, in the form of vLLM 0.25, and gives vLLM the communicator's id.

Owns a key-value store while one call runs. It listens only on 127.0.0.1. vLLM 0.25 reads the communicator's id from
torch's key-value store over TCP, and unpickles it. This module builds the pickled bytes by hand, and artd itself
unpickles nothing. During the first call of a pair (about a second) another user of this machine who finds the port
could replace these bytes (SECURITY.md).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from artd_schema.data.manifest import WeightEntry
from artd_workers.transfer.nccl.stock import CHUNK_BYTES, ENGINE, WORLD

LOOPBACK = "127.0.0.1"
_KEY = "broadcast_from/0/0"
_PICKLED = (
    b"\x80\x03c_ctypes\n_unpickle\ncvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n}C\x80",
    b"\x86\x86R.",
)
"""The `ncclUniqueId` of vLLM's wrapper as pickle writes a ctypes structure: before and after its 128 bytes."""


def init_body(meeting: dict[str, Any]) -> dict[str, Any]:
    """Return the body of /init_weight_transfer_engine. `meeting` is from `meet`."""
    return {"init_info": meeting | {"rank_offset": ENGINE, "world_size": WORLD}}


def update_body(table: Sequence[WeightEntry]) -> dict[str, Any]:
    """Return the body of /update_weights.

    One buffer for packing: with more, vLLM before 0.33 may load a layer on another CUDA stream than the one on which a
    part of its tensors arrived. One buffer costs no time, because the trainer packs the next chunk meanwhile.
    """
    return {
        "update_info": {
            "names": [entry.name for entry in table],
            "dtype_names": [entry.dtype for entry in table],
            "shapes": [list(entry.shape) for entry in table],
            "packed": True,
            "packed_buffer_size_bytes": CHUNK_BYTES,
            "packed_num_buffers": 1,
        }
    }


@contextmanager
def meet(unique_id: bytes, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Offer the communicator's id for the time of the block. Yields its address for `init_body`; the engine can join
    inside the block."""
    store, port = _open_store(timeout_s)
    try:
        store.set(_KEY, unique_id.join(_PICKLED))
        yield {"master_address": LOOPBACK, "master_port": port}
    finally:
        del store  # closes the port


def _open_store(timeout_s: float) -> tuple[Any, int]:
    """Return torch's store and its port. The store gets a socket on loopback, because one that it opens itself would
    listen on every interface."""
    from torch.distributed import TCPStore  # the harness needs torch for nothing else

    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK, port, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        master_listen_fd=listener.detach(), use_libuv=False,
    )  # fmt: skip
    return store, port
