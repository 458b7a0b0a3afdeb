"""`engine.in_flight`: refused where no push of the run could ever keep a request, taken where some can."""

from __future__ import annotations

from typing import Any

import pytest

from artd.errors import Invalid
from artd.runs.lifecycle import Runs
from artd_schema.run.spec import EngineSpec, Mode, RunSpec
from artd_schema.run.spec_rules import in_flight_error
from artd_schema.wire import client_api as api
from tests.fakes.rows import EVERY_STEP, count, open_store


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("mode", "engine", "why"),
    [
        ("lora", {}, "with rollout_weights_mode='lora' nothing is paused"),
        ("merged", {"device": "cpu"}, "with engine.device='cpu' leave it out"),
        ("merged", {"transfer": "stock"}, "engine.transfer='stock' has none"),
        ("merged", {}, ""),
        ("merged", {"device": "cuda", "transfer": "staged"}, ""),
        ("merged", {"transfer": "nccl"}, ""),
    ],
)
def test_what_can_never_be_is_refused(mode: Mode, engine: dict[str, Any], why: str, in_flight: Any) -> None:
    spec = RunSpec(model="m", rollout_weights_mode=mode, engine=EngineSpec(in_flight=in_flight, **engine))
    found = in_flight_error(spec)
    assert why in found and bool(found) == bool(why)
    assert not found or f"engine.in_flight={in_flight!r}" in found
    drained = RunSpec(model="m", rollout_weights_mode=mode, engine=EngineSpec(**engine))
    assert drained.engine.in_flight == "drain" and in_flight_error(drained) == ""


@pytest.mark.asyncio
async def test_creating_such_a_run_names_the_field(tmp_path: Any) -> None:
    spec = RunSpec(model=str(tmp_path), engine=EngineSpec(in_flight="keep", transfer="stock"))
    async with open_store(tmp_path) as store:
        with pytest.raises(Invalid, match="engine.in_flight='keep'") as caught:
            await Runs(store, lambda _: None, EVERY_STEP).create(api.CreateRun(name="r", spec=spec))
        assert caught.value.field == "spec.engine.in_flight" and await count(store, "run") == 0
