"""The spec of a run, out of what `Client.run` is given.

Owner of: no state. Invariant: what cannot be a spec is refused here, before anything is sent, with the field and what it may be.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from artd_schema.spec import RunSpec

from .errors import Invalid

_READ_BYTES_S = 100e6
"""How fast a daemon reads and hashes a model folder, at least."""


def make_spec(model: str | os.PathLike[str] | None, spec: RunSpec | None, fields: dict[str, Any]) -> RunSpec | None:
    """None when a run is only attached to. Raises Invalid with the bad field."""
    if spec is not None:
        if model is not None or fields:
            raise Invalid("give either spec, or model and fields, not both", "spec")
        return spec
    if model is None:
        if fields:
            raise Invalid(f"{', '.join(fields)}: fields need `model`; without it `run` attaches only", "model")
        return None
    if unknown := next((name for name in fields if name not in RunSpec.__struct_fields__), ""):
        raise Invalid(f"run spec: {_elsewhere(unknown) or _unknown(unknown, RunSpec.__struct_fields__)}", unknown)
    path = Path(model).expanduser()
    text = str(path.absolute()) if path.is_dir() or str(model).startswith((".", "/", "~")) else os.fspath(model)
    try:
        return msgspec.convert({"model": text, **fields}, RunSpec)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None


def reading_s(model: str) -> float:
    """Seconds that a daemon of this machine may take to hash the model's folder, which it does when a run is created."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(model) if entry.is_file()) / _READ_BYTES_S
    except OSError:
        return 0.0  # there is none here: the daemon says so, or it is another machine's


def _explained(error: str) -> Invalid:
    """msgspec's error, and what the field may be."""
    where = re.search(r" - at `\$\.([^`]*)`$", error)
    path = where[1] if where else ""
    found = _at(path)
    unknown = re.search(r"unknown field `([^`]*)`", error)
    if unknown and isinstance(found, inspect.StructType):
        return Invalid(f"run spec: {path}: {_unknown(unknown[1], [one.name for one in found.fields])}", path)
    values = f"; it is one of {', '.join(map(repr, found.values))}" if isinstance(found, inspect.LiteralType) else ""
    if isinstance(found, inspect.StructType) and not unknown:
        first = found.fields[0]
        values = f"; give a dict such as {{{first.name!r}: {first.default!r}}}"
    field = re.search(r"field `([^`]*)`", error)
    return Invalid(f"run spec: {error}{values}", path or (field[1] if field else ""))


def _at(path: str) -> inspect.Type | None:
    """What stands at `lora.rank` of a spec."""
    found: inspect.Type | None = inspect.type_info(RunSpec)
    for name in path.split(".") if path else ():
        fields = found.fields if isinstance(found, inspect.StructType) else ()
        found = next((field.type for field in fields if field.name == name), None)
    return found


OTHERWISE = {
    "learning_rate": 'give optimizer={"lr": ...}',
    "kl_coef": "artd's loss has no KL term (it tells kl_k3 in the metrics)",
    "temperature": "it belongs to each request, as in OpenAI's interface",
    "max_tokens": 'it belongs to each request, as in OpenAI\'s interface; engine={"max_model_len": ...} bounds prompt and answer',
    "batch_size": "a step trains groups_per_step groups of group_size trajectories",
}
"""Names that other tools have for what a run says in another way, or not at all."""


def _elsewhere(name: str) -> str:
    """Where a field stands that is no field of the run itself; "" when nobody knows it."""
    if name in OTHERWISE:
        return f"there is no field {name!r}: {OTHERWISE[name]}"
    for field in inspect.type_info(RunSpec).fields:  # type: ignore[attr-defined]
        if isinstance(field.type, inspect.StructType) and name in {one.name for one in field.type.fields}:
            return f'there is no field {name!r}: give {field.name}={{"{name}": ...}}'
    return ""


def _unknown(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"there is no field {name!r}" + (f"; did you mean {near[0]}?" if near else f"; there is {', '.join(names)}")
