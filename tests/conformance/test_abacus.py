"""The suite against an engine from outside the package, which shares no word with vLLM: every method, and a failure of each sort."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from artd_schema.data.trajectory import RouteShape

from . import answers, methods, pushes, vllm
from .abacus.speech import SPEECH
from .bench import Bench
from .fake import FakeAbacus

LIVE = ("gloo", "stock", "in_place", "staged")


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, Bench]]:
    """By way of a push."""
    with tempfile.TemporaryDirectory(prefix="artd-k-") as root:
        made: dict[str, Bench] = {}
        for way in (*LIVE, "lora"):
            (folder := Path(root, way)).mkdir()
            shape = RouteShape(layers=2, topk=2, experts=8) if way == "lora" else None
            made[way] = Bench(FakeAbacus(folder, way, shape))
        yield made
        for bench in made.values():
            bench.close()


@pytest.mark.parametrize("case", methods.MERGED + methods.GLOO, ids=lambda case: case.__name__)
def test_merged(benches: dict[str, Bench], case: methods.Case) -> None:
    case(benches["gloo"])


@pytest.mark.parametrize(
    "case", [case for case in methods.LORA if case not in methods.MERGED], ids=lambda case: case.__name__
)
def test_lora(benches: dict[str, Bench], case: methods.Case) -> None:
    case(benches["lora"])


@pytest.mark.parametrize("fault", answers.FAULTS)
def test_a_server_that_does_not_do_its_part(benches: dict[str, Bench], fault: Any) -> None:
    answers.answers(benches["gloo"], fault)


def test_live_pushes_are_served(benches: dict[str, Bench]) -> None:
    for way in LIVE:
        methods.live_pushes_are_served(benches[way])


def quick(one: pushes.Failure) -> bool:
    """The weights that arrive are not those committed, and the engine's death while they move: of every way."""
    return one.flaw == "wrong" or one.how == "wrong" or (one.how == "death" and one.phase == "transfer")


def failures() -> list[Any]:
    found = [one for way in ("disk", *LIVE, "lora") for one in pushes.failures(SPEECH, way)]
    return [pytest.param(one, id=str(one), marks=() if quick(one) else pytest.mark.slow) for one in found]


@pytest.mark.parametrize("failure", failures())
def test_a_push_fails(benches: dict[str, Bench], failure: pushes.Failure) -> None:
    pushes.fails(benches["gloo" if failure.way == "disk" else failure.way], failure)


def test_the_abacus_shares_no_call_with_vllm() -> None:
    """Else the cases above would prove nothing of the contract."""
    said = [{route for routes in one.methods.values() for route in routes} for one in (SPEECH, vllm.SPEECH)]
    assert not said[0] & said[1]
    code = "".join(path.read_text() for path in Path(__file__).with_name("abacus").glob("*.py"))
    assert "engines.vllm" not in code
