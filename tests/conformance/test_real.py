"""The suite against vLLM on a CPU, with real weights: every method, and the failures that the engine itself has a part in. Each
takes a new spawn; all of them: `python -m tools.gpu.conformance --tiny`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from artd_schema.run.spec import Mode

from . import methods, pushes
from .bench import Bench
from .real import Vllm
from .vllm import SPEECH

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


def bench(mode: Mode) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="artd-k-") as folder:
        made = Bench(Vllm(Path(folder), mode))
        yield made
        made.close()


@pytest.fixture(scope="module")
def merged() -> Iterator[Bench]:
    yield from bench("merged")


@pytest.fixture(scope="module")
def lora() -> Iterator[Bench]:
    yield from bench("lora")


@pytest.mark.parametrize("case", methods.MERGED + methods.GLOO, ids=lambda case: case.__name__)
def test_merged(merged: Bench, case: methods.Case) -> None:
    case(merged)


def failures(*ways: str) -> list[pushes.Failure]:
    return [one for way in ways for one in pushes.failures(SPEECH, way) if pushes.deep(one)]


@pytest.mark.parametrize("failure", failures("disk", "gloo"), ids=str)
def test_a_merged_push_fails(merged: Bench, failure: pushes.Failure) -> None:
    pushes.fails(merged, failure)


@pytest.mark.parametrize("case", methods.LORA, ids=lambda case: case.__name__)
def test_lora(lora: Bench, case: methods.Case) -> None:
    case(lora)


@pytest.mark.parametrize("failure", failures("lora"), ids=str)
def test_a_lora_push_fails(lora: Bench, failure: pushes.Failure) -> None:
    pushes.fails(lora, failure)
