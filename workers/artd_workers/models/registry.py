"""From a checkpoint folder to its family's plan.

Owner of: no state. Invariants: the families are those of `artd_schema.families`; adding one is a file here and a line there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from artd_schema.families import FAMILIES

from . import llama, qwen3, qwen3_moe
from .base import HfConfig, Plan, UnsupportedModel

_PLANS: dict[str, Callable[[HfConfig], Plan]] = {
    "llama": llama.plan,
    "qwen3": qwen3.plan,
    "qwen3_moe": qwen3_moe.plan,
}


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
    return _PLANS[FAMILIES[names[0]]](config)
