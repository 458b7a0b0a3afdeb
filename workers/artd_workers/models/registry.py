"""From a checkpoint folder to its family's plan.

The families are those of `artd_schema.run.families`, which names the module of each here; it is imported when a model needs it. `adopt` adds a
package's.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

from artd_schema.packages import PackageCode
from artd_schema.run.families import FAMILIES
from artd_workers.packages import load

from .base import HfConfig, Plan, UnsupportedModel

_ADOPTED: dict[str, Callable[[HfConfig], Plan]] = {}
"""Planning functions of packages, by architecture."""


def read_config(folder: str | Path) -> HfConfig:
    """Read `config.json` of a checkpoint folder. Raises ValueError if it is missing or not JSON."""
    path = Path(folder) / "config.json"
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give a Hugging Face checkpoint folder") from None


def adopt(code: PackageCode | None) -> None:
    """Let `plan_for` plan models of a package's family. Raises PackageError."""
    if code is not None:
        _ADOPTED[code.kind] = load(code)


def plan_for(config: HfConfig) -> Plan:
    """Plan a model by its config. Raises UnsupportedModel, which lists the architectures if artd has no family for this one."""
    names = config.get("architectures") or ["none"]
    if names[0] in _ADOPTED:
        return _plan_of_package(names[0], config)
    if names[0] not in FAMILIES:
        raise UnsupportedModel(
            f"config.json: architecture {names[0]} is not supported; artd trains {', '.join(sorted(FAMILIES))}, and what an "
            "installed package brings: install it where artd runs, and start artd again"
        )
    family = importlib.import_module(f"{__package__}.{FAMILIES[names[0]]}")
    plan: Plan = family.plan(config)
    return plan


def _plan_of_package(architecture: str, config: HfConfig) -> Plan:
    """Call a package's function. Raises UnsupportedModel for whatever it raises, or returns in place of a Plan."""
    try:
        found = _ADOPTED[architecture](config)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"the package that plans {architecture} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Plan):
        raise UnsupportedModel(f"the package that plans {architecture} returned a {type(found).__name__}, not a Plan")
    return found
