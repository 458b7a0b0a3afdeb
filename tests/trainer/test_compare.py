"""Two checkpoint folders compared: what differs is found to the bit, and what is near enough is told from what is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save

from artd_schema.codec import digest, to_json
from artd_schema.data.manifest import FileEntry, WeightTable
from artd_schema.wire.replay_job import EnvironmentRow, ReplayRow
from artd_workers.trainer.tools import compare

from .past_rig import Past, make_dense

pytestmark = pytest.mark.torch
ADAPTER, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"
Forge = Callable[..., list[ReplayRow]]


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory, toy_folders: dict[str, Path]) -> Past:
    return make_dense(tmp_path_factory.mktemp("past"), toy_folders["llama"])


@pytest.fixture
def forge(past: Past, tmp_path: Path) -> Forge:
    """Compare step 2 with a copy of it in which files were written anew (and hashed again) or fields of the manifest
    changed: the rows that differ."""

    def call(files: dict[str, bytes] | None = None, **fields: Any) -> list[ReplayRow]:
        ours, theirs = Path(past.refs[2].dir), tmp_path / "forged"
        shutil.rmtree(theirs, ignore_errors=True)
        shutil.copytree(ours, theirs)
        manifest = compare.read_manifest(ours)
        entries = {entry.name: entry for entry in manifest.files}
        for name, content in (files or {}).items():
            (theirs / name).write_bytes(content)
            entries[name] = FileEntry(name, len(content), digest(content))
        changed = msgspec.structs.replace(manifest, files=tuple(entries.values()), **fields)
        (theirs / "manifest.json").write_bytes(to_json(changed))
        return [row for row in compare.compare(ours, theirs) if row.equal is False]

    return call


def test_one_bit_of_one_tensor_is_found(past: Past, forge: Forge) -> None:
    tensors = load_file(Path(past.refs[2].dir) / ADAPTER)
    name = sorted(tensors)[5]
    tensors[name].view(-1).view(torch.int32)[3] ^= 1
    [row, file] = forge({ADAPTER: save(tensors)})
    assert (row.part, row.name, row.close, file.part, file.name) == (ADAPTER, name, True, "files", ADAPTER)
    assert row.difference is not None and 0 < row.difference < 1e-6 and row.committed != row.replayed
    assert file.difference == row.difference


@pytest.mark.parametrize(("noise", "close"), [(1e-3, True), (0.05, False)])
def test_tensors_have_a_tolerance(noise: float, close: bool, past: Past, forge: Forge) -> None:
    tensors = load_file(Path(past.refs[2].dir) / OPTIMIZER)
    name = next(name for name in sorted(tensors) if name.endswith(".exp_avg"))
    tensors[name] *= 1 + noise
    rows = forge({OPTIMIZER: save(tensors)})
    assert [(row.name, row.close) for row in rows] == [(name, close), (OPTIMIZER, close)]
    assert rows[0].difference == pytest.approx(noise, rel=0.1)


def test_what_cannot_be_subtracted_is_never_close(past: Past, forge: Forge) -> None:
    tensors = load_file(Path(past.refs[2].dir) / OPTIMIZER)
    first, second, third = (
        name for name in sorted(tensors) if name.endswith(".exp_avg") and "layers.0.mlp" in name and "lora_A" in name
    )
    tensors["step"] += 1
    tensors[first] = tensors[first].double()
    tensors[second][0, 0] = float("nan")
    tensors["new"] = tensors.pop(third)
    rows = {row.name: row for row in forge({OPTIMIZER: save(tensors)})}
    assert rows.keys() == {"step", first, second, third, "new", OPTIMIZER}
    assert not any(row.close for row in rows.values()) and all(row.difference is None for row in rows.values())
    assert rows[third].replayed is None and rows["new"].committed is None


def test_numbers_have_a_tolerance(past: Past, forge: Forge) -> None:
    manifest = compare.read_manifest(Path(past.refs[2].dir))
    metrics = manifest.metrics | {
        "loss": manifest.metrics["loss"] + 5e-5,
        "grad_norm": manifest.metrics["grad_norm"] * 1.01,
    }
    metrics |= {"tokens_per_s": 1.0, "new": 1.0}
    logprobs = manifest.canary.logprobs
    near, far = (((logprobs[0][0] + d, *logprobs[0][1:]), *logprobs[1:]) for d in (1e-4, 0.1))
    rows = {
        row.name: row for row in forge(metrics=metrics, canary=msgspec.structs.replace(manifest.canary, logprobs=near))
    }
    wanted = {"loss": True, "grad_norm": False, "new": False, "logprobs": True}
    assert {name: row.close for name, row in rows.items()} == wanted
    assert rows["loss"].difference == pytest.approx(5e-5, rel=1e-3)
    assert rows["logprobs"].difference == pytest.approx(1e-4, rel=1e-3)
    [row] = forge(canary=msgspec.structs.replace(manifest.canary, logprobs=far))
    assert (row.name, row.close) == ("logprobs", False)


def test_served_tensors_may_differ_only_with_the_stored_ones(past: Past, forge: Forge) -> None:
    ours = Path(past.refs[2].dir)
    table = msgspec.json.decode((ours / "weights.json").read_bytes())
    table["tensors"][2]["sha256"] = "0" * 64
    rows = forge({"weights.json": to_json(table)})
    found = [(row.part, row.name, row.close) for row in rows]
    assert found == [("weights.json", table["tensors"][2]["name"], False), ("files", "weights.json", False)]
    tensors = load_file(ours / ADAPTER)
    tensors[min(tensors)].view(-1)[0] += 1e-6
    rows = forge({"weights.json": to_json(table), ADAPTER: save(tensors)})
    assert len(rows) == 4 and all(row.close for row in rows)


def test_served_tensors_by_their_checksums(past: Past, tmp_path: Path) -> None:
    """As a GPU lists them; beside a sha256 nothing can be said."""
    table = msgspec.json.decode((Path(past.refs[2].dir) / "weights.json").read_bytes(), type=WeightTable)
    summed = [msgspec.structs.replace(one, sha256="", sum64=i - 3) for i, one in enumerate(table.tensors)]
    other = [msgspec.structs.replace(summed[0], sum64=7), *summed[1:]]

    def rows(*tables: Any) -> list[tuple[Any, ...]]:
        for number, tensors in enumerate(tables):
            (tmp_path / str(number)).mkdir(exist_ok=True)
            (tmp_path / str(number) / "weights.json").write_bytes(to_json(WeightTable(mode="merged", tensors=tensors)))
        found = compare._weights(tmp_path / "0" / "weights.json", tmp_path / "1" / "weights.json", False)
        return [(row.equal, row.close) for row in found][2:]

    assert set(rows(tuple(summed), tuple(summed))) == {(True, True)}
    assert rows(tuple(summed), tuple(other))[:2] == [(False, False), (True, True)]
    assert set(rows(table.tensors, tuple(summed))) == {(None, True)}


def test_a_file_of_one_side_only(forge: Forge) -> None:
    [row] = forge({"more.json": b"{}"})
    assert (row.part, row.name, row.committed, row.close) == ("files", "more.json", None, False)


def test_other_environments_are_told() -> None:
    ours = {"threads": 1, "cpu": "AVX512", "versions": {"torch": "2.9", "numpy": "2"}}
    theirs = {"threads": 1, "cpu": "AVX2", "versions": {"torch": "2.10", "numpy": "2"}, "device": "cuda"}
    assert compare.environment(ours, theirs) == (
        EnvironmentRow(name="cpu", committed="AVX512", replayed="AVX2"),
        EnvironmentRow(name="device", committed="", replayed="cuda"),
        EnvironmentRow(name="versions.torch", committed="2.9", replayed="2.10"),
    )
    assert compare.environment(ours, ours) == ()
