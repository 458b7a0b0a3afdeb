"""How the daemon looks through a column of tokens (`rules.Scan`). Large columns go to numpy, which lets other threads run
meanwhile: Python's own `min` and `max` of some hundred thousand numbers hold the interpreter for tens of milliseconds.
"""

from __future__ import annotations

import numpy as np

from artd_schema import rules

LARGE = 16 * 1024
"""Bytes from which on numpy is the faster one."""


def int_range(column: bytes) -> tuple[int, int]:
    """Smallest and largest of int32 values; column: at least one of them, 4 bytes each."""
    if len(column) < LARGE:
        return rules.int_range(column)
    found = np.frombuffer(column, np.int32)
    return int(found.min()), int(found.max())


def float_sum_and_largest(column: bytes) -> tuple[float, float]:
    """(sum, largest) of float32 values, at least one; where one is no finite number, the sum is none either."""
    if len(column) < LARGE:
        return rules.float_sum_and_largest(column)
    found = np.frombuffer(column, np.float32)
    return float(found.sum(dtype=np.float64)), float(found.max())


SCAN = rules.Scan(int_range, float_sum_and_largest)
