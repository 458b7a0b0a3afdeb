"""The gateway's half of the suite: vLLM's dialect, and that of an engine from outside the package."""

from __future__ import annotations

from typing import Any

import pytest

from artd_schema.run.engines import ENGINES
from artd_workers.gateway.dialect import Dialect, dialect_of
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import Rig, merged

from . import gateway
from .abacus.entry import ABACUS
from .abacus.gateway_engine import FakeAbacus


@pytest.mark.asyncio
@pytest.mark.parametrize("case", gateway.CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("make", [FakeEngine, FakeAbacus], ids=["vllm", "abacus"])
async def test_a_dialect(rig: Rig, make: type[FakeEngine], case: gateway.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, ABACUS.name, ABACUS)
    engine = await rig.engine(make=make)
    await rig.daemon.route(merged(engine, 3, 4))
    await case(rig, engine)


def test_the_abacus_shares_no_word_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the cases above would prove nothing of the contract."""
    monkeypatch.setitem(ENGINES, ABACUS.name, ABACUS)
    ours, theirs = dialect_of("abacus"), dialect_of("vllm")
    spoken: dict[str, Any] = {
        name: (getattr(type(ours), name, None), getattr(type(theirs), name, None)) for name in vars(Dialect)
    }
    methods = {name: pair for name, pair in spoken.items() if not name.startswith("_") and callable(pair[0])}
    assert len(methods) >= 14 and all(mine is not its for mine, its in methods.values())
