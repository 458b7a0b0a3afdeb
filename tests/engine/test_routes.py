"""The row-book of captured routes: by position, first capture first, and nothing held for ever. No vLLM, no engine."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artd_schema.data.trajectory import RouteShape
from artd_workers.engines.vllm.tokens.row_book import RouteBook, Rows, owner_of

SHAPE = RouteShape(layers=3, topk=2, experts=8)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def name(request: str, choice: int = 0, many: bool = False) -> str:
    """The worker's name of a choice, as vLLM 0.32 makes it."""
    return f"{f'{choice}_' if many else ''}generate-tokens-{request}-0123abcd"


def rows(first: int, count: int, salt: int = 0, shape: RouteShape = SHAPE) -> Rows:
    """Rows of tokens first .. first + count - 1, told apart by position and salt."""
    size = shape.layers * shape.topk
    one = [[(token * 31 + salt * 7 + i) % shape.experts for i in range(size)] for token in range(first, first + count)]
    return np.array(one, f"<u{shape.width}").reshape(count, shape.layers, shape.topk)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> RouteBook:
    return RouteBook(SHAPE, held_s=60.0, clock=clock)


@pytest.mark.parametrize(
    ("worker_id", "owner"),
    [
        ("generate-tokens-chatcmpl-7-0-0123abcd", ("chatcmpl-7-0", 0)),
        ("2_generate-tokens-chatcmpl-7-0-0123abcd", ("chatcmpl-7-0", 2)),
        ("11_generate-tokens-a_b-0123abcd", ("a_b", 11)),
        ("generate-tokens-generate-tokens-x-0123abcd-0123abcd", ("generate-tokens-x-0123abcd", 0)),
        ("cmpl-88-0-0123abcd", None),
        ("generate-tokens-x", None),
        ("x_generate-tokens-x-0123abcd", None),
    ],
)
def test_a_sequence_is_named_after_its_request_and_choice(worker_id: str, owner: tuple[str, int] | None) -> None:
    assert owner_of(worker_id) == owner


def test_rows_of_a_sequence_come_together_and_go_once(book: RouteBook) -> None:
    book.add(name("r"), 0, rows(0, 5))
    for token in range(5, 9):
        book.add(name("r"), token, rows(token, 1))
    found = book.take(["r", "other"])
    assert list(found) == ["r#0"]
    np.testing.assert_array_equal(found["r#0"].rows, rows(0, 9))
    assert (found["r#0"].start, found["r#0"].recomputed) == (0, ())
    assert book.take(["r"]) == {}
    assert (book.held, book.bytes, book.known) == (0, 0, 0)


def test_wide_ids_keep_their_width() -> None:
    shape = RouteShape(layers=2, topk=4, experts=384)
    book = RouteBook(shape)
    book.add(name("r"), 0, rows(0, 3, shape=shape))
    taken = book.take(["r"])["r#0"].rows
    assert taken.tobytes() == rows(0, 3, shape=shape).tobytes()
    assert len(taken.tobytes()) == 3 * shape.row_bytes


def test_choices_of_a_request_are_told_apart(book: RouteBook) -> None:
    for choice in (2, 0, 1):
        book.add(name("r", choice, many=True), 0, rows(0, 4, salt=choice))
    book.add(name("s"), 0, rows(0, 4, salt=9))
    found = book.take(["r"])
    assert sorted(found) == ["r#0", "r#1", "r#2"]
    for choice in range(3):
        np.testing.assert_array_equal(found[f"r#{choice}"].rows, rows(0, 4, salt=choice))
    assert book.held == 1


def test_the_rows_given_may_be_used_again(book: RouteBook) -> None:
    buffer = rows(0, 4)
    book.add(name("r"), 0, buffer)
    buffer[:] = 0
    np.testing.assert_array_equal(book.take(["r"])["r#0"].rows, rows(0, 4))


def test_a_preempted_sequence_has_every_row_once_and_the_first(book: RouteBook) -> None:
    book.add(name("r"), 0, rows(0, 6))
    book.add(name("r"), 6, rows(6, 1))
    book.add(name("r"), 0, rows(0, 8, salt=1))  # its cache was lost: all of it again, and one token more
    book.add(name("r"), 8, rows(8, 1))
    taken = book.take(["r"])["r#0"]
    np.testing.assert_array_equal(taken.rows, np.concatenate([rows(0, 7), rows(7, 1, salt=1), rows(8, 1)]))
    assert taken.recomputed == ((0, 7),)


def test_chunks_of_a_second_computation_are_one_range(book: RouteBook) -> None:
    book.add(name("r"), 0, rows(0, 9))
    for first, last in ((0, 4), (4, 8), (8, 10)):
        book.add(name("r"), first, rows(first, last - first))
    taken = book.take(["r"])["r#0"]
    assert (len(taken.rows), taken.recomputed) == (10, ((0, 9),))


def test_rows_may_begin_after_a_cached_prefix(book: RouteBook) -> None:
    book.add(name("r"), 16, rows(16, 3))
    book.add(name("r"), 19, rows(19, 1))
    taken = book.take(["r"])["r#0"]
    assert taken.start == 16
    np.testing.assert_array_equal(taken.rows, rows(16, 4))


