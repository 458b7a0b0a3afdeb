"""A trainer's process for `tools.gpu.wire`, which is killed in the middle of its push.

`python -m tools.gpu.wire_child FOLDER LAYERS FENCE TINY`: FOLDER has the engine's `table`, and gets `offer` and `sums.json`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import torch

from artd_schema.wire.direct import EngineTable
from artd_workers.trainer.push.direct.feeder import write_offer
from artd_workers.transfer.contracts import Port
from artd_workers.transfer.device import Cuda
from tests.direct_rig import MemoryPort
from tools.gpu import shape
from tools.gpu.push_rig import TIMEOUT_S
from tools.gpu.push_trainer import Trainer
from tools.gpu.wire_items import half
from tools.gpu.wire_rig import Sent


def main(folder: Path, layers: int, fence: int, tiny: bool) -> None:
    trainer = Sent(Trainer(shape.config(layers, tiny), "cpu" if tiny else "cuda:0"))
    port: Port = MemoryPort() if tiny else Cuda(0)
    table = msgspec.msgpack.decode((folder / "table").read_bytes(), type=EngineTable)
    trainer.open(table, port, folder, **({"buffers": 3, "buffer_bytes": 1 << 14} if tiny else {}))
    trainer.stage(folder / "sums.json")
    if not tiny:
        torch.cuda.synchronize()
    write_offer(trainer.offer, folder / "offer")
    assert trainer.wire is not None
    with trainer.wire.within(TIMEOUT_S):
        half(trainer.feeder, fence)
    print("half", flush=True)
    time.sleep(TIMEOUT_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
