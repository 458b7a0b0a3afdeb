"""Reads and writes arrays of expert ids in numpy's file format, without numpy.

It reads only what routes need: C order, u1 or little-endian u2, three axes.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass

_MAGIC = b"\x93NUMPY"
_WIDTHS = {"|u1": 1, "<u2": 2}
_ALIGN = 64


@dataclass(frozen=True)
class Ids:
    """Expert ids [rows, layers, topk] of `width` bytes each, little-endian."""

    rows: int
    layers: int
    topk: int
    width: int
    data: bytes


def read(file: bytes) -> Ids:
    """Read a file. Raises ValueError when it is no array of expert ids."""
    if file[:6] != _MAGIC or len(file) < 12 or file[6] not in (1, 2, 3):
        raise ValueError("no .npy file")
    head = 8 + (2 if file[6] == 1 else 4)
    data = head + int.from_bytes(file[8:head], "little")
    try:
        about = ast.literal_eval(file[head:data].decode("latin-1").strip())
        dtype, shape, fortran = about["descr"], about["shape"], about["fortran_order"]
    except (SyntaxError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"unreadable .npy header: {error!r}") from None
    if dtype not in _WIDTHS or fortran or not _three_axes(shape):
        raise ValueError(
            f"dtype {dtype!r}, shape {shape!r}, fortran_order {fortran!r} are not [rows, layers, topk] of u1 or <u2"
        )
    rows, layers, topk = shape
    ids = Ids(rows, layers, topk, _WIDTHS[dtype], file[data:])
    if len(ids.data) != math.prod(shape) * ids.width:
        raise ValueError(f"{len(ids.data)} bytes for shape {shape} of {dtype}")
    return ids


def write(ids: Ids) -> bytes:
    """Return the file that `numpy.save` would write."""
    dtype = next(name for name, width in _WIDTHS.items() if width == ids.width)
    shape = (ids.rows, ids.layers, ids.topk)
    about = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    pad = -(len(_MAGIC) + 4 + len(about) + 1) % _ALIGN
    header = about + b" " * pad + b"\n"
    return b"".join((_MAGIC, b"\x01\x00", len(header).to_bytes(2, "little"), header, ids.data))


def _three_axes(shape: object) -> bool:
    return isinstance(shape, tuple) and len(shape) == 3 and all(type(size) is int and size >= 0 for size in shape)
