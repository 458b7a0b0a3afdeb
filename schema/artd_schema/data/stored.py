"""Lists the Structs that are stored in rows and files, and computes the digest of their forms that a database records.

The digest covers names, types, bounds and defaults of the fields, but neither docstrings nor the version of msgspec.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from artd_schema.codec import digest
from artd_schema.run.spec import RunSpec

from .base import BaseModel
from .manifest import BatchManifest, CheckpointManifest, ReplayManifest, WeightTable
from .trajectory import RouteShape, Turn

STORED = (RunSpec, BaseModel, RouteShape, Turn, BatchManifest, ReplayManifest, CheckpointManifest, WeightTable)
READABLE: frozenset[str] = frozenset(
    {
        # The form before clip_low, corrections, penalties, advantages and credits, which JSON leaves out if they are unset.
        "edd2389f9c05ca72ab2434af84b036f39dc488a3cf602db38ea98057491f3d75",
        # The form before the daemon's table checked an engine's kind; it also lacks what the next one lacks.
        "25deb1d10b73f25dc0e85d9de56aa42e3ab9cf9f223c648eff65832b1b363981",
        # The form before losses had parameters and packages' code, two fields that JSON leaves out if they are unset.
        "c9823aa1afb7865a35ee4e002d7a6b867b6e5532c8a37f3ac4ca1d87804c134c",
    }
)
"""Forms of older versions whose rows and files these Structs still read (`python -m tests.house.same` opens a folder of each)."""


def form() -> str:
    """Return the sha256 of the fields of all `STORED` Structs."""
    return form_of(STORED)


@cache
def form_of(kinds: tuple[type, ...]) -> str:
    """Return the sha256 of the fields of these Structs."""
    return digest(msgspec.json.encode([_plain(inspect.type_info(kind), ()) for kind in kinds]))


def _plain(value: Any, above: tuple[type, ...]) -> Any:
    """Return a type of msgspec.inspect as lists and texts. `above`: the enclosing Structs, which are only named again."""
    if isinstance(value, inspect.StructType):
        if value.cls in above:
            return value.cls.__name__
        above = (*above, value.cls)
        flags = [value.tag_field, value.tag, value.array_like, value.forbid_unknown_fields]
        return [value.cls.__name__, flags, [_field(one, above) for one in value.fields]]
    if isinstance(value, inspect.Type):
        told = {name: getattr(value, name) for name in value.__struct_fields__}
        return [type(value).__name__, {k: _plain(v, above) for k, v in sorted(told.items()) if v is not None}]
    if isinstance(value, tuple | list):
        return [_plain(one, above) for one in value]
    return repr(value)


def _field(one: inspect.Field, above: tuple[type, ...]) -> Any:
    default = (
        "required"
        if one.required
        else repr(one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory())
    )
    return [one.encode_name, default, _plain(one.type, above)]
