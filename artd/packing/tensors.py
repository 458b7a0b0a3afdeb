"""Fills packed rows into tensors (the arrays that `BatchManifest.tensors` lists), digests and serialises them.

Pure. `PADDING` lists names and dtypes. All tensors are C-contiguous. Padding is one tail of each row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from artd_schema.data.manifest import TensorInfo

from .rows import Placed, Segment
from .sequences import Sequence

Tensors = dict[str, NDArray]

PADDING: dict[str, tuple[type[np.generic], float]] = {
    "tokens": (np.int32, 0),
    "segment_ids": (np.int32, -1),
    "parent_ids": (np.int32, -1),
    "position_ids": (np.int32, 0),
    "loss_mask": (np.uint8, 0),
    "old_logprobs": (np.float32, float("nan")),
    "advantages": (np.float32, 0.0),
    "weights": (np.float32, 0.0),
    "temperatures": (np.float32, 1.0),
    "policy_epochs": (np.int32, -1),
    "trajectory_index": (np.int32, -1),
}
"""Tensor name -> (dtype, value of padding)."""

_NAMES = {"int32": "I32", "float32": "F32", "uint8": "U8", "uint16": "U16"}


class Filler:
    """Writes segments into tensors of shape [rows, row_length]."""

    def __init__(self, rows: int, row_length: int) -> None:
        self.tensors: Tensors = {
            name: np.full((rows, row_length), value, kind) for name, (kind, value) in PADDING.items()
        }
        self._positions = np.arange(row_length, dtype=np.int32)

    def fill(
        self,
        row: int,
        segments: Seq[Segment],
        sequence_of: dict[Placed, Sequence],
        trajectory_of: dict[Placed, int],
        advantage_of: Seq[float],
    ) -> int:
        """Fill one row and return its number of tokens. `advantage_of` is indexed by trajectory.

        Shared segments hold context only: no trajectory, no advantage, no weight.
        """
        out = {name: array[row] for name, array in self.tensors.items()}
        at = 0
        for number, segment in enumerate(segments):
            sequence = sequence_of[segment.owner]
            there = slice(at, at + segment.end - segment.start)
            here = slice(segment.start, segment.end)
            out["tokens"][there] = sequence.tokens[here]
            out["segment_ids"][there] = number
            out["parent_ids"][there] = segment.parent
            out["position_ids"][there] = self._positions[here]
            if segment.leaf:
                trajectory = trajectory_of[segment.owner]
                mask = sequence.mask[here]
                out["loss_mask"][there] = mask
                out["old_logprobs"][there] = sequence.logprobs[here]
                out["temperatures"][there] = sequence.temperatures[here]
                out["policy_epochs"][there] = sequence.epochs[here]
                out["weights"][there] = mask if sequence.weights is None else mask * sequence.weights[here]
                if sequence.given is None:
                    np.multiply(mask, np.float32(advantage_of[trajectory]), out=out["advantages"][there])
                else:
                    out["advantages"][there] = np.where(mask, sequence.given[here], np.float32(0))
                out["trajectory_index"][there] = trajectory
            at = there.stop
        return at


def describe(tensors: Tensors) -> dict[str, TensorInfo]:
    """Return dtype, shape and sha256 of the raw bytes for each tensor name."""
    return {
        name: TensorInfo(_NAMES[array.dtype.name], array.shape, hashlib.sha256(array.data).hexdigest())
        for name, array in sorted(tensors.items())
    }


def serialise(tensors: Tensors) -> bytes:
    """Return the content of the safetensors file."""
    return save(dict(sorted(tensors.items())))
