"""What a trainer says that an engine must hold of an adapter, against arithmetic by hand; and a whole job of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from artd_schema.data.manifest import ADAPTER_FILE
from artd_schema.run.spec import EngineSpec, LoraSpec
from artd_workers.trainer.checkpoint import held
from artd_workers.transfer.checksum import sum_of, sums_of_stacked

from . import rig
from .jobs import TrainerDaemon, batches, manifest, spec_for, table_of

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("shape", [(4, 6), (3, 5), (1, 1), (7, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_of_many_are_those_of_each(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also of tensors that are no whole number of words: as if zeros followed."""
    tensors = torch.randn(5, *shape).to(dtype)
    flat = torch.nn.functional.pad(tensors.flatten(1), (0, -tensors[0].numel() % (8 // dtype.itemsize)))
    assert sums_of_stacked(tensors).tolist() == [sum_of(one) for one in flat]
    strided = torch.zeros(5, shape[0] + 2, shape[1] + 3, dtype=dtype)
    strided[:, : shape[0], : shape[1]] = tensors
    assert sums_of_stacked(strided[:, : shape[0], : shape[1]]).tolist() == sums_of_stacked(tensors).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [2.0, 0.7])
def test_it_is_cast_and_then_scaled_as_vllm_does(dtype: torch.dtype, scale: float) -> None:
    adapter = {f"x.{i}.lora_{kind}.weight": torch.randn(4, 8) for i in range(3) for kind in "AB"}
    rows = held.entries(adapter, scale, dtype)
    assert [row.name for row in rows] == sorted(adapter)
    for row in rows:
        tensor = adapter[row.name].to(dtype)
        if ".lora_B." in row.name:
            tensor *= scale  # vLLM's own line
        assert (row.dtype, row.shape, row.sum64) == (str(dtype)[6:], (4, 8), sum_of(tensor))


def test_many_are_summed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = {f"{i}.lora_B.weight": torch.randn(2, 4) for i in range(7)}
    whole = held.entries(adapter, 3.0, torch.float32)
    monkeypatch.setattr(held, "_TOGETHER", 20)
    assert held.entries(adapter, 3.0, torch.float32) == whole


def test_a_job_of_lora_mode_tells_what_an_engine_must_hold_and_score(
    toy_folders: dict[str, Path], tmp_path: Path
) -> None:
    """Step 0 changes nothing; step 1 does, and the base's scores stay as they are."""
    spec = spec_for(
        toy_folders["moe"], rollout_weights_mode="lora", engine=EngineSpec(dtype="bfloat16"), expert_replay=False,
        lora=LoraSpec(rank=rig.RANK, alpha=6),
    )  # fmt: skip
    daemon = TrainerDaemon(tmp_path / "d", spec)
    try:
        daemon.start()
        zero = daemon.commit(0, None, None)
        one = daemon.commit(1, zero, batches(daemon, 1)[0])
    finally:
        daemon.close()
    first, second = manifest(zero).canary, manifest(one).canary
    assert first.base == first.logprobs == second.base != second.logprobs
    assert 0 < second.rounding < second.mean_abs
    for ref in (zero, one):
        adapter, table = load_file(Path(ref.dir) / ADAPTER_FILE), table_of(ref)
        assert table.held == held.entries(adapter, 6 / rig.RANK, torch.bfloat16)
        assert [row.name for row in table.held] == [row.name for row in table.tensors] == sorted(adapter)
