"""The push state machine against a scripted server: every phase can fail, and nothing wrong ever gets to live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from artd_workers.engines.base import Deadline
from artd_workers.engines.push import PushError
from tests.engine.conftest import Bench

FAULTS = [
    ("disk", {"/pause": 500}, "pause"),
    ("disk", {"artd_begin": 500}, "transfer"),
    ("disk", {"artd_load_merged": 500}, "transfer"),
    ("disk", {"artd_load_merged": "hang"}, "transfer"),
    ("disk", {"artd_load_merged": "die"}, "transfer"),
    ("live", {"/init_weight_transfer_engine": "hang"}, "transfer"),
    ("live", {"/start_weight_update": 500}, "transfer"),
    ("live", {"/update_weights": 500}, "transfer"),
    ("live", {"/update_weights": "hang"}, "transfer"),
    ("live", {"/update_weights": "die"}, "transfer"),
    ("live", {"/finish_weight_update": 500}, "transfer"),
    ("disk", {"/update_weight_version": 500}, "load"),
    ("disk", {"/reset_prefix_cache": "false"}, "load"),
    ("disk", {"/resume": "hang"}, "resume"),
    ("disk", {"/v1/completions": "wrong"}, "verify"),
    ("disk", {"/v1/completions": "hang"}, "verify"),
    ("disk", {"/v1/completions": "die"}, "verify"),
]


@pytest.mark.parametrize(("source", "faults", "phase"), FAULTS, ids=lambda value: str(value).replace("/", ""))
def test_every_phase_can_fail(bench: Bench, source: str, faults: dict[str, Any], phase: str) -> None:
    bench.script = {"faults": faults}
    with bench.serve() as pusher, pytest.raises(PushError) as failed:
        pusher.run(bench.push(0, source=source, rendezvous="r", deadline_s=0.5))
    assert failed.value.phase == phase
    assert str(failed.value)


def test_wrong_bytes_fail_before_the_engine_resumes(bench: Bench) -> None:
    bench.script = {"bytes": 60}
    with bench.serve() as pusher, pytest.raises(PushError, match="60 bytes"):
        pusher.run(bench.push(0))
    assert "/resume" not in bench.routes()


@pytest.mark.parametrize(
    ("file", "old", "new"), [("manifest.json", b'"toy"', b'"tox"'), ("weights.json", b"[8]", b"[9]")]
)
def test_a_damaged_checkpoint_is_not_pushed(bench: Bench, file: str, old: bytes, new: bytes) -> None:
    push = bench.push(0)
    path = Path(push.checkpoint.dir) / file
    path.write_bytes(path.read_bytes().replace(old, new))
    with bench.serve() as pusher, pytest.raises(PushError, match="committed") as failed:
        pusher.run(push)
    assert failed.value.phase == "fence"
    assert bench.routes() == ["/version"]


def test_a_push_of_the_other_mode_is_refused(bench: Bench) -> None:
    with bench.serve() as pusher, pytest.raises(PushError, match="lora push"):
        pusher.run(bench.push(0, mode="lora"))
    assert bench.routes() == ["/version"]


def test_every_weight_is_loaded_without_a_base(bench: Bench) -> None:
    bench.parameters = "full"
    with bench.serve() as pusher:
        pusher.run(bench.push(0))
    (call,) = [call["body"]["kwargs"] for call in bench.calls() if call["route"] == "artd_load_merged"]
    assert call["base"] is None
    assert call["checkpoint"] == str(bench.root / "checkpoint-0")


def test_a_checkpoint_of_other_parameters_is_refused(bench: Bench) -> None:
    push = bench.push(0)
    bench.parameters = "full"
    with bench.serve() as pusher, pytest.raises(PushError, match="lora parameters, the run trains full"):
        pusher.run(push)
    assert bench.routes() == ["/version"]


def test_lora_adapter_that_is_not_the_committed_one_fails(bench: Bench) -> None:
    bench.mode = "lora"
    push = bench.push(1)
    path = Path(push.checkpoint.dir) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with bench.serve() as pusher, pytest.raises(PushError, match="not those committed") as failed:
        pusher.run(push)
    assert failed.value.phase == "transfer"
    assert "/v1/load_lora_adapter" not in bench.routes()


@pytest.mark.parametrize(("fault", "phase"), [(500, "load"), ("hang", "load"), ("wrong", "verify")])
def test_every_phase_of_a_lora_push_can_fail(bench: Bench, fault: Any, phase: str) -> None:
    bench.mode = "lora"
    bench.script = {"faults": {"/v1/load_lora_adapter" if phase == "load" else "/v1/completions": fault}}
    with bench.serve() as pusher, pytest.raises(PushError) as failed:
        pusher.run(bench.push(1, deadline_s=0.5))
    assert failed.value.phase == phase


def test_a_step_that_is_loaded_already_stays_as_it_is(bench: Bench) -> None:
    """A rollback pushes it again; requests may be using it, and it may have been on its way out."""
    bench.mode = "lora"
    with bench.serve() as pusher:
        pusher.run(bench.push(4))
        pusher.unload("toy@4")
        live = pusher.run(bench.push(4))
        assert "verify" in live.seconds and pusher.tidy(Deadline(5.0)) == []
    assert [route for route in bench.routes() if "lora" in route] == ["/v1/load_lora_adapter"]


def test_a_step_of_another_lineage_replaces_its_namesake(bench: Bench) -> None:
    bench.mode = "lora"
    with bench.serve() as pusher:
        pusher.run(bench.push(1, name="toy@4"))
        pusher.run(bench.push(2, name="toy@4"))
    assert [route for route in bench.routes() if "lora" in route] == [
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load_lora_adapter",
    ]  # fmt: skip
