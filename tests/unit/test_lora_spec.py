"""Targets of an adapter that the trainer cannot compute, or that there is no adapter for, are refused when the run is made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from artd.errors import Invalid
from artd.runs.lifecycle import _check_spec
from artd_schema.run.spec import LoraSpec, RunSpec


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora": LoraSpec(targets=("q_proj", "o_proj"))}, "q_proj, k_proj, v_proj are adapted together"),
        ({"lora": LoraSpec(targets=("gate_proj", "up_proj"))}, "gate_proj, up_proj, down_proj are adapted together"),
        ({"lora": LoraSpec(targets=("o_proj",)), "parameters": "full"}, "there is no adapter"),
    ],
)
def test_targets_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid, match=says) as caught:
        _check_spec(RunSpec(model="/m", **changes))
    assert caught.value.field == "spec.lora.targets"


def test_targets_are_stored_as_they_were_asked_for() -> None:
    spec = RunSpec(model="/m", lora=LoraSpec(targets=("o_proj",), rslora=True))
    _check_spec(spec)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=RunSpec) == spec
    assert msgspec.json.encode(LoraSpec()) == b'{"rank":16,"alpha":32}'
