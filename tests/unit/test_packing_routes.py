"""Expert replay in the packer: each packed token has the routes of its first capture, and nothing else is packed."""

from __future__ import annotations

import random
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artd.packing import forest, replay, routes, tree
from artd.packing.batch import PackError, PackSpec, pack
from artd.packing.tensors import serialise
from artd_schema.codec import digest, to_json
from artd_schema.data.trajectory import RouteShape
from tests.unit.packing_oracle import check_batch, encode_routes, plain_sequences, shared_tokens, source, turn

NARROW = RouteShape(layers=3, topk=2, experts=7)
WIDE = RouteShape(layers=2, topk=3, experts=300)
SPEC = PackSpec(run="r", step=3, seed=7, row_length=320, scale_rewards=True, base_digest="b", routes=NARROW)


def chosen(shape: RouteShape, *key) -> list[list[int]]:
    """Some experts of one token, of each layer; other keys, other experts."""
    begins = [zlib.crc32(repr((layer, *key)).encode()) for layer in range(shape.layers)]
    return [[(begin + k) % shape.experts for k in range(shape.topk)] for begin in begins]


def routed(shape, prompt, sampled, key=(), start=0, short=True, seed=0, **more):
    """A turn whose engine captured rows from token `start` on; key: position -> what its experts depend on."""
    tokens = [*prompt, *sampled]
    of = key if callable(key) else lambda position: (*key, position, tokens[position])
    rows = [chosen(shape, *of(position)) for position in range(start, len(tokens) - short)]
    return turn(
        prompt, sampled, seed=seed, routes=encode_routes(rows, shape), routes_start=start if rows else 0, **more
    )


