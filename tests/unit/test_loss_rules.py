"""Losses that cannot be trained as asked are refused by name, with what to do instead; defaults that hang on the loss."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from artd_schema.run.loss_rules import loss_finding
from artd_schema.run.losses import OWN
from artd_schema.run.spec import LossSpec, RunSpec, first_difference

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"loss": {"kind": "reinforce", "clip_high": 0.2}},
        "loss.clip_high",
        "has no such bound: leave it out, or use cispo",
    ),
    ({"loss": {"clip_low": 0.2}}, "loss.clip_low", "'cispo' has no such bound"),
    ({"loss": {"kind": "ppo", "clip_low": 1.0}}, "loss.clip_low", "a number below 1"),
    ({"loss": {"kind": "ppo", "params": {"dual_clip": 0.5}}}, "loss.params.dual_clip", "must be from 1 to"),
    ({"loss": {"correction": {"icepop": [5.0, 0.5]}}}, "loss.correction.icepop", "give (lowest, highest)"),
    ({"loss": {"kind": "ppo", "correction": {"tis": 2.0}}}, "loss.correction.tis", "loss.proximal='trainer'"),
    ({"loss": {"kl": {"coef": 0.1}}, "parameters": "full"}, "loss.kl", "use parameters='lora'"),
    ({"loss": {"kl": {"coef": 0.1, "estimator": "k1"}}}, "loss.kl.estimator", "into='advantage'"),
    (
        {"scale_rewards": True, "advantages": {"batch_scale": True}},
        "scale_rewards",
        "advantages.batch_scale does without",
    ),
    ({"scale_rewards": True, "advantages": {"baseline": "none"}}, "scale_rewards", "baseline='none' does without"),
    ({"advantages": {"positive": 0.0, "negative": 0.0}}, "advantages.positive", "trains nothing"),
    ({"advantages": {"length": {"limit": 5, "buffer": 6}}}, "advantages.length.buffer", "more than limit=5"),
    ({"loss": {"kind": "sft"}, "group_size": 4}, "group_size", "an example is a group of its own"),
    ({"loss": {"kind": "sft", "proximal": "trainer"}}, "loss.proximal", "examples are not sampled"),
    ({"loss": {"kind": "sft"}, "advantages": {"truncated": "mask"}}, "advantages", "examples have none"),
    ({"advantages": {"baseline": "given", "negative": 0.5}}, "advantages.baseline", "as they are"),
    ({"optimizer": {"schedule": {"kind": "cosine"}}}, "optimizer.schedule.steps", "such as steps=200"),
    (
        {"optimizer": {"schedule": {"kind": "linear", "warmup": 5, "steps": 5}}},
        "optimizer.schedule.steps",
        "must be more than warmup=5",
    ),
    ({"optimizer": {"schedule": {"floor": 0.1}}}, "optimizer.schedule", "use 'linear' or 'cosine'"),
    ({"loss": {"divisor": 100}}, "loss.divisor", "normalise='constant' alone, and it is 'token'"),
]


def run(fields: dict[str, Any]) -> RunSpec:
    return msgspec.convert({"model": "m"} | fields, RunSpec)


@pytest.mark.parametrize(("fields", "where", "says"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_excludes_each_other_is_refused(fields: dict[str, Any], where: str, says: str) -> None:
    found = loss_finding(run(fields))
    assert found is not None and found[0] == where and says in found[1], found


@pytest.mark.parametrize("kind", [*OWN, "of-a-package"])
def test_each_loss_is_accepted_with_its_defaults_which_are_stored(kind: str) -> None:
    spec = run({"loss": {"kind": kind}})
    assert loss_finding(spec) is None
    stored = msgspec.json.decode(msgspec.json.encode(spec))
    assert stored["loss"]["normalise"] == ("token" if kind not in OWN else OWN[kind].normalise)
    assert stored["scale_rewards"] is (kind not in ("dr_grpo", "sft"))
    assert stored["group_size"] == (1 if kind == "sft" else 8)
    again = msgspec.convert(stored, RunSpec)
    assert again == spec and first_difference(spec, again) is None


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "ppo", "proximal": "trainer", "correction": {"tis": 2.0, "icepop": [0.5, 5.0]}},
        {"kind": "reinforce", "correction": {"tis": 2.0, "product": [0.0, 3.0], "geometric": [0.99, 1.01]}},
        {"kl": {"coef": 0.1, "estimator": "k1", "into": "advantage"}, "entropy_bonus": 0.001},
    ],
)
def test_what_goes_together_is_accepted(loss: dict[str, Any]) -> None:
    spec = run({"loss": loss})
    assert loss_finding(spec) is None
    assert msgspec.json.decode(msgspec.json.encode(spec), type=RunSpec) == spec


def test_what_is_given_counts_before_a_default() -> None:
    spec = run({"loss": {"kind": "dr_grpo", "divisor": 77, "clip_high": 0.3}, "scale_rewards": True})
    assert (spec.loss.divisor, spec.loss.clip_high, spec.loss.clip_low, spec.scale_rewards) == (77, 0.3, 0.2, True)
    assert run({"loss": {"kind": "dr_grpo"}, "engine": {"max_model_len": 300}}).loss.divisor == 300
    assert run({"loss": {"kind": "gspo", "normalise": "token"}}).loss.normalise == "token"
    assert run({"advantages": {"truncated": "mask"}}).scale_rewards
    assert not run({"advantages": {"baseline": "none"}}).scale_rewards
    assert not run({"advantages": {"batch_scale": True}}).scale_rewards
    assert run({"loss": {"normalise": "constant"}}).loss == LossSpec(normalise="constant", divisor=1024)
