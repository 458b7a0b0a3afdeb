"""Advantages against numpy in float64, through the packer: in any order of trajectories and groups the same."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from artd.core.groups import group_outcome, trains_equal
from artd.packing.batch import PackSpec, pack
from artd.packing.inputs import Source
from artd_schema.codec import digest
from artd_schema.data.manifest import BatchManifest
from artd_schema.data.trajectory import Turn
from artd_schema.run.spec import AdvantageSpec, LengthSpec, RunSpec
from tests.fakes.rows import add_run, data_dir, make_ingest, one, open_store, submit

SIZES = {1: [5, 9, 14, 3], 2: [8, 8, 2], 3: [20, 1, 6, 11, 4]}
REWARDS = {1: [0.0, 1.0, 0.25, 2.0], 2: [1.0, 0.0, 0.5], 3: [3.0, -1.0, 0.0, 0.0, 1.0]}
CUT = {(1, 2), (2, 0), (2, 2), (3, 4)}
"""(group, member) of trajectories whose answer ended at a limit of length."""


def sources(rewards: dict[int, list[float]] = REWARDS) -> list[Source]:
    out = []
    for group, values in rewards.items():
        for member, reward in enumerate(values):
            n = SIZES[group][member]
            ids = np.arange(n, dtype="<i4") + 10 * group + member
            turn = Turn(
                prompt_ids=np.arange(4, dtype="<i4").tobytes(), token_ids=ids.tobytes(),
                logprobs=np.full(n, -1.0, "<f4").tobytes(), finish_reason="length" if (group, member) in CUT else "stop",
            )  # fmt: skip
            body = msgspec.msgpack.encode([turn])
            out.append(Source(100 * group + member, group, reward, digest(body), body))
    return out


def packed(how: AdvantageSpec, scale: bool, order: list[Source]) -> tuple[dict[int, float], BatchManifest, Any]:
    spec = PackSpec(run="r", step=1, seed=0, row_length=64, scale_rewards=scale, base_digest="b", advantages=how)
    tensors, manifest, _ = pack(spec, order)
    return {t.id: t.advantage for t in manifest.trajectories}, manifest, tensors


def oracle(how: AdvantageSpec, scale: bool, rewards: dict[int, list[float]] = REWARDS) -> dict[int, float]:
    """Advantage by trajectory, of those that count in a group that is trained; numpy alone."""
    found: dict[int, float] = {}
    for group, values in rewards.items():
        members = [m for m in range(len(values)) if not (how.truncated == "drop" and (group, m) in CUT)]
        r = np.array([values[m] for m in members], np.float64)
        if how.length is not msgspec.UNSET:
            n = np.array([SIZES[group][m] for m in members], np.float64)
            start = how.length.limit - how.length.buffer
            r = r - how.length.penalty * np.clip((n - start) / how.length.buffer, 0, 1)
        if how.baseline != "none" and (len(r) < 2 or np.ptp(r) == 0):
            continue
        match how.baseline:
            case "group":
                a = r - r.mean()
            case "leave_one_out":
                a = r - np.array([np.delete(r, i).mean() for i in range(len(r))])
            case _:
                a = r
        if scale:
            a = a / (r.std() + 1e-6)
        found |= {100 * group + m: float(x) for m, x in zip(members, a, strict=True)}
    if how.batch_scale:
        every = np.array(list(found.values()))
        found = {k: float((v - every.mean()) / (every.std() + 1e-6)) for k, v in found.items()}
    return {k: v * (how.positive if v > 0 else how.negative) for k, v in found.items()}


CASES: dict[str, tuple[AdvantageSpec, bool]] = {
    "group": (AdvantageSpec(), True),
    "group-unscaled": (AdvantageSpec(), False),
    "leave-one-out": (AdvantageSpec(baseline="leave_one_out"), False),
    "leave-one-out-scaled": (AdvantageSpec(baseline="leave_one_out"), True),
    "none": (AdvantageSpec(baseline="none"), False),
    "batch": (AdvantageSpec(batch_scale=True), False),
    "batch-of-rewards": (AdvantageSpec(baseline="none", batch_scale=True), False),
    "by-sign": (AdvantageSpec(positive=0.1, negative=2.0), True),
    "truncated-dropped": (AdvantageSpec(truncated="drop"), True),
    "truncated-masked": (AdvantageSpec(truncated="mask"), True),
    "length": (AdvantageSpec(length=LengthSpec(limit=12, buffer=6, penalty=0.5)), True),
    "all": (
        AdvantageSpec(
            baseline="leave_one_out", batch_scale=True, positive=0.5, truncated="drop", length=LengthSpec(limit=9, buffer=9)
        ),
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_advantages_are_numpys_in_any_order(case: str) -> None:
    how, scale = CASES[case]
    wanted, every = oracle(how, scale), sources()
    found, manifest, tensors = packed(how, scale, every)
    trained = {t.id for t in manifest.trajectories if t.rows}
    left_out = set() if how.truncated == "train" else {100 * g + m for g, m in CUT}
    assert trained == wanted.keys() - left_out
    np.testing.assert_allclose(
        [found[i] for i in sorted(wanted)], [wanted[i] for i in sorted(wanted)], rtol=1e-10, atol=1e-13
    )
    turned, _, _ = packed(how, scale, every[::-1])
    assert turned == found, "the order of trajectories and groups changed a bit"
    for row, index in zip(tensors["advantages"], tensors["trajectory_index"], strict=True):
        for at in np.flatnonzero(index >= 0):
            here = float(found[manifest.trajectories[index[at]].id])
            assert row[at] in (np.float32(here), 0.0)
    drops = {d.trajectory for d in manifest.drops if d.kind == "truncated"}
    assert drops == left_out and manifest.metrics.get("dropped_truncated", 0) == len(left_out)


def test_equal_rewards_are_trained_where_they_can_be() -> None:
    equal = {1: [1.0, 1.0, 1.0, 1.0], 2: [1.0, 0.0, 0.5]}
    for how in (AdvantageSpec(baseline="none"), AdvantageSpec(length=LengthSpec(limit=10, buffer=8))):
        found, manifest, _ = packed(how, False, sources(equal))
        wanted = oracle(how, False, equal)
        assert (
            not manifest.drops and found == pytest.approx(wanted, rel=1e-10) and any(found[100 + m] for m in range(4))
        )
    _, manifest, _ = packed(AdvantageSpec(), False, sources(equal))
    assert {d.kind for d in manifest.drops} == {"group"} and len(manifest.drops) == 4


def test_a_manifest_says_how_and_only_where_it_was_asked() -> None:
    _, manifest, _ = packed(CASES["all"][0], False, sources())
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=BatchManifest).advantages == CASES["all"][0]
    spec = PackSpec(run="r", step=1, seed=0, row_length=64, scale_rewards=True, base_digest="b")
    assert "advantages" not in msgspec.json.decode(msgspec.json.encode(pack(spec, sources())[1]))


@pytest.mark.parametrize("spec", [b"{", b"{}", b'{"advantages": 3}', msgspec.json.encode(RunSpec(model="m"))])
def test_a_spec_that_asks_for_nothing_discards_equal_rewards(spec: bytes) -> None:
    assert not trains_equal(spec) and group_outcome([1.0, 1.0], trains_equal(spec)) == "zero_variance"


@pytest.mark.asyncio
@pytest.mark.parametrize("baseline", ["group", "none"])
async def test_a_seal_asks_the_runs_spec(tmp_path: Any, baseline: Any) -> None:
    async with open_store(tmp_path) as store:
        await add_run(store, group_size=2, advantages=AdvantageSpec(baseline=baseline))
        ingest = make_ingest(store, data_dir(tmp_path))
        for member in range(2):
            await submit(ingest, "g", 1.0, key=str(member))
        state = await one(store, "SELECT state || reason FROM trajectory_group")
        assert state == ("sealed" if baseline == "none" else "discardedzero_variance")
