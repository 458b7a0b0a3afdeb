"""routes: the fast check of expert ids against a plain one, and the rules of a trajectory's routes."""

from __future__ import annotations

import random

import msgspec
import pytest

from artd.core.fields import InvalidField
from artd.core.validate import check_turns
from artd_schema.data import routes
from artd_schema.data.route_rules import trim_routes
from artd_schema.data.routes import BadRoutes, check_routes
from artd_schema.data.trajectory import RouteShape, Turn
from tests.fakes.routes import SHAPE, WIDE, layer_rows, put, rows_of
from tests.fakes.rows import VOCAB, floats, ids

SHAPES = [
    SHAPE,
    WIDE,
    RouteShape(layers=1, topk=1, experts=4),
    RouteShape(layers=2, topk=8, experts=128),
    RouteShape(layers=1, topk=3, experts=255),
    RouteShape(layers=2, topk=3, experts=256),
    RouteShape(layers=2, topk=3, experts=257),
    RouteShape(layers=1, topk=2, experts=512),
    RouteShape(layers=1, topk=2, experts=65536),
]


# ---- ids ----------------------------------------------------------------------------------------------------------------


def plain(data: bytes, shape: RouteShape) -> int | None:
    """The first bad row, by the book."""
    for row, layers in enumerate(layer_rows(shape, data)):
        for chosen in layers:
            if len(set(chosen)) < shape.topk or max(chosen) >= shape.experts:
                return row
    return None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_changed_id_is_judged_as_a_plain_check_does(shape, monkeypatch):
    monkeypatch.setattr(routes, "CHUNK", 5 * shape.row_bytes)  # several chunks
    rng, bad = random.Random(str(shape)), 0
    good = rows_of(shape, 0, 13)
    assert check_routes(good, shape) == 13
    limit = 256**shape.width - 1
    edges = [0, 1, 127, 128, 255, 256, shape.experts - 1, shape.experts, shape.experts + 1, limit]
    for _ in range(300):
        row, layer, k = rng.randrange(13), rng.randrange(shape.layers), rng.randrange(shape.topk)
        other = layer_rows(shape, good)[row][layer][rng.randrange(shape.topk)]
        value = min(rng.choice([*edges, other, rng.randrange(limit + 1)]), limit)
        data = put(shape, good, row, layer, k, value)
        expected = plain(data, shape)
        if expected is None:
            assert check_routes(data, shape) == 13
            continue
        bad += 1
        with pytest.raises(BadRoutes, match=f"MoE layer {layer}: expert id") as caught:
            check_routes(data, shape)
        assert caught.value.row == expected == row
    assert bad > 20 or shape.experts == 65536


def test_two_bad_rows_name_the_first():
    data = put(SHAPE, put(SHAPE, rows_of(SHAPE, 0, 9), 7, 0, 0, 9), 3, 2, 1, 200)
    with pytest.raises(BadRoutes, match="MoE layer 2: expert id 200, but there are 8") as caught:
        check_routes(data, SHAPE)
    assert caught.value.row == 3


@pytest.mark.parametrize("shape", [SHAPE, WIDE, RouteShape(layers=3, topk=1, experts=4)], ids=str)
def test_all_zero_is_no_capture(shape):
    with pytest.raises(BadRoutes, match="captured nothing"):
        check_routes(bytes(22 * shape.row_bytes), shape)


@pytest.mark.parametrize("experts", [4, 300])
def test_with_one_expert_a_token_a_few_may_all_be_expert_0(experts):
    shape = RouteShape(layers=4, topk=1, experts=experts)
    assert check_routes(bytes(16 * shape.row_bytes), shape) == 16
    with pytest.raises(BadRoutes, match="captured nothing"):
        check_routes(bytes(17 * shape.row_bytes), shape)
    assert check_routes(put(shape, bytes(17 * shape.row_bytes), 16, 3, 0, 1), shape) == 17


def test_the_only_expert_is_expert_0():
    shape = RouteShape(layers=2, topk=1, experts=1)
    assert check_routes(bytes(1000 * shape.row_bytes), shape) == 1000


def test_half_a_row_and_none():
    with pytest.raises(BadRoutes, match="17 bytes are not a whole number of rows of 6 bytes"):
        check_routes(bytes(17), SHAPE)
    assert check_routes(b"", SHAPE) == 0


