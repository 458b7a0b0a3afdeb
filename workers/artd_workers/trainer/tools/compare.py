"""Compares two checkpoint folders of the same job: every metric, every tensor, every field.

It says what a replayed job made differently, and by how much. Both folders are only read. Equal means bit for bit; a NaN equals
itself. Nothing of a checkpoint is left out, not even a file that only one folder has. One tensor is in memory at a time.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import UNSET
from safetensors import safe_open
from torch import Tensor

from artd_schema.codec import digest, to_json
from artd_schema.data.manifest import MANIFEST_FILE, WEIGHTS_FILE, Canary, CheckpointManifest, WeightTable
from artd_schema.wire.replay_job import EnvironmentRow, ReplayRow

CLOCKS = frozenset({"tokens_per_s"})
"""Metrics that depend on measured time, which no run repeats."""
NUMBER_ABS, NUMBER_REL = 1e-4, 1e-3
"""With another CPU, number of threads or version, a number may differ by NUMBER_ABS + NUMBER_REL * |committed|."""
TENSOR_REL = 1e-2
"""There, a tensor may differ by this share of its 2-norm: AdamW's first step is the sign of the gradient, which rounding may flip where it is near 0."""
_ELSEWHERE = ("files", "canary", "metrics", "environment")


def compare(committed: Path, replayed: Path) -> Iterator[ReplayRow]:
    """Yield rows for everything in the two folders: metrics, canary, manifest, then file by file."""
    ours, theirs = (read_manifest(folder) for folder in (committed, replayed))
    yield from _metrics(ours.metrics, theirs.metrics)
    yield from _canary(ours.canary, theirs.canary)
    fields = [field for field in CheckpointManifest.__struct_fields__ if field not in _ELSEWHERE]
    for field in fields:
        a, b = (getattr(each, field) for each in (ours, theirs))
        yield _value("manifest", field, None if a is UNSET else a, None if b is UNSET else b)
    yield from _files(committed, replayed, ours, theirs)


def environment(committed: Mapping[str, Any], replayed: Mapping[str, Any]) -> tuple[EnvironmentRow, ...]:
    """Return where two manifests' environments differ: one row for each dotted name."""
    ours, theirs = _flat(committed), _flat(replayed)
    return tuple(
        EnvironmentRow(name=name, committed=ours.get(name, ""), replayed=theirs.get(name, ""))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )


def read_manifest(folder: Path) -> CheckpointManifest:
    return msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=CheckpointManifest)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    out: dict[str, str] = {}
    for key, inner in value.items():
        out |= _flat(inner, f"{prefix}{key}.") if isinstance(inner, Mapping) else {f"{prefix}{key}": str(inner)}
    return out


# ---- numbers and fields ---------------------------------------------------------------------------------------------


