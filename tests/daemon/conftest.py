"""A fixture that gives each test of a daemon process one rig."""

from __future__ import annotations

import pytest

from tests.daemon.rig import rig


@pytest.fixture(name="rig")
def a_rig():
    with rig() as made:
        yield made
