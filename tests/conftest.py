"""What every test may rely on.

SIGINT is not ignored, here and in what tests start, even where a shell started pytest in the background. A skip that
tests/SKIPS does not name fails the run.
"""

from __future__ import annotations

import signal

import pytest

from tests.skips import Skips, in_namespaces

signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_namespaces(items)
