"""Every planted bug."""

from __future__ import annotations

from . import daemon, engines, gateway, loop, store, surface, trainer
from .bug import Bug

BUGS: tuple[Bug, ...] = tuple(
    bug for area in (daemon, engines, gateway, loop, store, surface, trainer) for bug in area.BUGS
)
