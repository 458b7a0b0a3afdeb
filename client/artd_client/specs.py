"""Makes the spec of a run from the arguments of `Client.run`. A bad field is refused before anything is sent, with the values
that it may have."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from artd_schema.run.spec import RunSpec

from .errors import Invalid

_READ_BYTES_S = 100e6
"""The least speed in bytes per second at which a daemon reads and hashes a model folder."""


def make_spec(model: str | os.PathLike[str] | None, spec: RunSpec | None, fields: dict[str, Any]) -> RunSpec | None:
    """Return the spec, None for a call that only attaches. Raises Invalid with the bad field."""
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
        raise _explain(str(error)) from None


def reading_s(model: str) -> float:
    """Return the seconds that a daemon on this machine may need to hash the model's folder, as it does when it creates a run."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(model) if entry.is_file()) / _READ_BYTES_S
    except OSError:
        return 0.0  # the folder is on another machine, or missing, which the daemon reports


def _explain(error: str) -> Invalid:
    """Translate msgspec's error, and add the values that the field may have."""
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
    """Return the type of a field of the spec, such as `lora.rank`."""
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
"""Field names of other tools -> how artd says the same, or that it has no such thing."""


def _elsewhere(name: str) -> str:
    """Return where a field belongs that the run itself does not have, "" when that is unknown."""
    if name in OTHERWISE:
        return f"there is no field {name!r}: {OTHERWISE[name]}"
    for field in inspect.type_info(RunSpec).fields:  # type: ignore[attr-defined]
        if isinstance(field.type, inspect.StructType) and name in {one.name for one in field.type.fields}:
            return f'there is no field {name!r}: give {field.name}={{"{name}": ...}}'
    return ""


def _unknown(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"there is no field {name!r}" + (
        f"; did you mean {near[0]}?" if near else f"; use one of: {', '.join(names)}"
    )
