"""One of two ranks that share a row's tokens: what a loss over sequences gives there.

Argument: JSON {rank, folder}. Prints one JSON line: the rank's part of each row's loss, how many trained tokens it has of the row, and the
gradient of their logprobs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from artd_schema.spec import LossSpec
from artd_workers.trainer.batch.row_schedule import trained_in
from artd_workers.trainer.parallel import context, ranks
from artd_workers.trainer.parallel.layout import Parallel
from artd_workers.trainer.step.losses import LOSSES
from artd_workers.trainer.step.objective import Objective, shares

from .test_loss_api import gspo
from .test_losses import make_batch

CUT = 13
"""Tokens of a rank's part: it cuts the second trajectory of the first row, and leaves the second row to the first rank."""


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    ranks.meet(2, given["rank"], Path(given["folder"]), cuda=False)
    context.make_groups(Parallel(cp=2))
    LOSSES["gspo"] = gspo
    batch, objective = make_batch(), Objective(LossSpec(kind="gspo"))
    share, found = shares(batch, "token"), []
    for row in batch.rows:
        mine, _ = trained_in(row, given["rank"], CUT)
        values = (mine.old_logprobs + 0.1).requires_grad_()
        part, _ = objective.row_loss(mine, values, share, batch.sequences)
        part.backward()
        found.append({"part": part.item(), "gradient": values.grad.tolist()})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
