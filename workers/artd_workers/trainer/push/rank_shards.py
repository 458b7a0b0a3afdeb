"""Which part of the model each rank gives to an engine: each element comes from the lowest rank that holds it."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from artd_workers.models.base import Plan
from artd_workers.models.codec import Codec, Row
from artd_workers.trainer.model.experts.grouped import EXPERT
from artd_workers.trainer.parallel.layout import Parallel, split_of
from artd_workers.trainer.parameters.lora_sharded import places
from artd_workers.trainer.push.direct.layout import WHOLE, Shard


def own_shards(plan: Plan, parallel: Parallel) -> tuple[Codec, dict[str, Shard]]:
    """Return the rows of this rank's weight table (`Parallel.codec`) that it gives, and its shard of each, by this
    rank's names.
    """
    if parallel.world == 1:
        return plan.codec, {}
    codec = parallel.codec(plan)
    shards = {row.megatron: _shard(row, parallel) for row in codec.rows}
    rows = tuple(row for row in codec.rows if shards[row.megatron] is not None)
    return replace(codec, rows=rows), {name: shard for name, shard in shards.items() if shard is not None}


def _shard(row: Row, parallel: Parallel) -> Shard | None:
    """Return this rank's shard of a weight, or None when a lower rank gives it."""
    expert = EXPERT.search(row.megatron) is not None
    here, dim = places(expert), split_of(row.megatron)
    count = parallel.etp if expert else parallel.tp
    copies = (here.same,) if dim is not None and count > 1 else (here.same, here.split)
    if any(dist.get_rank(group) for group in copies):
        return None
    return Shard(dim, here.tensor, count) if dim is not None and count > 1 else WHOLE
