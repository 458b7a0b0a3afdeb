"""Turns routed experts of a rollout program (nested sequences, arrays or bytes) into the bytes of `Turn.routes`.

It never imports numpy; arrays give their numbers by the buffer protocol or `tolist`.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

from .errors import Invalid


def route_bytes(ids: Any, experts: int) -> bytes:
    """Return expert ids [rows][MoE layers][topk] as bytes: u8 for up to 256 experts, else little-endian u16.

    Bytes are returned unchanged. `experts`: routed experts of a layer, unused for bytes. Raises Invalid with the bad place.
    """
    if isinstance(ids, bytes | bytearray):
        return bytes(ids)
    if not 1 <= experts <= 65536:
        raise Invalid(f"experts: is {experts}, but the routes are no bytes: give the experts of a layer", "experts")
    code = "B" if experts <= 256 else "H"
    plain = _same_width(ids, code)
    return _pack(ids.tolist() if hasattr(ids, "tolist") else ids, code, experts) if plain is None else plain


def _same_width(ids: Any, code: str) -> bytes | None:
    """Return the bytes of an array whose numbers already have the right width, else None."""
    try:
        view = memoryview(ids)
    except TypeError:
        return None
    return view.tobytes() if view.format == code and view.ndim == 3 and sys.byteorder == "little" else None


def _pack(rows: Any, code: str, experts: int) -> bytes:
    column = array(code)
    form = None
    for number, row in enumerate(rows):
        try:
            form = form or (len(row), len(row[0]))
            for layer, chosen in enumerate(row):
                column.extend(_ids(chosen, code, experts, f"routes[{number}][{layer}]", form[1]))
        except (TypeError, IndexError) as error:
            raise Invalid(f"routes[{number}]: is not [layers][topk] of expert ids", f"routes[{number}]") from error
        if len(row) != form[0]:
            raise Invalid(f"routes[{number}]: has {len(row)} layers, not {form[0]}", f"routes[{number}]")
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _ids(chosen: Any, code: str, experts: int, where: str, topk: int) -> array[int]:
    if len(chosen) != topk:
        raise Invalid(f"{where}: has {len(chosen)} ids, not {topk}", where)
    try:
        ids = array(code, chosen)
    except (TypeError, OverflowError):
        raise Invalid(f"{where}: {chosen!r} are not ids of {experts} experts", where) from None
    if ids and max(ids) >= experts:
        raise Invalid(f"{where}: {chosen!r} are not ids of {experts} experts", where)
    return ids