@st.composite
def groups(draw):
    """As in test_packing, with routes: siblings differ at drawn positions, and every turn captures anew what it reads."""
    shape = draw(st.sampled_from([NARROW, WIDE]))
    sources, turns_of, number = [], {}, 0
    for group in range(draw(st.integers(1, 3))):
        rng = random.Random(draw(st.integers(0, 2**32)))
        pool = [rng.randrange(3) for _ in range(160)]
        for member in range(draw(st.integers(2, 5))):
            number += 1
            flips = set(draw(st.lists(st.sampled_from([0, 20, 63, 64, 100, 129]), max_size=2)))
            turns, sequence, covered = [], [], 0
            context = pool[: draw(st.sampled_from([1, 2, 30, 63, 64, 65, 66, 130, 131, 150]))]
            for index in range(draw(st.integers(1, 3))):
                context = context + [rng.randrange(3) for _ in range(draw(st.integers(0, 3)))]
                sampled = [rng.randrange(3) for _ in range(draw(st.integers(0, 20)))]
                tokens = context + sampled
                if context[: len(sequence)] != sequence:
                    covered = 0

                def key(position, tokens=tokens, first=covered, index=index, group=group, number=number, flips=flips):
                    again = index if position < first else 0
                    return group, position, tokens[position], number if position in flips else 0, again

                start = draw(st.sampled_from(sorted({0, covered // 2, covered})))
                short = draw(st.booleans())
                turns.append(routed(shape, context, sampled, key, start, short, seed=number))
                sequence, covered = tokens, max(covered, len(tokens) - short)
                context = [*pool[:70], 9] if draw(st.integers(0, 3)) == 0 else tokens
            turns_of[number] = turns
            sources.append(source(number, group, float(member), turns))
    return shape, sources, turns_of


def expected_of(turns_of, shape, row_length):
    return {
        number: [s for s in plain_sequences(turns, shape) if len(s) <= row_length and any(entry[1] for entry in s)]
        for number, turns in turns_of.items()
    }


@settings(max_examples=60, deadline=None)
@given(groups(), st.integers(0, 1000), st.sampled_from([320, 4096]))
def test_unpacking_gives_every_token_the_routes_of_its_first_capture(case, seed, row_length):
    shape, sources, turns_of = case
    spec = msgspec.structs.replace(SPEC, seed=seed, routes=shape, row_length=row_length)
    expected = expected_of(turns_of, shape, row_length)
    try:
        packed = pack(spec, sources)
    except PackError as error:
        assert not any(expected.values()) and error.drops
        return
    check_batch(packed.tensors, packed.manifest, expected, packed.replay)
    again = pack(spec, sources)
    assert serialise(packed.replay.tensors) == serialise(again.replay.tensors)
    assert to_json(packed.manifest) == to_json(again.manifest)


@settings(max_examples=60, deadline=None)
@given(groups())
def test_no_more_and_no_less_is_shared_than_equal_routes_allow(case):
    shape, sources, turns_of = case
    spec = msgspec.structs.replace(SPEC, routes=shape, row_length=8192)
    expected = expected_of(turns_of, shape, spec.row_length)
    if not any(expected.values()):
        return
    _, manifest, _ = pack(spec, sources)
    assert manifest.rows == 1
    members: dict[int, list] = {}
    for item in sources:
        members.setdefault(item.group, []).extend(expected[item.id])
    saved = sum(shared_tokens(sequences) for sequences in members.values())
    by_tokens = sum(shared_tokens(sequences, shared=False) for sequences in members.values())
    assert manifest.logical_tokens - manifest.physical_tokens == saved
    assert manifest.unshared_tokens == max(by_tokens - saved, 0)


def siblings(shape, flip=None, count=4, prompt=tuple(range(100))):
    """A group with one prompt; the second half of it was routed otherwise at token `flip`."""
    sources, turns_of = [], {}
    for number in range(1, count + 1):
        other = number > count // 2

        def key(position, number=number, other=other):
            return position, number * (position >= len(prompt)), other * (position == flip)

        turns_of[number] = [routed(shape, prompt, [7, 8, number], key, seed=number)]
        sources.append(source(number, 1, float(number), turns_of[number]))
    return sources, turns_of


@pytest.mark.parametrize(
    ("flip", "physical", "unshared"),
    [
        (None, 99 + 4 * 4, 0),
        (99, 99 + 4 * 4, 0),  # the last prompt token is nobody's to share
        (98, 98 + 2 * 1 + 4 * 4, 1),
        (64, 64 + 2 * 35 + 4 * 4, 35),
        (63, 2 * 99 + 4 * 4, 99),  # 63 tokens are too few to share
        (0, 2 * 99 + 4 * 4, 99),
    ],
)
def test_sharing_stops_at_the_first_token_with_other_routes(flip, physical, unshared):
    sources, turns_of = siblings(NARROW, flip)
    packed = pack(msgspec.structs.replace(SPEC, row_length=1024), sources)
    assert (packed.manifest.physical_tokens, packed.manifest.unshared_tokens) == (physical, unshared)
    expected = {n: plain_sequences(t, NARROW) for n, t in turns_of.items()}
    check_batch(packed.tensors, packed.manifest, expected, packed.replay)


@pytest.mark.parametrize("layer", range(NARROW.layers))
def test_one_other_expert_in_any_layer_is_enough(layer):
    sources, turns_of = [], {}
    for number in (1, 2):
        rows = [chosen(NARROW, position) for position in range(101)]
        if number == 2:
            ids = rows[80][layer]
            ids[-1] = next(e for e in range(NARROW.experts) if e not in ids)
        turns_of[number] = [turn(range(100), [5, number], routes=encode_routes(rows, NARROW))]
        sources.append(source(number, 1, float(number), turns_of[number]))
    _, manifest, _ = pack(SPEC, sources)
    assert (manifest.logical_tokens - manifest.physical_tokens, manifest.unshared_tokens) == (80, 19)


@pytest.mark.parametrize("shape", [NARROW, WIDE, RouteShape(layers=2, topk=8, experts=128)], ids=str)
def test_the_order_of_a_token_s_experts_means_nothing(shape):
    """The stock field has them by weight: a swap is no other choice, so nothing stops being shared."""
    rng, rows = random.Random(5), [chosen(shape, position) for position in range(101)]
    turns_of = {}
    for number in range(1, 5):
        swapped = [[rng.sample(ids, len(ids)) for ids in row] for row in rows]
        turns_of[number] = [turn(range(100), [5, number], routes=encode_routes(swapped, shape))]
    sources = [source(number, 1, float(number), turns) for number, turns in turns_of.items()]
    packed = pack(msgspec.structs.replace(SPEC, routes=shape), sources)
    manifest = packed.manifest
    assert (manifest.logical_tokens - manifest.physical_tokens, manifest.unshared_tokens) == (3 * 99, 0)
    ids = packed.replay.tensors["routes"]
    assert (np.diff(ids.astype(int)) > 0).all(), "ids that do not ascend"
    check_batch(packed.tensors, manifest, {n: plain_sequences(t, shape) for n, t in turns_of.items()}, packed.replay)


@pytest.mark.parametrize("topk", range(1, 12))
def test_experts_ascend_as_numpy_sorts_them(topk):
    ids = np.random.default_rng(topk).integers(0, 60000, (50, 3, topk)).astype("<u2")
    assert np.array_equal(routes.ascending(ids), np.sort(ids, axis=-1))


def test_tokens_unshared_are_counted_in_the_rows_that_there_are():
    sources, _ = siblings(NARROW, flip=0, count=8)
    _, manifest, _ = pack(msgspec.structs.replace(SPEC, row_length=512), sources)
    assert manifest.rows == 1 and manifest.unshared_tokens == 99
    _, manifest, _ = pack(msgspec.structs.replace(SPEC, row_length=116), sources)  # each kind has a row of its own
    assert manifest.rows == 2 and manifest.unshared_tokens == 0


def test_the_last_sampled_token_of_a_turn_is_covered_by_the_next():
    first = routed(NARROW, range(10), [1, 2, 3], ("a",), seed=1)
    second = routed(NARROW, [*range(10), 1, 2, 3, 4], [5, 6], ("b",), seed=2)
    turns_of = {n: [first, second] for n in (1, 2)}
    packed = pack(SPEC, [source(n, 1, float(n), turns) for n, turns in turns_of.items()])
    (sequence,) = plain_sequences(turns_of[1], NARROW)
    key = [("a", p, t) for p, t in enumerate([*range(10), 1, 2])] + [("b", 12, 3), ("b", 13, 4), ("b", 14, 5)]
    assert [entry[5] for entry in sequence] == [
        tuple(tuple(sorted(ids)) for ids in chosen(NARROW, *k)) for k in key
    ] + [None]
    check_batch(packed.tensors, packed.manifest, {1: [sequence], 2: [sequence]}, packed.replay)
    assert packed.replay.manifest.tokens - packed.replay.manifest.covered == 2


def test_a_last_token_that_was_captured_is_covered():
    turns_of = {n: [routed(NARROW, range(10), [1, n], short=False, seed=n)] for n in (1, 2)}
    packed = pack(SPEC, [source(n, 1, float(n), turns) for n, turns in turns_of.items()])
    assert packed.replay.manifest.covered == packed.replay.manifest.tokens == packed.manifest.physical_tokens
    expected = {n: plain_sequences(t, NARROW) for n, t in turns_of.items()}
    check_batch(packed.tensors, packed.manifest, expected, packed.replay)


def test_a_turn_without_a_new_token_needs_no_routes():
    nothing = turn([*range(10), 1, 2, 3], [], routes_start=99)
    turns = [GOOD, nothing, NEXT]
    packed = pack(SPEC, [source(n, 1, float(n), turns) for n in (1, 2)])
    check_batch(*packed[:2], {n: plain_sequences(turns, NARROW) for n in (1, 2)}, packed.replay)
    assert refused([GOOD, nothing, changed(NEXT, routes=b"")])[0] == "turns[2].routes[12]"


def test_routes_change_nothing_of_a_batch_without_replay():
    """Equal routes everywhere share what equal tokens share: the batch's own bytes are those of a dense run."""
    with_routes, turns_of = siblings(NARROW)
    plain = [
        source(n, 1, float(n), [msgspec.structs.replace(t, routes=b"") for t in turns]) for n, turns in turns_of.items()
    ]
    dense = pack(msgspec.structs.replace(SPEC, routes=None), plain)
    replayed = pack(SPEC, with_routes)
    assert serialise(dense.tensors) == serialise(replayed.tensors) and dense.replay is None
    assert (dense.manifest.replay, dense.manifest.unshared_tokens) == ("", 0)


def test_the_bundle_s_bytes_are_pinned():
    """A change of these bytes needs a new PACKER version."""
    found = []
    for shape in (NARROW, WIDE):
        packed = pack(msgspec.structs.replace(SPEC, routes=shape), siblings(shape, 70)[0])
        found.append(digest(serialise(packed.replay.tensors))[:16])
    assert found == ["99adb6d3f8505867", "6ed5d8e6ab7afb64"]


# ---- refusals -------------------------------------------------------------------------------------------------------


def refused(turns, spec=SPEC):
    """(position, message) of the refusal of a trajectory with these turns beside a good one."""
    good = [routed(spec.routes, range(10), [1, 2])] if spec.routes else [turn(range(10), [1, 2])]
    with pytest.raises(PackError) as caught:
        pack(spec, [source(4, 1, 0.0, good), source(5, 1, 1.0, turns)])
    assert caught.value.trajectory == 5 and str(caught.value).startswith(f"trajectory 5: {caught.value.position}: ")
    return caught.value.position, str(caught.value)


GOOD = routed(NARROW, range(10), [1, 2, 3])
NEXT = routed(NARROW, [*range(10), 1, 2, 3, 4], [5, 6], start=12)
ROW = NARROW.row_bytes


def changed(good, **fields):
    return msgspec.structs.replace(good, **fields)


def with_ids(good, row, layer, *ids):
    data = bytearray(good.routes)
    at = (row * NARROW.layers + layer) * NARROW.topk
    data[at : at + NARROW.topk] = bytes(ids)
    return changed(good, routes=bytes(data))


def test_what_the_refusals_change_is_good():
    turns = {n: [GOOD, NEXT] for n in (1, 2)}
    packed = pack(SPEC, [source(n, 1, float(n), t) for n, t in turns.items()])
    check_batch(*packed[:2], {n: plain_sequences(t, NARROW) for n, t in turns.items()}, packed.replay)


@pytest.mark.parametrize(
    ("turns", "position", "says"),
    [
        ([changed(GOOD, routes=GOOD.routes[:-1])], "turns[0].routes", "not a whole number of rows of 6 bytes"),
        ([changed(GOOD, routes=GOOD.routes[:-ROW])], "turns[0].routes", "11 rows from token 0 of 13"),
        ([changed(GOOD, routes=GOOD.routes + 2 * GOOD.routes[:ROW])], "turns[0].routes", "14 rows from token 0 of 13"),
        ([GOOD, changed(NEXT, routes_start=11)], "turns[1].routes", "from token 11 of 16"),
        ([changed(GOOD, routes_start=-1, routes=GOOD.routes + GOOD.routes[:ROW])], "turns[0].routes_start", "is -1"),
        ([changed(GOOD, routes_start=3, routes=GOOD.routes[3 * ROW :])], "turns[0].routes[0]", "begin at token 3"),
        ([GOOD, changed(NEXT, routes_start=13, routes=NEXT.routes[ROW:])], "turns[1].routes[12]", "begin at token 13"),
        ([changed(GOOD, routes=b"")], "turns[0].routes[0]", "this turn has none"),
        ([GOOD, changed(NEXT, routes=b"")], "turns[1].routes[12]", "this turn has none"),
        ([GOOD, turn([*range(10), 1, 2, 3], [4])], "turns[1].routes[12]", "this turn has none"),
        ([with_ids(GOOD, 4, 2, 3, 3)], "turns[0].routes[4]", "[3, 3] are not distinct"),
        ([with_ids(GOOD, 0, 0, 0, 7)], "turns[0].routes[0]", "expert id 7"),
        ([GOOD, with_ids(NEXT, 2, 1, 5, 5)], "turns[1].routes[14]", "not distinct"),
        ([GOOD, with_ids(NEXT, 0, 1, 255, 0)], "turns[1].routes[12]", "expert id 255"),
        ([changed(GOOD, routes=bytes(len(GOOD.routes)))], "turns[0].routes[0]", "is 0"),
        ([GOOD, changed(NEXT, routes=bytes(len(NEXT.routes)))], "turns[1].routes[12]", "[0, 0] are not distinct"),
    ],
)  # fmt: skip
def test_routes_that_no_engine_captured_are_refused_by_name(turns, position, says):
    found, message = refused(turns)
    assert found == position and says in message, message


def test_nothing_captured_is_seen_with_one_expert_a_token_too():
    shape = RouteShape(layers=2, topk=1, experts=4)
    turns = [changed(routed(shape, range(40), [1, 2]), routes=bytes(41 * 2))]
    position, message = refused(turns, msgspec.structs.replace(SPEC, routes=shape))
    assert position == "turns[0].routes[0]" and "captured nothing" in message


def test_a_later_turn_may_be_routed_to_expert_0_alone():
    """What ingest keeps of a turn may be one row; with one expert a token it may well be all zero."""
    shape = RouteShape(layers=1, topk=1, experts=4)
    first = changed(routed(shape, range(10), [1]), routes=bytes([1, 0] * 5))
    then = changed(routed(shape, [*range(10), 1], [2], start=10), routes=b"\0")
    spec = msgspec.structs.replace(SPEC, routes=shape)
    packed = pack(spec, [source(n, 1, float(n), [first, then]) for n in (1, 2)])
    check_batch(*packed[:2], {n: plain_sequences([first, then], shape) for n in (1, 2)}, packed.replay)


def test_ids_above_255_are_checked_as_two_bytes():
    spec = msgspec.structs.replace(SPEC, routes=WIDE)
    good = routed(WIDE, range(10), [1, 2])
    wrong = changed(good, routes=good.routes[:-2] + (300).to_bytes(2, "little"))
    position, message = refused([wrong], spec)
    assert position == "turns[0].routes[10]" and "expert id 300" in message


def test_routes_in_a_run_that_replays_none_are_refused():
    spec = msgspec.structs.replace(SPEC, routes=None)
    position, message = refused([turn(range(10), [1, 2]), GOOD], spec)
    assert position == "turns[1].routes" and "replays no experts" in message


# ---- teeth ----------------------------------------------------------------------------------------------------------


def plant_off_by_one(patch):
    real = replay._routes
    patch.setattr(replay, "_routes", lambda sequence: np.roll(real(sequence), 1, axis=0))


def plant_last_capture_wins(patch):
    def add(self, turn, path):
        rows = len(turn.routes) // self.shape.row_bytes
        whole = b"".join(self.pieces)[: turn.routes_start * self.shape.row_bytes] + turn.routes
        self.pieces, self.covered = [whole], turn.routes_start + rows

    patch.setattr(routes.Captured, "add", add)


def plant_sharing_not_stopped(patch):
    patch.setattr(forest, "build_tree", lambda kept, by_routes=True: tree.build_tree(kept, by_routes=False))


def plant_layers_swapped(patch):
    real = replay._routes
    patch.setattr(replay, "_routes", lambda sequence: np.ascontiguousarray(real(sequence)[:, ::-1]))


def plant_padding_of_zeros(patch):
    real = replay.fill_routes

    def zeros(*args):
        tensors = real(*args)
        tensors["routes"][:, tensors["covered"] == 0] = 0
        return tensors

    patch.setattr("artd.packing.batch.fill_routes", zeros)


def plant_all_covered(patch):
    real = replay.fill_routes

    def all_covered(*args):
        tensors = real(*args)
        tensors["covered"][:] = 1
        return tensors

    patch.setattr("artd.packing.batch.fill_routes", all_covered)


@pytest.mark.parametrize(
    "plant",
    [
        plant_off_by_one, plant_last_capture_wins, plant_sharing_not_stopped, plant_layers_swapped,
        plant_padding_of_zeros, plant_all_covered,
    ],
)  # fmt: skip
def test_planted_bugs_go_red(monkeypatch, plant):
    sources, turns_of = siblings(NARROW, flip=80)
    for number, turns in turns_of.items():  # each goes on, and its second turn was routed otherwise all along
        turns.append(routed(NARROW, [*range(100), 7, 8, number, 4], [5, 6], ("again",), seed=number))
    sources = [source(n, 1, float(n), turns) for n, turns in turns_of.items()]
    expected = {n: plain_sequences(t, NARROW) for n, t in turns_of.items()}
    good = pack(SPEC, sources)
    check_batch(*good[:2], expected, good.replay)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        bad = pack(SPEC, sources)
        check_batch(*bad[:2], expected, bad.replay)
