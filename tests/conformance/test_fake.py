"""The suite against the scripted vLLM server: every method and every failure, in seconds. Its stock push: tests/engine/test_stock.py."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from artd_schema.data.trajectory import RouteShape
from artd_workers.engines.adapter import Adapter

from . import answers, methods, pushes
from .bench import Bench
from .fake import FakeVllm
from .vllm import SPEECH

SHAPE = RouteShape(layers=2, topk=2, experts=8)


def bench(way: str, routes: RouteShape | None = None) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="artd-k-") as folder:
        made = Bench(FakeVllm(Path(folder), way, routes))
        yield made
        made.close()


@pytest.fixture(scope="module")
def merged() -> Iterator[Bench]:
    yield from bench("gloo")


@pytest.fixture(scope="module")
def lora() -> Iterator[Bench]:
    yield from bench("lora", SHAPE)


@pytest.fixture(scope="module")
def in_place() -> Iterator[Bench]:
    yield from bench("in_place")


@pytest.fixture(scope="module")
def staged() -> Iterator[Bench]:
    yield from bench("staged")


def quick(one: pushes.Failure) -> bool:
    """One of each sort in `make test`: a death in every phase of every way, and what only one way knows. The rest is slow: an
    error is an error at any call, and that any call ends by its deadline is seen without a push."""
    if one.how in ("error", "hang"):
        return one.way == "disk" and one.phase == "transfer"
    if one.damage:
        return one.damage == "tensor" or (one.way == "disk" and one.damage != "table")
    if one.way == "staged" and one.flaw:
        return one.flaw == "wrong"
    return one.phase != "open" and one.flaw != "short"


def failures(*ways: str) -> list[Any]:
    found = [one for way in ways for one in pushes.failures(SPEECH, way, every=True)]
    often = {one for way in ways for one in pushes.failures(SPEECH, way) if quick(one)}
    return [pytest.param(one, id=str(one), marks=() if one in often else pytest.mark.slow) for one in found]


@pytest.mark.parametrize("case", methods.MERGED + methods.GLOO, ids=lambda case: case.__name__)
def test_merged(merged: Bench, case: methods.Case) -> None:
    case(merged)


def test_no_method_is_left_out() -> None:
    asked = {name for name, value in vars(Adapter).items() if callable(value) and not name.startswith("_")}
    assert asked == {*answers.METHODS, "healthy"}


@pytest.mark.parametrize("fault", answers.FAULTS)
def test_a_server_that_does_not_do_its_part(merged: Bench, fault: Any) -> None:
    answers.answers(merged, fault)


@pytest.mark.parametrize("failure", failures("disk", "gloo"))
def test_a_merged_push_fails(merged: Bench, failure: pushes.Failure) -> None:
    pushes.fails(merged, failure)


def test_pushes_of_a_gpu_are_served(in_place: Bench, staged: Bench) -> None:
    for one in (in_place, staged):
        methods.live_pushes_are_served(one)


@pytest.mark.parametrize("failure", failures("in_place"))
def test_a_push_in_place_fails(in_place: Bench, failure: pushes.Failure) -> None:
    pushes.fails(in_place, failure)


@pytest.mark.parametrize("failure", failures("staged"))
def test_a_staged_push_fails(staged: Bench, failure: pushes.Failure) -> None:
    pushes.fails(staged, failure)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in methods.MERGED else ()) for case in methods.LORA],
    ids=lambda case: case.__name__,
)
def test_lora(lora: Bench, case: methods.Case) -> None:
    case(lora)


@pytest.mark.parametrize("failure", failures("lora"))
def test_a_lora_push_fails(lora: Bench, failure: pushes.Failure) -> None:
    pushes.fails(lora, failure)
