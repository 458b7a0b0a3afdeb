"""The entry point of ranks 1 and up: `python -m artd_workers.trainer.peer`, started by `launch` through torchrun.

The process follows rank 0's orders; its part of a push runs beside that (`direct.member`). It ends when its standard
input does, which means that rank 0 has ended, whatever it is waiting for. It also ends at once when it is out of step
with the other ranks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import msgspec

from artd_schema.wire.worker_config import TrainerConfig

_REPORT_S = 10.0
"""How long rank 0 gets to report what went wrong on several ranks. It ends all of them then."""


def main(folder: str, device: str, layout: str) -> int:
    threading.Thread(target=_end_with_input, name="rank-0", daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    from artd_workers.trainer.parallel.layout import Parallel
    from artd_workers.trainer.parallel.ranks import join_ranks

    from .trainer import Order, Trainer
    from .worker import SWITCH_S

    sys.setswitchinterval(SWITCH_S)
    # torchrun numbers only its own processes, and rank 0 is not one of them.
    parallel = msgspec.json.decode(layout, type=Parallel)
    ranks = join_ranks(parallel, int(os.environ["RANK"]) + 1, Path(folder), device == "cuda")
    ranks.pids()
    config = msgspec.msgpack.decode(ranks.receive_order(), type=TrainerConfig)
    trainer = Trainer(config, {}, ranks)
    while True:
        order = msgspec.msgpack.decode(ranks.receive_order(), type=Order)
        try:
            trainer.follow(order)
        except Exception:
            # Rank 0 reports the error to the daemon, unless only this rank failed.
            if ranks.broken:
                traceback.print_exc()
                sys.stderr.flush()
                time.sleep(_REPORT_S)
                os._exit(1)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
