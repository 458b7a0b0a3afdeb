"""What the real vLLM holds of an adapter, and what of it is refused: fp32 and bf16, on a toy Qwen3-MoE with one dense layer.

The engine is given files whose every hash would be right, and which are not the checkpoint's: what lies in vLLM's slots and what
they compute is compared. One server start for each dtype; tests share it and run in order.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from artd_schema.data.manifest import ADAPTER_CONFIG_FILE, ADAPTER_FILE, WEIGHTS_FILE, Canary, WeightEntry, WeightTable
from artd_schema.wire import worker as w
from artd_workers.deadline import Deadline
from artd_workers.engines import canary
from artd_workers.engines.adapter import EngineError
from artd_workers.engines.vllm.adapter import VllmAdapter
from tests.engine.real import HERE, Engine, start, tool

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
CALL_S = 60.0
Change = Callable[[str, npt.NDArray[np.float32]], npt.NDArray[np.float32] | None]
"""(name, tensor of an adapter's file) -> the tensor of a wrong one, or None to leave it out."""


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, moe_toys: Path) -> Iterator[Engine]:
    """Checkpoints l1, l2 and l3, which has adapters on experts alone."""
    kind, folder = ":bf16" if request.param == "bfloat16" else "", moe_toys / request.param
    shutil.copytree(moe_toys / "toy", folder / "toy")
    wanted = [f"{folder}/l{step}:{'experts' if step == 3 else 'lora'}:{step + 1}:{step}{kind}" for step in (1, 2, 3)]
    tool(str(HERE / "make_checkpoint.py"), str(folder / "toy"), *wanted)
    yield from start(folder, "lora", dtype=request.param)


@pytest.mark.parametrize("checkpoint", ["l1", "l2", "l3"])
def test_the_right_adapter_is_served(engine: Engine, checkpoint: str) -> None:
    """Its sums were compared with the file's, computed in another process and by other code than vLLM's."""
    engine.daemon.send(engine.push(checkpoint))
    answer = engine.daemon.expect((w.Live, w.PushFailed), 120.0)
    assert isinstance(answer, w.Live), answer
    told = engine.manifest(checkpoint).canary
    found = canary.verify_adapter(told, *scores(engine, f"toy@{checkpoint[1:]}", told))[1]
    assert found.significant and 0.8 < found.slope < 1.2 and found.correlation > 0.9, found


WRONG: dict[str, Change] = {
    "zero": lambda name, tensor: tensor * 0 if ".lora_B." in name else tensor,
    "a step old": lambda _, tensor: tensor - np.float32(1e-5) * np.sign(tensor),
    "without its experts": lambda name, tensor: None if ".experts." in name else tensor,
    "one expert's": lambda name, tensor: (
        tensor * np.float32(1.01) if ".2.mlp.experts.5.down_proj.lora_B" in name else tensor
    ),
    "gate and up the other way round": lambda name, tensor: tensor,
    "half its scale": lambda name, tensor: tensor,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_the_committed_adapter_is_refused_by_its_sums(engine: Engine, tmp_path: Path, wrong: str) -> None:
    adapter, folder = engine.adapter(), spoiled(engine.toys / "l2", tmp_path / "a", wrong)
    with loaded(adapter, folder), pytest.raises(EngineError) as refused:
        adapter.check_adapter(folder, held(engine, "l2"), Deadline(CALL_S))
    said = {"without its experts": "switched off"}.get(wrong, "in vLLM's slot are not those committed")
    assert said in str(refused.value)


def test_an_adapter_of_experts_alone_leaves_no_others_behind(engine: Engine) -> None:
    """Of the slot's numbers that are not in the table, none may be there."""
    adapter, folder = engine.adapter(), engine.toys / "l2"
    experts = [row for row in held(engine, "l2") if ".experts." in row.name]
    with loaded(adapter, folder), pytest.raises(EngineError, match="numbers that are not of the adapter"):
        adapter.check_adapter(folder, experts, Deadline(CALL_S))


def test_a_tensor_that_vllm_has_no_place_for_is_told(engine: Engine) -> None:
    """It takes such adapters with HTTP 200 where it was started for fewer modules."""
    adapter, folder = engine.adapter(), engine.toys / "l2"
    row = held(engine, "l2")[0]
    more = msgspec.structs.replace(row, name=row.name.replace("layers.0", "layers.9"))
    with loaded(adapter, folder), pytest.raises(EngineError, match="no place for 1 tensors of the adapter"):
        adapter.check_adapter(folder, [*held(engine, "l2"), more], Deadline(CALL_S))


def test_what_changes_nothing_is_seen_in_the_scores_too(engine: Engine, tmp_path: Path) -> None:
    """In bf16 the canary's own bounds (a mean of 0.15 nats here) may let a zero adapter pass; its change cannot."""
    adapter, folder = engine.adapter(), spoiled(engine.toys / "l2", tmp_path / "a", "zero")
    told = engine.manifest("l2").canary
    loose = msgspec.structs.replace(told, max_abs=99.0, mean_abs=99.0)
    with loaded(adapter, folder), pytest.raises(EngineError, match=r"changes the engine's scores by -?[0-9.e-]+ times"):
        canary.verify_adapter(loose, *scores(engine, "wrong", told))


def scores(engine: Engine, name: str, told: Canary) -> tuple[canary.Scores, canary.Scores]:
    """Of the base model and of the adapter."""
    base, step = (engine.adapter().score(model, told.prompts, Deadline(CALL_S)) for model in ("toy@base", name))
    return base, step


def held(engine: Engine, checkpoint: str) -> list[WeightEntry]:
    raw = (engine.toys / checkpoint / WEIGHTS_FILE).read_bytes()
    return list(msgspec.json.decode(raw, type=WeightTable).held)


@contextmanager
def loaded(adapter: VllmAdapter, folder: Path) -> Iterator[None]:
    """Within the block the engine serves this adapter as `wrong`."""
    adapter.load_adapter("wrong", folder, Deadline(CALL_S))
    yield
    adapter.unload_adapter("wrong", Deadline(CALL_S))


def spoiled(checkpoint: Path, out: Path, wrong: str) -> Path:
    """An adapter that is not the checkpoint's."""
    out.mkdir()
    config = json.loads((checkpoint / ADAPTER_CONFIG_FILE).read_text())
    config["lora_alpha"] //= 2 if wrong == "half its scale" else 1
    (out / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
    found = read(checkpoint / ADAPTER_FILE)
    if wrong.startswith("gate and up"):
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        swapped = {}
        for name, tensor in found.items():
            part = name.split(".")[-3]
            swapped[name.replace(part, other.get(part, part))] = tensor
        found = swapped
    changed = {name: WRONG[wrong](name, tensor) for name, tensor in found.items()}
    write(out / ADAPTER_FILE, {name: tensor for name, tensor in changed.items() if tensor is not None})
    return out


def read(file: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors of a safetensors file of fp32."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    return {
        name: np.frombuffer(raw[start + at[0] : start + at[1]], np.float32).reshape(told["shape"])
        for name, told in header.items()
        if name != "__metadata__" and (at := told["data_offsets"])
    }


def write(file: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        part = tensor.astype(np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
