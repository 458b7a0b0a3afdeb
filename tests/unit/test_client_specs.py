"""What is said of a spec that is none, and how long the daemon may take to read a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from artd_client.errors import Invalid
from artd_client.specs import make_spec, reading_s


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"groupsize": 4}, "groupsize", "there is no field 'groupsize'; did you mean group_size"),
        ({"zzz": 4}, "zzz", "'zzz'; use one of: model, parameters, "),
        ({"lora": {"rnk": 8}}, "lora", "lora: there is no field 'rnk'; did you mean rank"),
        ({"lora": {"zzz": 8}}, "lora", "lora: there is no field 'zzz'; use one of: rank, alpha"),
        ({"rollout_weights_mode": "merge"}, "rollout_weights_mode", "'merge'.*it is one of 'lora', 'merged'"),
        ({"engine": {"in_flight": "wait"}}, "engine.in_flight", "it is one of 'drain', 'keep', 'recompute'"),
        ({"lora": {"rank": 0}}, "lora.rank", "Expected `int` >= 1"),
        ({"lora": 3}, "lora", "Expected `object`, got `int`"),
    ],
)
def test_what_a_field_may_be_is_said(fields, field, words):
    with pytest.raises(Invalid, match=words) as caught:
        make_spec("/m", None, fields)
    assert caught.value.field == field


def test_a_large_model_is_given_time(tmp_path: Path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(60_000_000_000)  # takes no space
    (tmp_path / "sub").mkdir()
    assert reading_s(str(tmp_path)) == pytest.approx(600)
    assert reading_s(str(tmp_path / "not-here")) == 0
