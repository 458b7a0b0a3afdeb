"""How the packer divides a batch into minibatches: whole groups, as many each, the same again from the same seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from artd.packing.batch import Packed, pack
from artd.packing.inputs import PackSpec, Source
from artd_schema.codec import digest
from artd_schema.data.trajectory import Turn
from artd_schema.run.loss_rules import loss_finding
from artd_schema.run.spec import Learning, LossSpec, OptimizerSpec, RunSpec
from tests.fakes.rows import floats, ids

GROUPS = 7


def sources() -> list[Source]:
    found = []
    for group in range(GROUPS):
        for member in range(4):
            tokens = ids(*range(3 + member, 8 + 2 * member + group))
            turn = Turn(
                prompt_ids=ids(*range(70 + group, 100)), token_ids=tokens, logprobs=floats(*[-0.5] * (len(tokens) // 4))
            )
            body = msgspec.msgpack.encode([turn])
            found.append(Source(10 * group + member, group, float(member), digest(body), body))
    return found


def packed(minibatches: Any, seed: int = 3) -> Packed:
    learning = Learning(optimizer=OptimizerSpec(minibatches=minibatches), loss=LossSpec())
    spec = PackSpec(run="r", step=5, seed=seed, row_length=128, scale_rewards=True, base_digest="b", learning=learning)
    return pack(spec, sources())


def parts(found: Packed) -> dict[int, set[int]]:
    """Minibatches of each group, read from the rows that hold its trajectories."""
    number = found.manifest.minibatches or (0,) * found.manifest.rows
    out: dict[int, set[int]] = {}
    for one in found.manifest.trajectories:
        out.setdefault(one.group, set()).update(number[row] for row in one.rows)
    return out


@pytest.mark.parametrize("count", [2, 3, 7, 100])
def test_each_group_is_in_one_minibatch(count: int) -> None:
    found = packed(count)
    divided = parts(found)
    assert all(len(own) == 1 for own in divided.values()) and len(divided) == GROUPS
    sizes = Counter(next(iter(own)) for own in divided.values())
    assert sorted(sizes) == list(range(min(count, GROUPS))) and max(sizes.values()) - min(sizes.values()) <= 1
    assert list(found.manifest.minibatches or ()) == sorted(found.manifest.minibatches or ())


def test_advantages_and_what_is_trained_do_not_depend_on_it() -> None:
    plain, divided = packed(UNSET).manifest, packed(3).manifest
    for name in ("groups", "drops", "logical_tokens", "trainable_tokens"):
        assert getattr(plain, name) == getattr(divided, name)
    assert [t.advantage for t in plain.trajectories] == [t.advantage for t in divided.trajectories]


def test_one_minibatch_is_the_batch_as_it_ever_was() -> None:
    plain, one = packed(UNSET), packed(1)
    assert plain.manifest.tensors == one.manifest.tensors and one.manifest.minibatches is UNSET


def test_the_division_is_drawn_from_the_seed() -> None:
    assert packed(3).manifest == packed(3).manifest
    assert len({str(sorted((group, *own) for group, own in parts(packed(3, seed)).items())) for seed in range(8)}) > 4


def test_more_minibatches_than_groups_are_refused() -> None:
    spec = RunSpec(model="/m", groups_per_step=4, optimizer=OptimizerSpec(minibatches=5))
    assert (loss_finding(spec) or ("",))[0] == "optimizer.minibatches"
    assert loss_finding(RunSpec(model="/m", groups_per_step=4, optimizer=OptimizerSpec(minibatches=4))) is None
