"""What `tests.gpu.ranks --tiny` has in place of GPUs: a trainer's other rank, and an engine, which reads the ranks' memory.

As a module: `artd_workers.trainer.peer` with that memory shared. Owner of: no state.
"""

from __future__ import annotations

import sys
from typing import Any

from artd_workers.engines.direct.session import Session
from artd_workers.engines.fence import Gate
from artd_workers.engines.vllm.direct.survey import parameters
from artd_workers.trainer import peer
from tests.gpu.push_tiny import TinyEngine
from tests.other_memory import OtherPort


class OtherEngine(TinyEngine):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        found = parameters(self._model)
        self._artd_session = Session(Gate("i", 1), OtherPort(), tuple(found), tuple(found.values()))


if __name__ == "__main__":
    from artd_workers.trainer import serving

    serving.port_of = lambda spec: OtherPort()
    sys.exit(peer.main(*sys.argv[1:]))
