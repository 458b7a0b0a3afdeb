"""Reads the weights of a committed checkpoint from disk, as the engine serves them, in the order of its weight table.

A push from disk loads base and adapter merged, or every weight of a full-parameter checkpoint. There is one rounding, from the
trainer's precision to the served dtype, as in the trainer's own push.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from artd_schema.data.manifest import ADAPTER_FILE, MODEL_FILE
from artd_workers.transfer.merge import Stored, merged_tensors, open_base


def served_tensors(
    base: str | None, checkpoint: Path, scale: float, dtype: str, names: Sequence[str], device: str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor of `dtype` on `device`, merged there) of every weight.

    `base`: folder of the base model of the checkpoint's adapter, with `scale` = alpha / rank; None when the checkpoint holds
    every weight. `names`: those of the weight table, in its order. Raises ValueError when the stored names differ.
    """
    served = getattr(torch, dtype)
    if base is None:
        every = merged_tensors(Stored(checkpoint / MODEL_FILE, names), {}, 1.0, served)
        return ((name, tensor.to(device)) for name, tensor in every)
    adapter = {name: tensor.to(device) for name, tensor in load_file(checkpoint / ADAPTER_FILE).items()}
    return merged_tensors(open_base(base, device), adapter, scale, served)
