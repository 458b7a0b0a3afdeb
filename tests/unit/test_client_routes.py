"""Routes by value: nested sequences, arrays and bytes become the same column; a bad id is named by its place."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import artd_client
from artd_client import turn
from tests.fakes.routes import SHAPE, WIDE, layer_rows, rows_of

ARGUMENTS = ([1, 2, 3], [4, 5], [-1.0, -2.0])


class Tensor:
    """What torch's looks like from here: no buffer, but tolist."""

    def __init__(self, rows):
        self.rows = rows

    def tolist(self):
        return self.rows


@pytest.mark.parametrize("shape", [SHAPE, WIDE])
def test_every_form_makes_the_same_bytes(shape):
    data = rows_of(shape, 0, 4)
    nested = layer_rows(shape, data)
    narrow = np.array(nested, np.uint8 if shape.width == 1 else np.uint16)
    forms = [nested, [tuple(map(tuple, row)) for row in nested], narrow, np.array(nested), narrow[::-1][::-1],
             np.asfortranarray(narrow), np.array(nested, np.int32), list(np.array(nested)), Tensor(nested)]  # fmt: skip
    for form in forms:
        assert turn(*ARGUMENTS, routes=form, experts=shape.experts).routes == data
    for form in (data, bytearray(data)):
        made = turn(*ARGUMENTS, routes=form, routes_start=2)
        assert (made.routes, made.routes_start) == (data, 2) and isinstance(made.routes, bytes)


def test_256_experts_still_fit_a_byte():
    assert turn(*ARGUMENTS, routes=[[[255, 1]]], experts=256).routes == b"\xff\x01"
    assert turn(*ARGUMENTS, routes=[[[256, 1]]], experts=257).routes == b"\x00\x01\x01\x00"


def test_without_routes_there_are_none():
    made = turn(*ARGUMENTS)
    assert (made.routes, made.routes_start) == (b"", 0)
    assert turn(*ARGUMENTS, routes=[], experts=8).routes == b""


@pytest.mark.parametrize(
    ("ids", "experts", "field", "text"),
    [
        ([[[0, 1]]], 0, "experts", "is 0"),
        ([[[0, 1]]], 70_000, "experts", "70000"),
        ([[[0, 1]], [[0, 8]]], 8, "routes[1][0]", "[0, 8] are not ids of 8 experts"),
        ([[[0, 1], [0, -1]]], 8, "routes[0][1]", "[0, -1]"),
        ([[[0, 1.5]]], 8, "routes[0][0]", "1.5"),
        ([[[0, 1]], [[0, 1, 2]]], 8, "routes[1][0]", "has 3 ids, not 2"),
        ([[[0, 1]], [[0, 1], [1, 2]]], 8, "routes[1]", "has 2 layers, not 1"),
        ([[0, 1]], 8, "routes[0]", "[layers][topk]"),
        ([3], 8, "routes[0]", "[layers][topk]"),
        ([[]], 8, "routes[0]", "[layers][topk]"),
        (np.zeros((2, 2), np.uint8), 8, "routes[0]", "[layers][topk]"),
        ([[[0, 300]]], 300, "routes[0][0]", "300"),
    ],
)
def test_bad_routes_name_their_place(ids, experts, field, text):
    with pytest.raises(artd_client.Invalid) as caught:
        turn(*ARGUMENTS, routes=ids, experts=experts)
    assert caught.value.field == field and text in str(caught.value), str(caught.value)


def test_numpy_is_not_needed():
    code = "import sys, artd_client; artd_client.turn([1], [2], [-1.0], routes=[[[0, 1]]], experts=4); print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
