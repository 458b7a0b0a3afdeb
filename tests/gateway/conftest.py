"""Fixtures of the gateway's tests; the helpers are in rig.py."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest_asyncio

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import Rig, merged


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    folder = Path(tempfile.mkdtemp(prefix="gw"))
    try:
        async with AsyncExitStack() as stack:
            rig = Rig(stack, folder)
            await rig.start()
            yield rig
    finally:
        shutil.rmtree(folder)


@pytest_asyncio.fixture
async def engine(rig: Rig) -> FakeEngine:
    """One merged engine that serves pol@3 under epoch 4."""
    engine = await rig.engine()
    await rig.daemon.route(merged(engine, 3, 4))
    return engine
