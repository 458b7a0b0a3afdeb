"""Values of any type that msgspec knows, as hypothesis strategies: inside the bounds of the annotation, at them, and outside.

Owner of: nothing. Invariants: derived from the annotations alone, so that a new field or a new operation is tried without a word here.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

ODD_FLOATS = (0.0, -0.0, 1e-320, 1e-38, 1e38, 1e200, -1e200, 1.7e308, math.inf, -math.inf, math.nan)
ODD_INTS = (0, -1, 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.sampled_from(ODD_INTS) | st.floats() | TEXT | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(0, 3), inner, max_size=3),
    max_leaves=6,
)


def anything(kind: type) -> st.SearchStrategy[Any]:
    """Any value that has the form of `kind`, within its bounds or not."""
    return _of(inspect.type_info(kind))


def mutations(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """Some fields of a Struct, with any values."""
    fields = {one.name: _of(one.type) for one in inspect.type_info(kind).fields}  # type: ignore[attr-defined]
    names = st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


def _of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.StructType():
            made = {one.name: _of(one.type) for one in kind.fields}
            wanted = {one.name: made[one.name] for one in kind.fields if one.required}
            return st.fixed_dictionaries(wanted, optional={k: v for k, v in made.items() if k not in wanted}).map(
                lambda values: kind.cls(**values)
            )
        case inspect.UnionType():
            return st.one_of(*(_of(one) for one in kind.types))
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.IntType():
            return _bounded_ints(kind) | st.sampled_from(ODD_INTS)
        case inspect.FloatType():
            return _bounded_floats(kind) | st.sampled_from(ODD_FLOATS)
        case inspect.StrType():
            return TEXT | st.just("x" * 300)
        case inspect.BytesType():
            return st.binary(max_size=24)
        case inspect.VarTupleType() | inspect.ListType():
            items = st.lists(_of(kind.item_type), max_size=3)
            return items.map(tuple) if isinstance(kind, inspect.VarTupleType) else items
        case inspect.TupleType():
            return st.tuples(*(_of(one) for one in kind.item_types))
        case inspect.DictType():
            return st.dictionaries(_of(kind.key_type), _of(kind.value_type), max_size=3)
        case inspect.AnyType():
            return JSON
    raise NotImplementedError(kind)


def _bounded_ints(kind: inspect.IntType) -> st.SearchStrategy[int]:
    low = kind.ge if kind.ge is not None else -(2**63)
    high = kind.le if kind.le is not None else 2**64 - 1
    return (
        st.integers(int(low), int(high)) | st.sampled_from((int(low), int(high))) | st.integers(int(low), int(low) + 9)
    )


def _bounded_floats(kind: inspect.FloatType) -> st.SearchStrategy[float]:
    low = kind.ge if kind.ge is not None else kind.gt
    high = kind.le if kind.le is not None else kind.lt
    edges = st.sampled_from([float(one) for one in (low, high) if one is not None] or [0.0])
    return st.floats(low, high, allow_nan=False, allow_infinity=low is None and high is None) | edges


def over_the_wire(value: Any, codec: Any) -> Any:
    """The value as the other side reads it. Errors: what its codec raises."""
    return codec.decode(codec.encode(value))
