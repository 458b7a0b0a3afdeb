"""From a checkpoint folder to its family's plan.

The families are those of `artd_schema.families`, which names the module of each here; it is imported when a model needs it.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from artd_schema.families import FAMILIES

from .base import HfConfig, Plan, UnsupportedModel


def read_config(folder: str | Path) -> HfConfig:
    """`config.json` of a checkpoint folder. Raises ValueError when it is missing or not JSON."""
    path = Path(folder) / "config.json"
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give a Hugging Face checkpoint folder") from None


def plan_for(config: HfConfig) -> Plan:
    """The plan of a config. Raises UnsupportedModel that lists the architectures artd trains."""
    names = config.get("architectures") or ["none"]
    if names[0] not in FAMILIES:
        raise UnsupportedModel(
            f"config.json: architecture {names[0]} is not supported; artd trains {', '.join(sorted(FAMILIES))}"
        )
    family = importlib.import_module(f"{__package__}.{FAMILIES[names[0]]}")
    plan: Plan = family.plan(config)
    return plan