@pytest.mark.parametrize(("first", "count"), [(6, 2), (3, 2), (0, 1)])
def test_a_sequence_with_a_hole_has_no_rows(book: RouteBook, first: int, count: int) -> None:
    book.add(name("r"), 4, rows(4, 1))
    book.add(name("r"), first, rows(first, count))
    book.add(name("r"), 5, rows(5, 1))
    assert (book.take(["r"]), book.held, book.known) == ({}, 0, 1)
    book.end([name("r")])
    assert book.known == 0


def test_a_lost_step_gives_up_its_sequence(book: RouteBook) -> None:
    book.add(name("r"), 0, rows(0, 4))
    book.lose(name("r"))
    book.lose(name("s"))
    book.add(name("r"), 5, rows(5, 1))
    book.add(name("s"), 0, rows(0, 1))
    assert book.take(["r", "s"]) == {}
    book.end([name("r"), name("s")])
    assert book.known == 0


def test_other_sequences_are_not_held(book: RouteBook) -> None:
    book.add("cmpl-1-0-0123abcd", 0, rows(0, 4))
    book.lose("cmpl-1-0-0123abcd")
    book.end(["cmpl-1-0-0123abcd", "never-seen"])
    assert (book.held, book.bytes, book.known) == (0, 0, 0)


def test_a_sequence_that_ended_is_held_for_a_while(book: RouteBook, clock: Clock) -> None:
    for request in "ab":
        book.add(name(request), 0, rows(0, 4))
        book.end([name(request)])
        clock.now += 40
    book.sweep()
    assert book.take(["a"]) == {}
    assert list(book.take(["b"])) == ["b#0"]
    assert book.bytes == 0


def test_a_choice_waits_for_a_slow_sibling(clock: Clock) -> None:
    book = RouteBook(SHAPE, clock=clock)
    for choice in (0, 1):
        book.add(name("r", choice, many=True), 0, rows(0, 4))
    book.end([name("r", 0, many=True)])
    clock.now += 1800
    book.end([name("r", 1, many=True)])
    assert sorted(book.take(["r"])) == ["r#0", "r#1"]


def test_a_running_sequence_is_held_as_long_as_it_runs(book: RouteBook, clock: Clock) -> None:
    book.add(name("r"), 0, rows(0, 4))
    clock.now += 1e6
    book.add(name("r"), 4, rows(4, 1))
    book.sweep()
    assert len(book.take(["r"])["r#0"].rows) == 5


def test_the_oldest_goes_when_too_much_is_held(clock: Clock) -> None:
    one = 64 * SHAPE.row_bytes
    book = RouteBook(SHAPE, held_bytes=2 * one, clock=clock)
    for request in "abc":
        book.add(name(request), 0, rows(0, 64))
    assert book.held == 3, "what runs does not count"
    book.end([name("b")])
    book.end([name("a")])
    book.end([name("c")])
    assert (book.held, book.bytes) == (2, 2 * one)
    assert sorted(book.take("abc")) == ["a#0", "c#0"]
    assert book.bytes == 0


def test_dropped_rows_do_not_come_back(book: RouteBook, clock: Clock) -> None:
    """The drop may come before the request runs, while it runs, or when it has ended."""
    book.drop(["early"])
    for request in ("early", "running", "ended"):
        book.add(name(request), 0, rows(0, 4))
    book.end([name("ended")])
    book.drop(["running", "ended", "unknown"])
    assert (book.held, book.bytes) == (0, 0)
    for request in ("early", "running"):
        book.add(name(request), 4, rows(4, 1))
    assert (book.held, book.take(["early", "running", "ended"])) == (0, {})
    book.end([name("early"), name("running")])
    assert book.known == 0
    clock.now += 61
    book.sweep()
    book.add(name("early"), 0, rows(0, 1))
    assert book.held == 1, "names are not remembered for ever either"


def test_nothing_is_held_of_a_thousand_aborted_requests(book: RouteBook) -> None:
    rng = random.Random(5)
    for index in range(1000):
        order = rng.sample(["add", "drop", "end"], 3)
        for event in order:
            if event == "add" and order.index("end") > order.index("add"):  # what has ended computes nothing more
                book.add(name(f"r{index}"), 0, rows(0, 4))
            elif event == "drop":
                book.drop([f"r{index}"])
            elif event == "end":
                book.end([name(f"r{index}")])
    assert (book.held, book.bytes, book.known) == (0, 0, 0)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=12), st.integers(1, 16))
def test_any_history_of_chunks_and_preemptions_ends_alike(steps: list[tuple[int, bool]], chunk: int) -> None:
    """steps: tokens computed one after the other, and whether the cache is lost then, so that all comes again in chunks,
    and one token more."""
    book, done, again = RouteBook(SHAPE), 0, 0
    for count, lost in steps:
        book.add(name("r"), done, rows(done, count))
        done += count
        if lost:
            everything = np.concatenate([rows(0, done, salt=1), rows(done, 1)])
            for first in range(0, done + 1, chunk):
                book.add(name("r"), first, everything[first : first + chunk])
            done, again = done + 1, done
    taken = book.take(["r"])["r#0"]
    np.testing.assert_array_equal(taken.rows, rows(0, done))
    assert taken.recomputed == (((0, again),) if again else ())
