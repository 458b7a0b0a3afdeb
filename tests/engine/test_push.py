"""What the push state machine refuses and what it leaves alone, against a scripted server (its failures: tests/conformance)."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest

from artd_workers.deadline import Deadline
from artd_workers.engines.http import call
from artd_workers.engines.push import PushError
from tests.awake import SOON_S, wait_until
from tests.engine import folders
from tests.engine.conftest import Bench


def test_wrong_bytes_fail_before_the_engine_resumes(bench: Bench) -> None:
    bench.script = {"bytes": 60}
    with bench.serve() as pusher, pytest.raises(PushError, match="60 bytes"):
        pusher.run(bench.push(0))
    assert "/resume" not in bench.routes()


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


def test_a_step_that_is_loaded_already_stays_as_it_is(bench: Bench) -> None:
    """A rollback pushes it again; requests may be using it, and it may have been on its way out."""
    bench.mode = "lora"
    with bench.serve() as pusher:
        pusher.run(bench.push(4))
        pusher.unload("toy@4")
        live = pusher.run(bench.push(4))
        assert "verify" in live.seconds and pusher.tidy(Deadline(5.0)) == []
    assert [route for route in bench.routes() if "lora" in route] == ["/v1/load_lora_adapter"]


def test_a_step_that_is_pushed_again_while_it_is_unloaded_is_there_in_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.mode = "lora"
    with bench.serve() as pusher:
        pusher.run(bench.push(4))
        pusher.unload("toy@4")
        again, in_flight = threading.Thread(target=pusher.run, args=(bench.push(4),)), pusher._adapter.in_flight

        def asked(name: str, deadline: Deadline) -> int:
            found = in_flight(name, deadline)
            again.start()
            again.join(0.3)
            return found

        monkeypatch.setattr(pusher._adapter, "in_flight", asked)
        pusher.tidy(Deadline(5.0))
        again.join(SOON_S)
        assert not again.is_alive()
    assert [route for route in bench.routes() if "lora" in route][-1] == "/v1/load_lora_adapter"


def test_the_harness_does_not_wait_for_an_adapter_that_is_loaded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.mode = "lora"
    tidied: list[list[str]] = []
    with bench.serve() as pusher:
        pusher.run(bench.push(4))
        pusher.unload("toy@4")
        load = pusher._adapter.load_adapter

        def loaded(name: str, folder: Path, deadline: Deadline) -> None:
            beside = threading.Thread(target=lambda: tidied.append(pusher.tidy(Deadline(5.0))), daemon=True)
            beside.start()
            beside.join(SOON_S)
            load(name, folder, deadline)

        monkeypatch.setattr(pusher._adapter, "load_adapter", loaded)
        pusher.run(bench.push(5))
    assert tidied == [[]]


def test_an_adapter_is_there_for_as_long_as_a_request_may_need_it(bench: Bench) -> None:
    """vLLM reads an adapter anew that it has put out of its slots, and ends when it is away."""
    bench.mode = "lora"
    with bench.serve() as pusher:
        pusher.run(bench.push(1, name="toy@4"))
        adapter, (old,) = pusher._adapter, (bench.root / "adapters").iterdir()
        body = {"model": "toy@4", "prompt": [[5, 6, 7]], "max_tokens": 200}
        generate = partial(call, str(bench.root / "s"), "POST", "/v1/completions", body, deadline=Deadline(SOON_S))
        request = threading.Thread(target=generate)
        request.start()
        wait_until(lambda: adapter.in_flight("toy@4", Deadline(SOON_S)), SOON_S, "the request")
        pusher.run(bench.push(2, name="toy@4"))  # after a rollback: another lineage's step of this number
        for _ in range(3):
            pusher.tidy(Deadline(SOON_S))
        assert request.is_alive() and (old / "adapter_model.safetensors").is_file()
        request.join()
        pusher.tidy(Deadline(SOON_S))
        assert not old.exists() and len(list((bench.root / "adapters").iterdir())) == 1


def test_an_adapter_whose_sums_in_the_engine_are_others_is_never_live(bench: Bench) -> None:
    """Its file has the right hashes, and the engine scores it as the trainer does."""
    bench.mode = "lora"
    push = bench.push(4)
    folder = bench.root / "checkpoint-4"
    table = json.loads((folder / "weights.json").read_text())
    table["held"][1]["sum64"] ^= 1
    folders.commit(folder, "weights.json", json.dumps(table).encode())
    ref = msgspec.structs.replace(push.checkpoint, sha=folders.sha(folder))
    with bench.serve() as pusher, pytest.raises(PushError, match="not those committed") as failed:
        pusher.run(msgspec.structs.replace(push, checkpoint=ref))
    assert failed.value.phase == "verify"


def test_a_damaged_adapter_config_is_refused(bench: Bench) -> None:
    bench.mode = "lora"
    push = bench.push(4)
    (bench.root / "checkpoint-4" / "adapter_config.json").write_text('{"lora_alpha": 0}')
    with bench.serve() as pusher, pytest.raises(PushError, match="config.json is not the file that was committed"):
        pusher.run(push)
    assert "/v1/load_lora_adapter" not in bench.routes()


def test_a_step_of_another_lineage_replaces_its_namesake(bench: Bench) -> None:
    bench.mode = "lora"
    with bench.serve() as pusher:
        pusher.run(bench.push(1, name="toy@4"))
        pusher.run(bench.push(2, name="toy@4"))
    assert [route for route in bench.routes() if "lora" in route] == [
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load_lora_adapter",
    ]  # fmt: skip