# ---- turns --------------------------------------------------------------------------------------------------------------


def turn(prompt: list[int], sampled: list[int], rows: int | None = None, start: int = 0, salt: int = 0, **more) -> Turn:
    """rows None: all but the last token's."""
    count = len(prompt) + len(sampled) - 1 - start if rows is None else rows
    fields = {"routes": rows_of(SHAPE, start, count, salt), "routes_start": start} | more
    return Turn(prompt_ids=ids(*prompt), token_ids=ids(*sampled), logprobs=floats(*[-1.0] * len(sampled)), **fields)


def check(*turns: Turn, trained: bool = True, shape: RouteShape | None = SHAPE) -> int:
    return check_turns(turns, VOCAB, trained, None, shape)


FIRST = turn([1, 2, 3], [4, 5])
GOOD = FIRST.routes
NEXT = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "turns",
    [
        (FIRST,),
        (turn([1, 2, 3], [4, 5], rows=5),),
        (FIRST, turn(NEXT, [7])),
        (FIRST, turn(NEXT, [7], start=4)),
        (FIRST, turn(NEXT, [7], start=4, rows=3)),
        (turn([1, 2, 3], [4, 5], rows=5), turn(NEXT, [7], start=5)),
        (FIRST, turn(NEXT, [7], start=4), turn([*NEXT, 7, 8], [9], start=6)),
        (FIRST, turn([9, 9], [7])),
        (FIRST, turn([9, 9], [7]), turn([9, 9, 7], [8], start=2)),
        (turn([1, 2, 3], [4, 5], rows=5), turn([1, 2, 3, 4, 5], [6], routes=b"")),
    ],
)
def test_what_covers_every_token_but_the_last_is_trained(turns):
    assert check(*turns) == sum(len(t.token_ids) // 4 for t in turns)


BAD = [
    ("turns[0].routes", "23 bytes are not a whole number of rows of 6 bytes", (turn([1, 2, 3], [4, 5], routes=GOOD[:-1]),)),
    ("turns[0].routes", "has 3 rows from token 0 of 5", (turn([1, 2, 3], [4, 5], rows=3),)),
    ("turns[0].routes", "has 6 rows from token 0 of 5", (turn([1, 2, 3], [4, 5], rows=6),)),
    ("turns[1].routes", "has 1 rows from token 4 of 7", (FIRST, turn(NEXT, [7], start=4, rows=1))),
    ("turns[0].routes_start", "is -1", (turn([1, 2, 3], [4, 5], routes_start=-1),)),
    ("turns[0].routes[2]", "expert id 8, but", (turn([1, 2, 3], [4, 5], routes=put(SHAPE, GOOD, 2, 1, 0, 8)),)),
    ("turns[0].routes[3]", "not distinct",
     (turn([1, 2, 3], [4, 5], routes=put(SHAPE, GOOD, 3, 0, 0, layer_rows(SHAPE, GOOD)[3][0][1])),)),
    ("turns[1].routes[5]", "expert id 99", (FIRST, turn(NEXT, [7], start=4, routes=put(SHAPE, GOOD[:12], 1, 0, 0, 99)))),
    ("turns[0].routes[0]", "captured nothing", (turn([1, 2, 3], [4, 5], routes=bytes(24)),)),
]  # fmt: skip

GAPS = [
    ("turns[0].routes[0]", "this turn has none", (turn([1, 2, 3], [4, 5], routes=b""),)),
    ("turns[0].routes[0]", "begin at token 1", (turn([1, 2, 3], [4, 5], start=1),)),
    ("turns[1].routes[4]", "begin at token 5", (FIRST, turn(NEXT, [7], start=5))),
    ("turns[1].routes[4]", "this turn has none", (FIRST, turn(NEXT, [7], routes=b""))),
    ("turns[1].routes[0]", "begin at token 4", (FIRST, turn([9, *NEXT[1:]], [7], start=4))),
    ("turns[2].routes[0]", "begin at token 4", (FIRST, turn([9], [9]), turn(NEXT, [7], start=4))),
    ("turns[0].routes[0]", "this turn has none", (turn([1, 2, 3], [4, 5], routes=b""), turn(NEXT, [7]))),
    ("turns[1].routes[4]", "this turn has none", (FIRST, turn([1, 2, 3, 4, 5], [6], routes=b""))),
]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("field", "text", "turns"), BAD)
def test_routes_that_are_wrong_are_named_whatever_the_split(field, text, turns, trained):
    with pytest.raises(InvalidField) as caught:
        check(*turns, trained=trained)
    assert caught.value.field == field and text in str(caught.value), str(caught.value)


