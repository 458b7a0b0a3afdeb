"""Checks what a client submits beside the turns: reward, names, metrics, metadata.

Pure functions. Whatever passes is stored as it was sent: no number becomes null in JSON, and none is too large for the
arithmetic of a group's advantages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from artd_schema.codec import to_json
from artd_schema.wire.client_api import Submit

from .fields import InvalidField

MOST_REWARD = 1e30
"""Its square fits a float64 with a wide margin, and an advantage computed from it fits a float32."""
MOST_METRICS = 256
NAME = 256


def check_header(op: Submit) -> bytes:
    """Check the reward, the names, the metrics and the metadata of a trajectory. Returns the metadata as JSON. Raises
    InvalidField."""
    if not (math.isfinite(op.reward) and abs(op.reward) <= MOST_REWARD):
        raise InvalidField("reward", f"{op.reward} is not a finite number from {-MOST_REWARD} to {MOST_REWARD}")
    if not 1 <= len(op.group) <= NAME:
        raise InvalidField("group", f"a group's name has 1 to {NAME} characters")
    if len(op.key) > NAME:
        raise InvalidField("key", f"a key has at most {NAME} characters")
    _check_metrics(op.metrics)
    return _metadata(op.metadata)


def _check_metrics(metrics: dict[str, float]) -> None:
    if len(metrics) > MOST_METRICS:
        raise InvalidField("metrics", f"{len(metrics)} numbers; a trajectory has at most {MOST_METRICS}")
    for name, value in metrics.items():
        if len(name) > NAME:
            raise InvalidField("metrics", f"a name has at most {NAME} characters; one begins with {name[:40]!r}")
        if not math.isfinite(value):
            raise InvalidField(f"metrics[{name!r}]", f"{value} is not a finite number; leave it out")


def _metadata(metadata: dict[str, Any]) -> bytes:
    """Return `metadata` as JSON. Raises InvalidField if a value cannot be written unchanged."""
    try:
        written = to_json(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidField("metadata", f"cannot be written as JSON: {error}") from None
    if b"null" in written:  # msgspec writes null for NaN and infinity, which JSON cannot express
        for path, value in _numbers("metadata", metadata):
            if not math.isfinite(value):
                raise InvalidField(path, f"{value} cannot be written as JSON; leave it out, or send a text")
    return written


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield every float in a document, with its path."""
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(f"{path}[{key!r}]", part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _numbers(f"{path}[{number}]", part)
