"""A committed job done again: bit-equal in a fresh process, and what is said when anything is not what was committed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from artd_schema.data.manifest import ReplayManifest
from artd_schema.data.trajectory import RouteShape
from artd_schema.wire import worker as w
from artd_schema.wire.replay_job import ReplayReport, ReplayRow
from artd_workers.trainer.tools import compare, replay_job

from . import rig, routes_rig
from .past_rig import SHAPE, Past, make_dense, make_sparse

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
ADAPTER, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"


@pytest.fixture(scope="module", autouse=True)
def _deterministic() -> Iterator[None]:
    """A trainer makes torch deterministic for good."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory, toy_folders: dict[str, Path]) -> Past:
    return make_dense(tmp_path_factory.mktemp("past"), toy_folders["llama"])


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Past:
    return make_sparse(tmp_path_factory.mktemp("sparse"))


@pytest.fixture
def replay(past: Past, tmp_path: Path) -> Callable[..., ReplayReport]:
    """Replay step 2 (or another) in this process, the request changed as told. Nothing that was committed is written to."""

    def call(step: int = 2, **changes: Any) -> ReplayReport:
        before = {path: path.stat().st_mtime_ns for path in past.root.rglob("*")}
        request = msgspec.structs.replace(past.request(step, tmp_path), **changes)
        report = replay_job.answer(msgspec.json.encode(request))
        assert {path: path.stat().st_mtime_ns for path in past.root.rglob("*")} == before
        return report

    return call


def different(report: ReplayReport) -> list[ReplayRow]:
    assert report.error == ""
    return [row for row in report.rows if row.equal is False]


def parts(rows: list[ReplayRow]) -> set[str]:
    return {row.part for row in rows}


# ---- equal ----------------------------------------------------------------------------------------------------------


def test_a_fresh_process_repeats_every_bit(sparse: Past, tmp_path: Path) -> None:
    roots = [str(Path(__file__).parents[2] / name) for name in ("schema", "workers")]
    done = subprocess.run(
        [sys.executable, "-m", "artd_workers.trainer.tools.replay_job"], input=msgspec.json.encode(sparse.request(2, tmp_path)),
        capture_output=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(roots)}, cwd="/", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"\n") == 1
    report = msgspec.json.decode(done.stdout, type=ReplayReport)
    repeated(report, Path(sparse.refs[2].dir), tmp_path / "replayed")
    assert {row.name for row in report.rows if row.part == "replay"} == {"routes", "covered"}
    assert "model.layers.1.mlp.gate.weight" in {row.name for row in report.rows if row.part == "model.safetensors"}


