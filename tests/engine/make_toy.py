"""Makes a toy model folder with changes of its config: `MEGATRON_PYTHON make_toy.py OUT FAMILY CONFIG_JSON`.

Its weights are stored in the config's `torch_dtype`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests import toys


def main() -> None:
    out, family, changes = sys.argv[1:]
    toys.make(Path(out), family, **json.loads(changes))
    dtype = getattr(torch, toys.config(family, **json.loads(changes))["torch_dtype"])
    if dtype != torch.float32:
        file = Path(out) / "model.safetensors"
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
