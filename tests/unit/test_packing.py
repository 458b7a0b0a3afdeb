"""The packer: what is packed is what was sampled, whatever is shared, and the same request gives the same bytes."""

from __future__ import annotations

import dataclasses
import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artd.packing import batch as manifest_module
from artd.packing import rows as plan
from artd.packing import tree
from artd.packing.batch import PackError, PackSpec, fill, pack
from artd.packing.tensors import PADDING, serialise
from artd_schema.codec import digest, to_json
from artd_schema.data.trajectory import Sampling
from tests.unit.packing_oracle import check_batch, plain_sequences, source, turn

SPEC = PackSpec(run="r", step=3, seed=7, row_length=320, scale_rewards=True, base_digest="b")


@st.composite
def groups(draw):
    """Groups whose trajectories share prefixes of a pool, branch, continue in further turns, or start anew."""
    sources, turns_of, number = [], {}, 0
    for group in range(draw(st.integers(1, 3))):
        rng = random.Random(draw(st.integers(0, 2**32)))
        pool = [rng.randrange(3) for _ in range(160)]
        size = draw(st.integers(2, 5))
        for member in range(size):
            turns, context = [], pool[: draw(st.sampled_from([1, 2, 30, 63, 64, 65, 66, 130, 131, 150]))]
            for _ in range(draw(st.integers(1, 3))):
                if draw(st.booleans()):
                    context = context + [rng.randrange(3) for _ in range(draw(st.integers(0, 3)))]
                sampled = [rng.randrange(3) for _ in range(draw(st.integers(0, 20)))]
                epochs = ((0, 1), (len(sampled) // 2, 2)) if len(sampled) > 1 else ()
                temperature = draw(st.sampled_from([1.0, 0.7]))
                turns.append(turn(context, sampled, temperature=temperature, epochs=epochs, seed=number))
                context = [*pool[:70], 9] if draw(st.integers(0, 3)) == 0 else context + sampled
            number += 1
            turns_of[number] = turns
            sources.append(source(number, group, float(member), turns))
    return sources, turns_of


def expected_of(manifest, turns_of, row_length):
    kept = {}
    for number, turns in turns_of.items():
        kept[number] = [s for s in plain_sequences(turns) if len(s) <= row_length and any(entry[1] for entry in s)]
    return kept


@settings(max_examples=60, deadline=None)
@given(groups(), st.integers(0, 1000))
def test_unpacking_gives_every_sequence_back(case, seed):
    sources, turns_of = case
    spec = msgspec.structs.replace(SPEC, seed=seed)
    try:
        tensors, manifest, _ = pack(spec, sources)
    except PackError as error:
        assert not any(expected_of(None, turns_of, spec.row_length).values()) and error.drops
        return
    expected = expected_of(manifest, turns_of, spec.row_length)
    check_batch(tensors, manifest, expected)
    assert manifest.logical_tokens == sum(len(s) for sequences in expected.values() for s in sequences)
    assert manifest.physical_tokens == int((tensors["segment_ids"] >= 0).sum()) <= manifest.logical_tokens
    assert manifest.trainable_tokens == sum(e[1] for seqs in expected.values() for s in seqs for e in s)


def eight(prompt_length=100, completion=12, groups=2):
    sources, turns_of = [], {}
    for group in range(groups):
        prompt = [group * 1000 + i for i in range(prompt_length)]
        for member in range(8):
            number = len(sources) + 1
            turns_of[number] = [turn(prompt, [5000 + number + i for i in range(completion)], seed=number)]
            sources.append(source(number, group, float(member % 3), turns_of[number]))
    return sources, turns_of


@pytest.mark.parametrize("prompt_length", [2, 40, 63, 64, 65, 200])
def test_a_common_prompt_is_stored_once_per_row_whatever_its_length(prompt_length):
    sources, turns_of = eight(prompt_length, groups=1)
    spec = msgspec.structs.replace(SPEC, row_length=1024)
    tensors, manifest, _ = pack(spec, sources)
    assert manifest.rows == 1
    assert manifest.physical_tokens == (prompt_length - 1) + 8 * (1 + 12)
    check_batch(tensors, manifest, {n: plain_sequences(t) for n, t in turns_of.items()})


@pytest.mark.parametrize(("common", "shared"), [(63, False), (64, True)])
def test_a_prefix_that_is_no_prompt_is_shared_from_64_tokens_on(common, shared):
    turns = [[turn([*range(common), 900 + k, *range(5)], [7, 8], seed=k)] for k in range(2)]
    sources = [source(k + 1, 1, float(k), turns[k]) for k in range(2)]
    _, manifest, _ = pack(SPEC, sources)
    assert manifest.logical_tokens - manifest.physical_tokens == (common if shared else 0)


def test_a_second_turn_shares_its_prompt_but_never_a_trained_token():
    first = [turn(range(80), [1, 2, 3], seed=k) for k in range(2)]
    second = [turn([*range(80), 1, 2, 3, 4, 5], [6, 7 + k], seed=9 + k) for k in range(2)]
    sources = [source(k + 1, 1, float(k), [first[k], second[k]]) for k in range(2)]
    tensors, manifest, _ = pack(SPEC, sources)
    assert manifest.physical_tokens == 79 + 2 * (80 - 79 + 3 + 2 + 2)
    check_batch(tensors, manifest, {k + 1: plain_sequences([first[k], second[k]]) for k in range(2)})


def plant_last_prompt_token(patch):
    patch.setattr(tree, "shareable", lambda sequence: sequence.first_trainable)


def plant_trained_token(patch):
    patch.setattr(tree, "shareable", lambda sequence: len(sequence) - 1)


def plant_wrong_parent(patch):
    real = plan.row_segments

    def wrong(trees, placed):
        return [dataclasses.replace(s, parent=i) if i % 3 == 1 else s for i, s in enumerate(real(trees, placed))]

    patch.setattr(manifest_module, "row_segments", wrong)


def plant_unsorted(patch):
    real = plan.row_segments
    patch.setattr(manifest_module, "row_segments", lambda trees, placed: real(trees, placed)[::-1])


def plant_no_branch(patch):
    real = tree._common_prefix
    patch.setattr(
        tree, "_common_prefix", lambda a, b, width: min(real(a, b, width) + 1, len(a) // width, len(b) // width)
    )


@pytest.mark.parametrize(
    "plant", [plant_last_prompt_token, plant_trained_token, plant_wrong_parent, plant_unsorted, plant_no_branch]
)
def test_planted_bugs_go_red(monkeypatch, plant):
    sources, turns_of = [], {}
    for number in range(1, 5):  # branches at 70 and 71, same first sampled tokens
        prompt = [*range(70), number % 2, *range(70)]
        turns_of[number] = [turn(prompt, [1, 2, 3, number], seed=1)]
        sources.append(source(number, 1, float(number), turns_of[number]))
    spec = msgspec.structs.replace(SPEC, row_length=600)
    expected = {n: plain_sequences(t) for n, t in turns_of.items()}
    check_batch(*pack(spec, sources)[:2], expected)
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check_batch(*pack(spec, sources)[:2], expected)


def test_an_unsorted_tree_shares_less_and_loses_nothing(monkeypatch):
    """Sorting is what finds the prefixes: without it common prefixes of neighbours are too short."""
    turns_of = {n: [turn([n % 2, *range(100)], [1, n], seed=n)] for n in range(1, 9)}
    sources = [source(n, 1, float(n), t) for n, t in turns_of.items()]
    spec = msgspec.structs.replace(SPEC, row_length=1000)
    _, good, _ = pack(spec, sources)
    assert good.physical_tokens == 2 * 100 + 8 * 3
    monkeypatch.setattr(tree, "sorted", lambda items, key=None: list(items), raising=False)
    _, bad, _ = pack(spec, sources)
    assert bad.physical_tokens > good.physical_tokens


def test_same_request_same_bytes_and_the_seed_moves_rows_only():
    sources, turns_of = eight(groups=6)
    first = pack(SPEC, sources)
    again = pack(SPEC, sources)
    assert serialise(first[0]) == serialise(again[0]) and to_json(first[1]) == to_json(again[1])
    other_tensors, other, _ = pack(msgspec.structs.replace(SPEC, seed=8), sources)
    assert other.rows == first[1].rows > 3
    assert other.token_digest != first[1].token_digest
    rows = sorted(row.tobytes() for row in first[0]["tokens"])
    assert rows == sorted(row.tobytes() for row in other_tensors["tokens"])
    check_batch(other_tensors, other, {n: plain_sequences(t) for n, t in turns_of.items()})


def test_bytes_are_pinned():
    """A change of a batch's bytes needs a new PACKER version; this digest then changes with it."""
    tensors, manifest, _ = pack(SPEC, eight(groups=3)[0])
    assert manifest.packer == "artd-tree/2"
    assert digest(serialise(tensors)) == "2ed871ccfd335f3c48c1290f4a568be57b15f6a49df014c48b1857b96c51e1ea"


def test_the_manifest_describes_the_tensors():
    tensors, manifest, _ = pack(SPEC, eight()[0])
    assert set(manifest.tensors) == set(PADDING) == set(tensors)
    for name, info in manifest.tensors.items():
        assert info.shape == (manifest.rows, SPEC.row_length) == tensors[name].shape
        assert info.sha256 == digest(tensors[name].tobytes())
    assert manifest.token_digest == manifest.tensors["tokens"].sha256
    kinds = {name: info.dtype for name, info in manifest.tensors.items()}
    assert kinds == {
        "tokens": "I32", "segment_ids": "I32", "parent_ids": "I32", "position_ids": "I32", "loss_mask": "U8",
        "old_logprobs": "F32", "advantages": "F32", "weights": "F32", "temperatures": "F32", "policy_epochs": "I32",
        "trajectory_index": "I32",
    }  # fmt: skip
    assert fill(manifest) == manifest.physical_tokens / (manifest.rows * SPEC.row_length)


def test_advantages_and_group_statistics_reach_the_manifest():
    sources, _ = eight(groups=1)
    _, manifest, _ = pack(SPEC, sources)
    rewards = [item.reward for item in sources]
    mean = math.fsum(rewards) / 8
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / 8)
    assert (manifest.groups[0].mean, manifest.groups[0].std, manifest.groups[0].size) == (mean, std, 8)
    assert [t.advantage for t in manifest.trajectories] == [(r - mean) / (std + 1e-6) for r in rewards]
    _, plain, _ = pack(msgspec.structs.replace(SPEC, scale_rewards=False), sources)
    assert [t.advantage for t in plain.trajectories] == [r - mean for r in rewards]


def test_too_long_is_dropped_whole_and_still_counts_in_the_group():
    long = [turn(range(200), range(200), seed=1)]
    short = {n: [turn(range(20), [1, 2, n], seed=n)] for n in (2, 3)}
    sources = [source(1, 1, 9.0, long), *(source(n, 1, float(n), t) for n, t in short.items())]
    tensors, manifest, _ = pack(SPEC, sources)
    assert [(d.trajectory, d.reason) for d in manifest.drops] == [
        (1, "sequence 0 has 400 tokens, more than row_length 320")
    ]
    assert [t.rows for t in manifest.trajectories] == [(), (0,), (0,)]
    assert manifest.groups[0].mean == 14 / 3
    check_batch(tensors, manifest, {1: [], **{n: plain_sequences(t) for n, t in short.items()}})


def test_a_sequence_of_exactly_a_row_fits():
    sources = [source(n, 1, float(n), [turn(range(300), range(20), seed=n)]) for n in (1, 2)]
    _, manifest, _ = pack(SPEC, sources)
    assert manifest.rows == 2 and not manifest.drops and fill(manifest) == 1.0


def test_groups_without_variance_are_dropped_with_the_reason():
    sources, turns_of = eight(groups=2)
    flat = [dataclasses.replace(item, reward=0.5) if item.group == 1 else item for item in sources]
    tensors, manifest, _ = pack(SPEC, flat)
    assert {d.reason for d in manifest.drops} == {"group 1: zero_variance"} and len(manifest.drops) == 8
    check_batch(tensors, manifest, {n: plain_sequences(t) if n <= 8 else [] for n, t in turns_of.items()})
    with pytest.raises(PackError, match="every trajectory was dropped") as caught:
        pack(SPEC, [item for item in flat if item.group == 1])
    assert len(caught.value.drops) == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("presence_penalty", 0.5), ("frequency_penalty", 0.5),
     ("repetition_penalty", 1.1), ("temperature", 0.0)],
)  # fmt: skip
def test_sampling_that_cannot_be_scored_is_refused_with_its_path(field, value):
    good = turn(range(10), [1, 2])
    bad = msgspec.structs.replace(good, sampling=Sampling(**{field: value}))
    with pytest.raises(PackError, match=field) as caught:
        pack(SPEC, [source(4, 1, 0.0, [good]), source(5, 1, 1.0, [good, bad])])
    assert (caught.value.trajectory, caught.value.position) == (5, f"turns[1].sampling.{field}")


