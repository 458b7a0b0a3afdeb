"""Defaults of `RunSpec` that the command line shows. They stand here because importing msgspec takes longer than a short
command does, and `RunSpec` needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ROLLOUT_WEIGHTS_MODE: Final = "merged"
GROUP_SIZE: Final = 8
GROUPS_PER_STEP: Final = 8
ROW_LENGTH: Final = 0
MAX_MODEL_LEN: Final = 1024
ENGINE_DTYPE: Final = "float32"
ENGINE_REPLICAS: Final = 1

_DEFAULTS: dict[str, Any] = {
    "rollout_weights_mode": ROLLOUT_WEIGHTS_MODE,
    "group_size": GROUP_SIZE,
    "groups_per_step": GROUPS_PER_STEP,
    "row_length": ROW_LENGTH,
    "engine": {"max_model_len": MAX_MODEL_LEN, "dtype": ENGINE_DTYPE, "replicas": ENGINE_REPLICAS},
}


def spec_value(spec: Mapping[str, Any], *path: str) -> Any:
    """Return a field of a stored spec as JSON has it, or RunSpec's default where the spec, which may come from another release,
    has no such field."""
    value: Any = spec
    default: Any = _DEFAULTS
    for name in path:
        default = default[name]
        value = value.get(name, default) if isinstance(value, Mapping) else default
    return value
