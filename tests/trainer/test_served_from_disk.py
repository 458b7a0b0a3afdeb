"""A push from disk loads what the trainer's own push sends: the engine's reader against a committed weight table, bit by bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from artd_schema.data.manifest import WeightTable
from artd_schema.run.spec import EngineSpec, OptimizerSpec, Parameters
from artd_schema.wire.worker import CheckpointRef
from artd_workers.engines.vllm.weights.disk import served_tensors

from .test_full import make_jobs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def step_one(folder: Path, toy: Path, parameters: Parameters) -> CheckpointRef:
    """A trained step of an engine that serves bf16."""
    spec = {"parameters": parameters, "optimizer": OptimizerSpec(lr=0.003), "engine": EngineSpec(dtype="bfloat16")}
    jobs = make_jobs(folder, toy, **spec)
    return jobs.do(1, jobs.do(0, None))


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


@pytest.mark.parametrize("parameters", ["lora", "full"])
@pytest.mark.parametrize("family", ["tied", "mixed"])
def test_the_bits_are_those_of_the_weight_table(
    toy_folders: dict[str, Path], tmp_path: Path, family: str, parameters: Parameters
) -> None:
    folder = Path(step_one(tmp_path, toy_folders[family], parameters).dir)
    table = msgspec.json.decode((folder / "weights.json").read_bytes(), type=WeightTable).tensors
    base, scale = (None, 1.0) if parameters == "full" else (str(toy_folders[family]), 2.0)
    found = list(served_tensors(base, folder, scale, "bfloat16", [entry.name for entry in table]))
    assert [name for name, _ in found] == [entry.name for entry in table]
    assert {tensor.dtype for _, tensor in found} == {torch.bfloat16}
    assert [sha(tensor) for _, tensor in found] == [entry.sha256 for entry in table]
    if family == "mixed":
        assert sum(".mlp.experts." in entry.name for entry in table) == 2 * 8 * 3


def test_a_weight_that_the_table_lacks_is_named(toy_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(step_one(tmp_path, toy_folders["mixed"], "full").dir)
    table = msgspec.json.decode((folder / "weights.json").read_bytes(), type=WeightTable).tensors
    with pytest.raises(ValueError, match=r"1 names, the first is model\.norm\.weight"):
        served_tensors(
            None, folder, 1.0, "bfloat16", [entry.name for entry in table if entry.name != "model.norm.weight"]
        )
