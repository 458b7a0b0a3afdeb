"""Which sample an equal body is: every number once, a failed call's again, and bounded memory."""

from __future__ import annotations

import pytest

from artd_client.samples import KEPT, Samples


def take(samples, body, fails=False):
    with pytest.raises(OSError) if fails else samples.number(body) as number:
        if not fails:
            return number
        with samples.number(body):
            raise OSError


def test_equal_bodies_are_counted():
    samples = Samples()
    assert [take(samples, "a") for _ in range(4)] == [0, 1, 2, 3]
    assert take(samples, "b") == 0


def test_calls_under_way_have_numbers_of_their_own():
    samples = Samples()
    with samples.number("a") as first, samples.number("a") as second:
        assert {first, second, take(samples, "a")} == {0, 1, 2}


def test_the_number_of_a_failed_call_is_the_next_one():
    samples = Samples()
    assert take(samples, "a") == 0
    take(samples, "a", fails=True)
    assert [take(samples, "a"), take(samples, "a")] == [1, 2]


def test_of_several_failed_calls_the_first_is_repeated_first():
    samples = Samples()
    with samples.number("a") as zero:
        with pytest.raises(OSError), samples.number("a") as one, samples.number("a") as two:
            raise OSError
        assert (zero, one, two) == (0, 1, 2)
    assert [take(samples, "a") for _ in range(3)] == [1, 2, 3]


def test_memory_is_bounded_and_what_came_last_is_known():
    samples = Samples(kept=3)
    for body in "abc":
        take(samples, body)
    assert take(samples, "a") == 1, "it is used: now `b` is the oldest"
    take(samples, "d")
    assert len(samples._bodies) == 3
    assert (take(samples, "a"), take(samples, "d"), take(samples, "c")) == (2, 1, 1)
    assert take(samples, "b") == 0


def test_a_call_under_way_may_be_forgotten_and_fail():
    samples = Samples(kept=1)
    with pytest.raises(OSError), samples.number("a"):
        take(samples, "b")
        raise OSError
    assert list(samples._bodies) == ["b"]


def test_a_run_that_submits_for_ever_stays_small():
    samples = Samples()
    for number in range(KEPT + 100):
        take(samples, str(number))
    assert len(samples._bodies) == KEPT
