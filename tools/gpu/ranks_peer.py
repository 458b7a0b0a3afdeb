"""What `tools.gpu.ranks --tiny` has in place of GPUs: a trainer's other rank, and an engine, which reads the ranks' memory.

As a module: `artd_workers.trainer.peer` with that memory shared. Owner of: no state.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from artd_workers.engines.gate import Gate
from artd_workers.engines.pull.session import Session
from artd_workers.engines.vllm.direct.survey import parameters
from artd_workers.trainer import peer, placement
from artd_workers.trainer.push import serving
from tests.other_memory import OtherPort
from tools.gpu.push_tiny import TinyEngine


class OtherEngine(TinyEngine):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        found = parameters(self._model)
        self._artd_session = Session(Gate("i", 1), OtherPort(), tuple(found), tuple(found.values()))


def stand_in() -> None:
    """In a rank's process: its memory can be read, and its model is laid out as on a GPU."""
    serving.port_of = lambda spec: OtherPort()
    placement.of = lambda spec, layers: placement.Placement(dtype=torch.bfloat16, grouped=True)


if __name__ == "__main__":
    stand_in()
    sys.exit(peer.main(*sys.argv[1:]))
