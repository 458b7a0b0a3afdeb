"""vLLM's own transfer calls: the JSON of each version from 0.22 to 0.33, as its request handlers and dataclasses want it.

The bodies below were written by hand from the sources of the wheels (`nccl_engine.py`, `nccl_common.py`, the routers).
"""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from artd.runtimes import registry
from artd_schema.manifest import WeightEntry
from artd_workers.engines import checkpoint
from artd_workers.engines.adapter import EngineError
from artd_workers.engines.push import PushError
from artd_workers.engines.vllm.weights import stock_dialects
from artd_workers.transfer import stock as wire
from tests.engine.conftest import Bench
from tests.engine.real import TOOL_ENV

TABLE = [
    WeightEntry("model.embed_tokens.weight", "bfloat16", (64, 8), sum64=1),
    WeightEntry("model.norm.weight", "float32", (8,)),
]
TCP = {"master_address": "127.0.0.1", "master_port": 4711}
UID = {"nccl_unique_id_b64": "AQID"}
RANKS = {"rank_offset": 1, "world_size": 2}
PACKED = {"packed": True, "packed_buffer_size_bytes": 268435456, "packed_num_buffers": 1}
TENSORS = {
    "names": ["model.embed_tokens.weight", "model.norm.weight"],
    "dtype_names": ["bfloat16", "float32"],
    "shapes": [[64, 8], [8]],
}
CHECKPOINT = {"is_checkpoint_format": True}
ID = bytes(range(1, 129))
UPDATE = [
    "artd_begin",
    "/init_weight_transfer_engine",
    "artd_expect",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
]
OLDEST: tuple[Any, ...] = (CHECKPOINT, TCP | RANKS, TENSORS | PACKED)
NO_BODY: tuple[Any, ...] = (None, TCP | RANKS, TENSORS | PACKED)
PACKED_AT_INIT: tuple[Any, ...] = (None, TCP | RANKS | PACKED, TENSORS)
BY_ID: tuple[Any, ...] = (None, UID | RANKS | PACKED, TENSORS)
BODIES = {
    "0.22.1": OLDEST, "0.23.0": OLDEST, "0.24.0": OLDEST, "0.25.1": NO_BODY, "0.26.0": NO_BODY, "0.27.1": NO_BODY,
    "0.28.0": PACKED_AT_INIT, "0.29.0": PACKED_AT_INIT, "0.30.0": BY_ID, "0.31.0": BY_ID, "0.32.0+cpu": BY_ID, "0.33.0": BY_ID,
}  # fmt: skip


@pytest.mark.parametrize("version", BODIES)
def test_every_version_gets_its_own_json(version: str) -> None:
    row = stock_dialects.dialect(version)
    start, init, update = BODIES[version]
    assert stock_dialects.start_body(row) == start
    assert stock_dialects.init_body(row, UID if row.by_id else TCP) == {"init_info": init}
    assert stock_dialects.update_body(row, TABLE) == {"update_info": update}


@pytest.mark.parametrize("version", ["0.21.0", "0.34.0", "1.0.0"])
def test_a_version_that_nobody_read_is_refused(version: str) -> None:
    with pytest.raises(EngineError, match=r"0\.22 to 0\.33"):
        stock_dialects.dialect(version)


def test_what_was_seen_running_is_what_runs_on_the_gpu() -> None:
    assert {row.first for row in stock_dialects.DIALECTS if row.evidence == "run"} == {(0, 25)}


def test_a_push_by_vllms_own_calls(bench: Bench) -> None:
    """Joined once for a pair; the fence opens before and closes behind, and the hashes go ahead of the calls."""
    pair = bench.root / "pair"
    wire.leave_id(pair, ID)
    with bench.serve() as pusher:
        for step in range(2):
            pusher.run(bench.push(step, source="live", rendezvous=str(pair), transfer="stock"))
    calls = [call for call in bench.calls() if call["route"] in UPDATE]
    assert [call["route"] for call in calls] == [*UPDATE, *(route for route in UPDATE if not route.startswith("/init"))]
    table = checkpoint.read(bench.push(1).checkpoint).weights.tensors
    bodies = [call["body"] for call in calls[-5:]]
    row = stock_dialects.dialect("0.32.0")
    assert calls[1]["body"] == stock_dialects.init_body(row, {"nccl_unique_id_b64": base64.b64encode(ID).decode()})
    assert bodies[1]["kwargs"]["table"] == [[e.name, e.dtype, list(e.shape), e.sha256] for e in table]
    assert (bodies[2], bodies[3]) == (
        {},
        stock_dialects.update_body(row, table),
    )  # the fake reads no body as an empty one


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
