"""Writes and reads the files between `artctl mismatch` and the scoring process (`artd_schema.wire.score`).

Columns are little-endian, in the order of the samples. The scores must be of exactly the tokens that were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from artd_schema.codec import to_json
from artd_schema.data.trajectory import RouteShape
from artd_schema.wire.score import LIVE, REPLAY, REQUEST, SCORES, SEQUENCES, ScoreRequest

from .metrics import Array, Engine, Mismatch, Trainer, compare
from .probe import Sample


def write(folder: Path, request: ScoreRequest, samples: Sequence[Sample]) -> None:
    """Write the request, and the columns that describe the samples."""
    tokens = np.concatenate([np.asarray(s.prompt + s.tokens) for s in samples])
    columns: dict[str, Array] = {
        "tokens": tokens.astype("<i4"),
        "lengths": np.asarray([len(s.prompt) + len(s.tokens) for s in samples], "<i4"),
        "prompts": np.asarray([len(s.prompt) for s in samples], "<i4"),
        "candidates": np.concatenate([s.top_ids for s in samples]).astype("<i4"),
    }
    if request.routes is not None:
        columns["routes"] = np.concatenate([_rows(sample, request.routes) for sample in samples])
    save_file(columns, folder / SEQUENCES)
    (folder / REQUEST).write_bytes(to_json(request))


def _rows(sample: Sample, shape: RouteShape) -> Array:
    """Return a sample's routes [P + C, layers, topk]. The last token's row is a filler, so that each token has one."""
    assert sample.routes is not None
    last = np.broadcast_to(np.arange(shape.topk), (1, shape.layers, shape.topk))
    return np.concatenate([sample.routes, last]).astype("u1" if shape.width == 1 else "<u2")


def compare_all(folder: Path, samples: Sequence[Sample]) -> dict[str, Mismatch]:
    """Return {pass: measures} of the passes that were scored. Raises ValueError."""
    try:
        scores = load_file(folder / SCORES)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / SCORES} cannot be read: {error}") from None
    engine = Engine(
        *(np.concatenate([getattr(s, name) for s in samples]) for name in ("logprobs", "top_ids", "top_logprobs"))
    )
    found = [name for name in (REPLAY, LIVE) if f"{name}.logprobs" in scores]
    return {name: compare(engine, _trainer(scores, name, engine)) for name in found}


def _trainer(scores: dict[str, Array], name: str, engine: Engine) -> Trainer:
    columns = [scores.get(f"{name}.{column}") for column in ("logprobs", "candidates", "top_ids")]
    wanted = (engine.logprobs.shape, engine.top_ids.shape, engine.top_ids.shape)
    got = tuple(() if column is None else column.shape for column in columns)
    if got != wanted:
        raise ValueError(f"scores of shapes {got} for tokens of shapes {wanted}")
    return Trainer(*(column for column in columns if column is not None))
