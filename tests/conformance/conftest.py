"""The gateway's rig, for the gateway's half of the suite."""

from __future__ import annotations

from tests.gateway.conftest import rig

__all__ = ["rig"]
