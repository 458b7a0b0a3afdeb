"""An engine worker with a probe in its server, and that probe: `VLLM_PYTHON truth_probe.py` replaces `VLLM_PYTHON -m
artd_workers.engines`.

vLLM's worker imports this file as `tests.engine.truth_probe`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from artd_workers.engines.__main__ import main
    from artd_workers.engines.vllm import command

    command.EXTENSION = "tests.engine.truth_probe.Probe"
    sys.exit(main())

import msgspec
import torch
from vllm.config import set_current_vllm_config

from artd_schema.data.manifest import WeightTable
from artd_workers.engines.vllm.extension import Extension
from artd_workers.engines.vllm.weights.reload import Reload


class Probe(Extension):
    """artd's extension and one call more; `self` is vLLM's worker."""

    def probe_spoil(self, weights: str) -> dict[str, Any]:
        """NaN into all that kernels read: as every tensor of this weights.json through vLLM's own loader, because on a CPU it packs
        matrices and keeps no other copy, and then into every parameter that is left."""
        worker: Any = self
        model = worker.model_runner.get_model()
        table = msgspec.json.decode(Path(weights).read_bytes(), type=WeightTable).tensors
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            load = Reload(model, worker.model_config)
            load.start()
            model.load_weights((entry.name, torch.full(entry.shape, torch.nan)) for entry in table)
            load.finish()
        parameters = [one for one in model.parameters() if one.numel()]
        for parameter in parameters:
            parameter.data.fill_(torch.nan)
        return {"parameters": len(parameters), "tensors": len(table)}