@pytest.mark.parametrize(("count", "text"), [(5, "more layers than the 3 MoE layers"), (6, "of two bytes each")])
def test_routes_of_another_form_are_told_from_a_wrong_number_of_rows(count, text):
    """The dense layers are in them, as in vLLM's own array; or they were made for a model of more experts."""
    rows = len(FIRST.routes) // SHAPE.row_bytes
    with pytest.raises(InvalidField, match=text):
        check(msgspec.structs.replace(FIRST, routes=bytes([1, 2]) * (rows * count * SHAPE.topk // 2)))


@pytest.mark.parametrize(("field", "text", "turns"), GAPS)
def test_a_token_without_routes_is_named_and_only_matters_where_it_is_trained(field, text, turns):
    with pytest.raises(InvalidField) as caught:
        check(*turns)
    assert caught.value.field == field and text in str(caught.value), str(caught.value)
    assert "expert_replay=false" in str(caught.value) and "by reference" in str(caught.value)
    assert check(*turns, trained=False) > 0


@pytest.mark.parametrize("trained", [True, False])
def test_a_run_that_replays_no_experts_takes_no_routes(trained):
    with pytest.raises(InvalidField, match="dense, or it was made with expert_replay=false") as caught:
        check(turn([9], [9], routes=b""), FIRST, trained=trained, shape=None)
    assert caught.value.field == "turns[1].routes"


# ---- each token once ----------------------------------------------------------------------------------------------------


def test_later_turns_keep_only_what_no_earlier_one_told():
    later = turn(NEXT, [7, 8], salt=1)
    last = turn([*NEXT, 7, 8], [9], rows=9, salt=2)
    other = turn([1, 2, 9], [7], salt=3)
    first, second, third, fourth = trim_routes([FIRST, later, last, other], SHAPE)
    assert first == FIRST and fourth == other
    assert second == msgspec.structs.replace(later, routes=rows_of(SHAPE, 4, 3, 1), routes_start=4)
    assert third == msgspec.structs.replace(last, routes=rows_of(SHAPE, 7, 2, 2), routes_start=7)
    assert check(first, second, third, fourth) == 6


def test_a_turn_that_tells_nothing_new_keeps_no_routes():
    whole, again = turn([1, 2, 3], [4, 5], rows=5), turn([1, 2, 3, 4, 5], [6])
    assert trim_routes([whole, again], SHAPE) == [whole, msgspec.structs.replace(again, routes=b"", routes_start=0)]
    assert check(*trim_routes([whole, again], SHAPE)) == 3


@pytest.mark.parametrize("seed", range(40))
def test_trimming_loses_no_first_capture(seed):
    """By the book: what each position of each sequence gets, before and after."""
    rng = random.Random(seed)
    turns, sequence = [], []
    for number in range(5):
        if rng.random() < 0.25:
            sequence = [50 + number]
        prompt = [*sequence, *(rng.randrange(40) for _ in range(rng.randrange(3)))] or [1]
        sampled = [rng.randrange(40) for _ in range(rng.randrange(1, 4))]
        start = rng.randrange(len(prompt)) if rng.random() < 0.5 else 0
        whole = rng.random() < 0.5
        rows = len(prompt) + len(sampled) - start - (not whole)
        turns.append(turn(prompt, sampled, rows=rows if rng.random() < 0.9 else 0, start=start, salt=number))
        sequence = prompt + sampled
    assert _captures(trim_routes(turns, SHAPE)) == _captures(turns)


def _captures(turns):
    found, sequence, part = {}, b"", 0
    for each in turns:
        if not each.prompt_ids.startswith(sequence):
            part += 1
        for j, row in enumerate(layer_rows(SHAPE, each.routes)):
            found.setdefault((part, each.routes_start + j), row)
        sequence = each.prompt_ids + each.token_ids
    return found
