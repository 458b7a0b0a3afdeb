"""Scans a column of tokens for the daemon (`rules.Scan`).

Large columns go to numpy, which lets other threads run meanwhile; Python's `min` and `max` of some hundred thousand numbers
hold the interpreter for tens of milliseconds.
"""

from __future__ import annotations

import numpy as np

from artd_schema.data import rules

LARGE = 16 * 1024
"""From so many bytes on, numpy is faster."""


def int_range(column: bytes) -> tuple[int, int]:
    """Return the smallest and the largest int32 value of a column, which has at least one."""
    if len(column) < LARGE:
        return rules.int_range(column)
    found = np.frombuffer(column, np.int32)
    return int(found.min()), int(found.max())


def float_sum_and_largest(column: bytes) -> tuple[float, float]:
    """Return (sum, largest) of the float32 values, at least one. If a value is not finite, neither is the sum."""
    if len(column) < LARGE:
        return rules.float_sum_and_largest(column)
    found = np.frombuffer(column, np.float32)
    return float(found.sum(dtype=np.float64)), float(found.max())


SCAN = rules.Scan(int_range, float_sum_and_largest)
