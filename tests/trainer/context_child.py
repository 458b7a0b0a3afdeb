"""One of two ranks that share a row's tokens: computes every loss there, in fp64.

Argument: JSON {rank, folder}. It prints one JSON line: for each loss and row, this rank's part of the row's loss, and the
gradient of the logprobs of its tokens of the row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from artd_schema.run.spec import LossSpec
from artd_workers.trainer.batch.row_schedule import cut_trained
from artd_workers.trainer.parallel import context, ranks
from artd_workers.trainer.parallel.layout import Parallel
from artd_workers.trainer.step.losses import LOSSES
from artd_workers.trainer.step.objective import Objective, shares

from .test_losses import make_batch

CUT = 20
"""Tokens of a rank's part: it cuts the second trajectory of the first row (no bound clips it), and leaves the second row to the first rank."""


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    ranks.meet(2, given["rank"], Path(given["folder"]), cuda=False)
    context.make_groups(Parallel(cp=2))
    print(json.dumps({kind: parts(kind, given["rank"]) for kind in LOSSES}))


def parts(kind: str, rank: int) -> list[dict[str, Any]]:
    batch, objective, found = make_batch(), Objective(LossSpec(kind=kind)), []
    for row in batch.rows:
        mine, _ = cut_trained(row, rank, CUT)
        values = (0.9 * mine.old_logprobs).double().requires_grad_()
        part, _ = objective.row_loss(mine, values, shares(batch, "token"), batch.sequences)
        part.backward()
        found.append({"part": part.item(), "gradient": values.grad.tolist()})
    return found


if __name__ == "__main__":
    main()