def test_a_step_of_lora_is_repeated(past: Past, tmp_path: Path, replay: Callable[..., ReplayReport]) -> None:
    """On a machine of more cores, with the threads that it was trained with; by another instance, after a restore."""
    order = msgspec.structs.replace(past.request(2, tmp_path).run, instance="restored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        report = replay(2, run=order)
    assert torch.get_num_threads() == 1
    repeated(report, Path(past.refs[2].dir), tmp_path / "replayed")


def repeated(report: ReplayReport, committed: Path, replayed: Path) -> None:
    """The two folders have the same bytes, and every tensor, metric, field and file has its row, which says so."""
    assert different(report) == [] and report.environment == () and report.threads == 1
    manifest = compare.read_manifest(committed)
    names = {entry.name for entry in manifest.files}
    assert {path.name for path in replayed.iterdir()} == names | {"manifest.json"}
    assert all((committed / name).read_bytes() == (replayed / name).read_bytes() for name in names)
    found: dict[str, set[str]] = {}
    for row in report.rows:
        found.setdefault(row.part, set()).add(row.name)
    assert found["files"] == names
    for name in names:
        if name.endswith(".safetensors"):
            assert found[name] == set(load_file(committed / name))
    assert {"loss", "grad_norm", "entropy", "reward_mean"} <= found["metrics"] == set(manifest.metrics)
    assert found["batch"] == set(rig.DTYPES) and found["state.json"] == {"step", "rng", "batches", "trained_tokens"}
    assert found["canary"] == {"prompts", "logprobs", "base", "max_abs", "mean_abs", "rounding"}
    assert {"parent", "batch", "spec_digest", "fence", "epoch", "parameters"} <= found["manifest"]
    assert "model.layers.0.self_attn.q_proj.weight" in found["weights.json"]
    assert [row.name for row in report.rows if row.equal is None] == ["tokens_per_s"]


def test_other_routes_are_another_step(sparse: Past, tmp_path: Path) -> None:
    """The bundle is used: with another one the loss is another one too."""
    columns = load_file(sparse.orders[2].batch)
    other = routes_rig.write(tmp_path / "other", columns, 8, SHAPE, seed=77)
    order = msgspec.structs.replace(
        sparse.request(2, tmp_path).run, manifest=str(other.manifest), batch_sha=other.sha,
        replay=str(other.replay.tensors), replay_manifest=str(other.replay.manifest),
    )  # fmt: skip
    rows = different(replay_job.replay(msgspec.structs.replace(sparse.request(2, tmp_path), run=order)))
    assert {"loss", "grad_norm"} <= {row.name for row in rows if row.part == "metrics"}


def test_init_is_repeated(replay: Callable[..., ReplayReport]) -> None:
    report = replay(0)
    assert different(report) == [] and {"metrics", "batch"}.isdisjoint(parts(list(report.rows)))


# ---- different ------------------------------------------------------------------------------------------------------


def test_another_seed(past: Past, replay: Callable[..., ReplayReport]) -> None:
    spec = msgspec.structs.replace(past.config.spec, seed=4)
    rows = different(replay(0, config=msgspec.structs.replace(past.config, spec=spec)))
    adapter = {row.name for row in rows if row.part == ADAPTER}
    wanted = {name for name in load_file(Path(past.refs[0].dir) / ADAPTER) if ".lora_A." in name}
    assert adapter == wanted and "rng" in {row.name for row in rows if row.part == "state.json"}
    assert all(row.difference is not None and row.difference > 0.1 for row in rows if row.part == ADAPTER)
    assert "spec_digest" in {row.name for row in rows if row.part == "manifest"}
    assert OPTIMIZER not in parts(rows)  # no step was taken


def test_another_learning_rate(past: Past, tmp_path: Path, replay: Callable[..., ReplayReport]) -> None:
    """What follows from it differs, what comes before it does not."""
    order = past.request(1, tmp_path).run
    assert order.learning is not None
    optimizer = msgspec.structs.replace(order.learning.optimizer, lr=0.011)
    learning = msgspec.structs.replace(order.learning, optimizer=optimizer)
    rows = different(replay(1, run=msgspec.structs.replace(order, learning=learning)))
    assert parts(rows) == {ADAPTER, "weights.json", "canary", "files", "manifest", "metrics"}
    assert {row.name for row in rows if row.part == "metrics"} == {"lr"}
    assert {row.name for row in rows if row.part == "files"} == {ADAPTER, "weights.json"}


def test_another_batch(past: Past, tmp_path: Path, replay: Callable[..., ReplayReport]) -> None:
    """Its files are whole, but it is not the one that was trained on."""
    other = rig.write_batch(tmp_path / "other", 7, epoch=1)
    order = msgspec.structs.replace(
        past.request(2, tmp_path).run, batch=str(other.tensors), manifest=str(other.manifest), batch_sha=other.sha
    )
    rows = different(replay(run=order))
    assert {"metrics", ADAPTER, OPTIMIZER, "manifest", "canary"} <= parts(rows)
    assert {"loss", "grad_norm"} <= {row.name for row in rows if row.part == "metrics"}


# ---- damaged --------------------------------------------------------------------------------------------------------


def flipped(folder: Path, name: str, target: Path) -> Path:
    """A copy of a checkpoint with the last bit of a file turned."""
    shutil.copytree(folder, target)
    raw = bytearray((target / name).read_bytes())
    raw[-1] ^= 1
    (target / name).write_bytes(raw)
    return target


@pytest.mark.parametrize("name", [ADAPTER, OPTIMIZER, "state.json", "manifest.json"])
def test_a_damaged_parent_is_named(name: str, past: Past, tmp_path: Path, replay: Callable[..., ReplayReport]) -> None:
    folder = flipped(Path(past.refs[1].dir), name, tmp_path / "parent")
    parent = msgspec.structs.replace(past.refs[1], dir=str(folder))
    report = replay(run=msgspec.structs.replace(past.request(2, tmp_path).run, parent=parent))
    assert str(folder / name) in report.error and "sha256" in report.error


@pytest.mark.parametrize("name", [ADAPTER, "weights.json", "manifest.json"])
def test_a_damaged_result_is_named(name: str, past: Past, tmp_path: Path, replay: Callable[..., ReplayReport]) -> None:
    folder = flipped(Path(past.refs[2].dir), name, tmp_path / "result")
    report = replay(committed=msgspec.structs.replace(past.refs[2], dir=str(folder)))
    assert f"{folder / name} is damaged" in report.error
    (folder / name).unlink()
    report = replay(committed=msgspec.structs.replace(past.refs[2], dir=str(folder)))
    assert report.error == f"{folder / name} is missing"


def test_a_damaged_batch_is_named(past: Past, tmp_path: Path, replay: Callable[..., ReplayReport]) -> None:
    order = past.request(2, tmp_path).run
    columns, path = load_file(order.batch), tmp_path / "batch"
    columns["advantages"].view(-1).view(torch.uint8)[8] ^= 1
    save_file(columns, path)
    report = replay(run=msgspec.structs.replace(order, batch=str(path)))
    assert report.error.startswith(f"tensor advantages: {path} is damaged")
    path.write_bytes(b"no tensors")
    assert f"{path} cannot be read" in replay(run=msgspec.structs.replace(order, batch=str(path))).error
    raw = bytearray(Path(order.manifest).read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)
    assert f"{path} is damaged" in replay(run=msgspec.structs.replace(order, manifest=str(path))).error


def test_a_replay_bundle_is_checked(past: Past, tmp_path: Path) -> None:
    """Of expert ids of 16 bits. What is damaged, or not there, is named before anything is trained."""
    shape = RouteShape(layers=2, topk=3, experts=300)
    made = routes_rig.write(tmp_path / "b", load_file(past.orders[2].batch), 8, shape)
    tensors, manifest = made.replay.tensors, made.replay.manifest
    order = msgspec.structs.replace(
        past.request(2, tmp_path).run, batch=str(made.batch), manifest=str(made.manifest), batch_sha=made.sha,
        replay=str(tensors), replay_manifest=str(manifest),
    )  # fmt: skip
    described = msgspec.json.decode(manifest.read_bytes(), type=ReplayManifest).tensors
    rows = [row for row in replay_job.check_batch(order) if row.part == "replay"]
    assert {row.name: row.replayed for row in rows} == {name: info.sha256 for name, info in described.items()}
    assert described["routes"].dtype == "U16" and len(rows) == 2

    def refused(wanted: str, order: w.Run = order) -> None:
        with pytest.raises(replay_job.Damaged, match=wanted):
            list(replay_job.check_batch(order))

    refused("names no bundle", msgspec.structs.replace(order, replay="", replay_manifest=""))
    bundle = load_file(tensors)
    bundle["routes"].view(-1).view(torch.uint8)[5] ^= 1
    save_file(bundle, tensors)
    refused(f"tensor routes: {tensors} is damaged")
    save_file({"routes": bundle["routes"]}, tensors)
    refused("lacks the tensor covered")
    tensors.unlink()
    refused(f"{tensors} is missing")
    manifest.write_bytes(manifest.read_bytes() + b" ")
    refused(f"{manifest} is damaged")


def test_a_request_that_cannot_be_read_is_told() -> None:
    assert "config" in replay_job.answer(b"{}").error
