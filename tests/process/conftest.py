"""Fixtures: a unique instance tag, and a check that no test leaks file descriptors or processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.process import helpers


@pytest.fixture
def instance() -> Iterator[str]:
    """A fresh instance id; at the end nothing may carry it, and no descriptor may be left open."""
    before = len(os.listdir("/proc/self/fd"))
    with helpers.fresh_instance() as name:
        yield name
        assert not helpers.tagged(name), "the test left processes behind"
    assert len(os.listdir("/proc/self/fd")) <= before, "the test left descriptors open"
