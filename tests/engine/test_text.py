"""What a client sees of a stream's tokens: stop strings and stop tokens, whatever the pieces. One token is one character."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from artd_workers.engines.vllm import stops
from artd_workers.engines.vllm.text.cut import Cut
from artd_workers.engines.vllm.text.merge import keep_routes


def pieces(text: str, size: int, **ended: Any) -> list[dict[str, Any]]:
    """The events of a choice that says `text`."""
    found: list[dict[str, Any]] = [
        {"token_ids": [ord(char) for char in text[start : start + size]], "finish_reason": None, "stop_reason": None}
        for start in range(0, len(text), size)
    ]
    found[-1].update(ended)
    return found


def shown(cut: Cut, events: list[dict[str, Any]]) -> list[str]:
    return [cut.push("".join(map(chr, cut.shown_ids(one))), one) for one in events]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
@pytest.mark.parametrize(
    ("text", "params", "ended"),
    [
        ("ab. A", {"stop": [". A"]}, {"finish_reason": "stop", "stop_reason": ". A"}),
        ("a. ab. A", {"stop": ". A"}, {"finish_reason": "stop", "stop_reason": ". A"}),
        ("ab. A", {"stop": [". A"], "include_stop_str_in_output": True}, {"finish_reason": "stop", "stop_reason": ". A"}),
        ("ab$", {"stop": [". A"]}, {"finish_reason": "stop", "stop_reason": None}),
        ("ab!", {"stop_token_ids": [33]}, {"finish_reason": "stop", "stop_reason": 33}),
        ("ab. ", {"stop": [". A"]}, {"finish_reason": "length", "stop_reason": None}),
        ("$", {}, {"finish_reason": "stop", "stop_reason": None}),
    ],
)  # fmt: skip
def test_pieces_make_the_text_of_the_whole(size: int, text: str, params: dict[str, Any], ended: dict[str, Any]) -> None:
    whole = {"token_ids": [ord(char) for char in text]} | ended
    said = text[:-1] if stops.ends_in_stop_token(whole, params) else text
    assert "".join(shown(Cut(params), pieces(text, size, **ended))) == stops.cut_text(said, whole, params)


def test_no_part_of_a_stop_string_is_ever_shown() -> None:
    events = pieces("one<|stop|>", 1, finish_reason="stop", stop_reason="<|stop|>")
    assert "".join(shown(Cut({"stop": ["<|stop|>"]}), events)) == "one"


def test_what_a_token_says_behind_the_stop_string_is_no_text() -> None:
    cut, last = Cut({"stop": [". A", "zzzzzz"]}), {"token_ids": [2], "finish_reason": "stop", "stop_reason": ". A"}
    begun = cut.push("abcdefgh", {"token_ids": [1], "finish_reason": None})
    assert begun == "abc"
    assert begun + cut.push(". A and", last) == "abcdefgh"


def test_without_a_stop_string_nothing_is_held_back() -> None:
    assert shown(Cut({}), pieces("abc", 1, finish_reason="length")) == ["a", "b", "c"]


def test_vllm_before_032_does_not_tell_what_stopped_it() -> None:
    events = [{"token_ids": [ord(char)], "finish_reason": None} for char in "ab. A"]
    events[-1]["finish_reason"] = "stop"
    assert "".join(shown(Cut({"stop": [". A"]}), events)) == "ab"


def test_pieces_that_vllm_joins_keep_their_routed_experts() -> None:
    class Output:
        """Joins as `vllm.outputs.RequestOutput` of 0.25 does."""

        def __init__(self, *pieces: Any) -> None:
            self.outputs = list(pieces)

        def add(self, newer: Output, aggregate: bool) -> None:
            for piece, more in zip(self.outputs, newer.outputs, strict=True):
                piece.token_ids += more.token_ids

    keep_routes(Output)
    held = Output(*(SimpleNamespace(index=index, token_ids=[1], routed_experts=None) for index in (0, 1)))
    held.add(
        Output(*(SimpleNamespace(index=index, token_ids=[2], routed_experts=f"r{index}") for index in (0, 1))), True
    )
    held.add(Output(*(SimpleNamespace(index=index, token_ids=[3], routed_experts=None) for index in (0, 1))), True)
    assert [(one.token_ids, one.routed_experts) for one in held.outputs] == [([1, 2, 3], "r0"), ([1, 2, 3], "r1")]
