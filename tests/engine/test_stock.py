"""vLLM's own transfer calls, as vLLM 0.25 takes them.

The bodies below were written by hand from the sources of its wheel (`nccl_engine.py`, the routers).
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from artd.runtimes import registry
from artd_workers.engines import checkpoint
from artd_workers.engines.push import PushError
from artd_workers.transfer.nccl import stock as wire
from tests.engine.conftest import Bench
from tests.engine.real import TOOL_ENV

PACKED = {"packed": True, "packed_buffer_size_bytes": 268435456, "packed_num_buffers": 1}
ID = bytes(range(1, 129))
UPDATE = [
    "artd_begin",
    "/init_weight_transfer_engine",
    "artd_expect",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
]


class Store:
    """torch's key-value store, which this interpreter has not: it keeps what it is told, and listens where it is given the socket."""

    held: dict[str, bytes]
    made: list[Store]

    def __init__(self, host: str, port: int, _size: None, *, master_listen_fd: int, **_: Any) -> None:
        self.where, self.held = (host, port), {}
        os.close(master_listen_fd)
        self.made.append(self)

    def set(self, key: str, value: bytes) -> None:
        self.held[key] = value


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    Store.made = []
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.distributed", types.SimpleNamespace(TCPStore=Store))
    return Store.made


def test_a_push_by_vllms_own_calls(bench: Bench, stores: list[Store]) -> None:
    """Joined once for a pair; the fence opens before and closes behind, and the hashes go ahead of the calls."""
    pair = bench.root / "pair"
    wire.leave_id(pair, ID)
    with bench.serve() as pusher:
        for step in range(2):
            pusher.run(bench.push(step, source="live", rendezvous=str(pair), transfer="stock"))
    calls = [call for call in bench.calls() if call["route"] in UPDATE]
    assert [call["route"] for call in calls] == [*UPDATE, *(route for route in UPDATE if not route.startswith("/init"))]
    (store,) = stores
    assert ID in store.held["broadcast_from/0/0"] and store.where[0] == "127.0.0.1"
    assert calls[1]["body"] == {
        "init_info": {"master_address": "127.0.0.1", "master_port": store.where[1], "rank_offset": 1, "world_size": 2}
    }
    table = checkpoint.read(bench.push(1).checkpoint).weights.tensors
    expect, start, update = (call["body"] for call in calls[-4:-1])
    assert expect["kwargs"]["table"] == [[e.name, e.dtype, list(e.shape), e.sha256] for e in table]
    assert start == {}  # the fake reads no body as an empty one
    assert update["update_info"] == PACKED | {
        "names": [e.name for e in table], "dtype_names": [e.dtype for e in table], "shapes": [list(e.shape) for e in table],
    }  # fmt: skip


@pytest.mark.parametrize("left", [b"", b"short"])
def test_a_trainer_that_leaves_no_id_fails_the_push(bench: Bench, left: bytes) -> None:
    pair = bench.root / "pair"
    if left:
        wire.leave_id(pair, left)
    with bench.serve() as pusher, pytest.raises(PushError, match=str(pair)) as error:
        pusher.run(bench.push(0, source="live", rendezvous=str(pair), transfer="stock", deadline_s=0.3))
    assert error.value.phase == "transfer" and "/init_weight_transfer_engine" not in bench.routes()


@pytest.mark.slow
@pytest.mark.real
def test_vllms_own_side_agrees() -> None:
    """Id, JSON and chunks against the code of the vLLM that is installed; half a minute, nearly all of it imports."""
    python = str(registry.find("vllm").python)
    script = str(Path(__file__).with_name("stock_peer.py"))
    done = subprocess.run(
        [python, script], env=os.environ | TOOL_ENV, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["agreed", "3"]