def bad_bodies():
    good = turn(range(10), [1, 2, 3])
    replace = msgspec.structs.replace
    nan = np.array([-1, np.nan, -1], "<f4").tobytes()
    yield "turns[0].logprobs", replace(good, logprobs=good.logprobs[:8])
    yield "turns[0].logprobs[1]", replace(good, logprobs=nan)
    yield "turns[0].token_ids", replace(good, token_ids=good.token_ids[:-1])
    yield "turns[0].prompt_ids", replace(good, prompt_ids=b"")
    yield "turns[0].policy_epoch", replace(good, policy_epoch=((0, 1), (3, 2)))


@pytest.mark.parametrize(("position", "bad"), list(bad_bodies()))
def test_damaged_turns_are_refused_with_their_path(position, bad):
    with pytest.raises(PackError) as caught:
        pack(SPEC, [source(1, 1, 0.0, [turn(range(10), [1])]), source(2, 1, 1.0, [bad])])
    assert (caught.value.trajectory, caught.value.position) == (2, position)


def test_a_trajectory_listed_twice_is_refused():
    sources, _ = eight(groups=1)
    with pytest.raises(PackError, match="listed twice"):
        pack(SPEC, [*sources, sources[0]])


def test_rows_never_overflow_and_fill_is_high():
    rng = random.Random(1)
    sources = []
    for group in range(32):
        prompt = [rng.randrange(9999) for _ in range(rng.randrange(10, 120))]
        for _ in range(8):
            sampled = [rng.randrange(9999) for _ in range(rng.randrange(8, 120))]
            sources.append(source(len(sources) + 1, group, rng.random(), [turn(prompt, sampled)]))
    tensors, manifest, _ = pack(msgspec.structs.replace(SPEC, row_length=1024), sources)
    assert fill(manifest) >= 0.95
    assert manifest.rows == math.ceil(manifest.physical_tokens / 1024)
    assert tensors["tokens"].shape == (manifest.rows, 1024)