def _metrics(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Iterator[ReplayRow]:
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            yield ReplayRow(part="metrics", name=name, committed=a, replayed=b, equal=False, close=False)
            continue
        equal = None if name in CLOCKS else struct.pack("<d", a) == struct.pack("<d", b)
        yield ReplayRow(
            part="metrics", name=name, committed=a, replayed=b, equal=equal, close=equal is not False or _near(a, b),
            difference=abs(a - b),
        )  # fmt: skip


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= NUMBER_ABS + NUMBER_REL * abs(a)


def _canary(ours: Canary, theirs: Canary) -> Iterator[ReplayRow]:
    for name in ("prompts", "max_abs", "mean_abs", "rounding"):
        yield _value("canary", name, getattr(ours, name), getattr(theirs, name))
    for name in ("logprobs", "base"):
        yield from _scores(name, getattr(ours, name), getattr(theirs, name))


def _scores(
    name: str, ours: tuple[tuple[float, ...], ...], theirs: tuple[tuple[float, ...], ...]
) -> Iterator[ReplayRow]:
    row = _value("canary", name, ours, theirs)
    a, b = (torch.tensor([x for prompt in each for x in prompt], dtype=torch.float64) for each in (ours, theirs))
    if row.equal or a.shape != b.shape:
        yield row
        return
    close = bool(((a - b).abs() <= NUMBER_ABS + NUMBER_REL * a.abs()).all())
    yield msgspec.structs.replace(row, close=close, difference=float((a - b).abs().max()))


def _value(part: str, name: str, ours: object, theirs: object) -> ReplayRow:
    """Compare two JSON values. One that is neither a number nor a short text is shown by its sha256."""
    equal = to_json(ours) == to_json(theirs)
    return ReplayRow(
        part=part, name=name, committed=_summarise(ours), replayed=_summarise(theirs), equal=equal, close=equal
    )


def _summarise(value: object) -> str | int | float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    return value if isinstance(value, str) and len(value) <= 64 else digest(to_json(value))


# ---- files ----------------------------------------------------------------------------------------------------------


def _files(
    committed: Path, replayed: Path, ours: CheckpointManifest, theirs: CheckpointManifest
) -> Iterator[ReplayRow]:
    shas = [{entry.name: entry.sha256 for entry in manifest.files} for manifest in (ours, theirs)]
    names = sorted(shas[0].keys() | shas[1].keys())
    stored_equal = True
    for name in [n for n in names if n != WEIGHTS_FILE] + [n for n in names if n == WEIGHTS_FILE]:
        a, b = shas[0].get(name), shas[1].get(name)
        rows = list(_inside(committed / name, replayed / name, not stored_equal)) if a and b else []
        yield from rows
        close = a == b or (bool(rows) and all(row.close for row in rows))
        apart = max((row.difference for row in rows if not row.equal and row.difference is not None), default=None)
        yield ReplayRow(part="files", name=name, committed=a, replayed=b, equal=a == b, close=close, difference=apart)
        if name.endswith(".safetensors"):
            stored_equal = stored_equal and a == b


def _inside(ours: Path, theirs: Path, derived: bool) -> Iterator[ReplayRow]:
    """Yield rows for the content of a file; none for a file that is compared only by its bytes.

    `derived`: the stored tensors differ, so the hashes of the served ones, which follow from them, must differ too.
    """
    if ours.suffix == ".safetensors":
        yield from _tensors(ours, theirs)
    elif ours.name == WEIGHTS_FILE:
        yield from _weights(ours, theirs, derived)
    elif ours.suffix == ".json":
        a, b = (msgspec.json.decode(path.read_bytes()) for path in (ours, theirs))
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted(a.keys() | b.keys()):
                yield _value(ours.name, key, a.get(key), b.get(key))


def _weights(ours: Path, theirs: Path, derived: bool) -> Iterator[ReplayRow]:
    tables = [msgspec.json.decode(path.read_bytes(), type=WeightTable) for path in (ours, theirs)]
    yield _value(WEIGHTS_FILE, "mode", tables[0].mode, tables[1].mode)
    order = [[(entry.name, entry.dtype, entry.shape) for entry in table.tensors] for table in tables]
    yield _value(WEIGHTS_FILE, "names, dtypes and shapes in order", order[0], order[1])
    theirs_by_name = {entry.name: entry.known for entry in tables[1].tensors}
    for entry in tables[0].tensors:
        a, b = entry.known, theirs_by_name.get(entry.name)
        # A GPU lists checksums, a CPU sha256. These cannot be compared; only the stored tensors can.
        equal = a == b if b is None or type(a) is type(b) else None
        close = equal is not False or (derived and b is not None)
        yield ReplayRow(part=WEIGHTS_FILE, name=entry.name, committed=a, replayed=b, equal=equal, close=close)


def _tensors(ours: Path, theirs: Path) -> Iterator[ReplayRow]:
    with safe_open(ours, framework="pt") as a, safe_open(theirs, framework="pt") as b:
        names = (set(a.keys()), set(b.keys()))
        for name in sorted(names[0] | names[1]):
            pair = (a.get_tensor(name) if name in names[0] else None, b.get_tensor(name) if name in names[1] else None)
            yield _tensor(ours.name, name, *pair)


def _tensor(part: str, name: str, a: Tensor | None, b: Tensor | None) -> ReplayRow:
    shas = [None if tensor is None else _sha(tensor) for tensor in (a, b)]
    comparable = a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)
    equal = comparable and shas[0] == shas[1]
    difference = None
    if comparable and a is not None and b is not None and a.dtype.is_floating_point:
        difference = 0.0 if equal else _relative(a, b)
    close = equal or (difference is not None and difference <= TENSOR_REL)
    return ReplayRow(
        part=part, name=name, committed=shas[0], replayed=shas[1], equal=equal, close=close, difference=difference
    )


def _sha(tensor: Tensor) -> str:
    """Return the sha256 of the raw little-endian bytes."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def _relative(a: Tensor, b: Tensor) -> float | None:
    """Return |a - b| over the larger of |a| and |b|, in the 2-norm and fp64; None where a value is not finite."""
    a, b = a.double(), b.double()
    found = float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp(min=1e-300))
    return found if math.isfinite(found) else None
