"""Plans of several processes: cut by hand here, put together by hand, whatever `parallel` and `given` say."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from artd_schema.wire.direct import EngineTable, Plan
from artd_workers.engines.vllm.direct.survey import parameters
from artd_workers.models.codec import Codec
from artd_workers.models.registry import plan_for
from artd_workers.trainer.push.direct.checksums import ServedWeights
from artd_workers.trainer.push.direct.collectives import SingleRank
from artd_workers.trainer.push.direct.layout import Shard, Sharding
from artd_workers.trainer.push.direct.plan import PlanError, check_coverage, make_plan, whole_tensors
from artd_workers.trainer.push.direct.schedule import make_schedule
from artd_workers.trainer.push.direct.weight_lock import WeightLock
from artd_workers.transfer.coverage import CoverError
from tests.direct_rig import engine_model, engine_table, fused, pair

from .test_direct import MOE, base_of

pytestmark = pytest.mark.torch
COLUMN, ROW = ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer"), ("linear_proj", "linear_fc2")


class Rank:
    """SingleRank of `size`: codec, weights and shards of what it gives."""

    def __init__(self, index: int, size: int, config: dict[str, Any], base: dict[str, Tensor]) -> None:
        made = plan_for(config).codec
        self.weights: dict[str, Tensor] = {}
        self.shards: dict[str, Shard] = {}
        for name, tensor in made.to_megatron(base):
            linear = name.removesuffix(".weight").rpartition(".")[2]
            if linear in COLUMN:
                blocks = tensor.chunk(2) if linear == "linear_fc1" else [tensor]
                self.weights[name] = torch.cat([block.chunk(size)[index] for block in blocks])
                self.shards[name] = Shard(0, index, size)
            elif linear in ROW:
                self.weights[name] = tensor.chunk(size, 1)[index].contiguous()
                self.shards[name] = Shard(1, index, size)
            elif index == 0:
                self.weights[name] = tensor
        heads = replace(made.shape, heads=made.shape.heads // size, groups=made.shape.groups // size)
        self.codec = Codec(tuple(row for row in made.rows if row.megatron in self.weights), heads)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    def model(self) -> dict[str, tuple[int, ...]]:
        return whole_tensors(self.codec, self.sizes, self.shards)


def plans(table: EngineTable, ranks: list[Rank], itemsize: int = 4) -> list[Plan]:
    model = {name: size for rank in ranks for name, size in rank.model().items()}
    return [make_plan(table, rank.codec, rank.sizes, itemsize, Sharding(rank.shards, model)) for rank in ranks]


def check_cover(table: EngineTable, ranks: list[Rank], made: list[Plan]) -> None:
    sizes = {name: torch.Size(size).numel() for rank in ranks for name, size in rank.model().items()}
    check_coverage(
        table, made[0].parts, [sizes[part] for part in made[0].parts], [p for plan in made for p in plan.pieces]
    )


def ranks_of(size: int, config: dict[str, Any] = MOE) -> tuple[list[Rank], dict[str, Tensor]]:
    base = {name: torch.randn(tensor.shape) for name, tensor in base_of(config).items()}
    return [Rank(index, size, config, base) for index in range(size)], base


@pytest.mark.parametrize("buffer", [0, 520])
def test_the_pieces_of_all_make_the_engine(buffer: int) -> None:
    """buffer: elements of a ring through which everything goes; a run of rows is cut between rows."""
    ranks, base = ranks_of(2)
    model = engine_model(MOE, torch.float32)
    table, tensors = engine_table(model), list(parameters(model).values())
    made = plans(table, ranks)
    check_cover(table, ranks, made)
    assert made[0].parts == made[1].parts and any(piece.width for piece in made[1].pieces)
    for rank, plan in zip(ranks, made, strict=True):
        weights = [rank.weights[name].flatten() for name in plan.sources]
        rows = {i: rank.weights[name].shape[-1] for i, name in enumerate(plan.sources)}
        fills = make_schedule(plan, rows if buffer else {}, buffer)
        pieces = [*fills.in_place, *(fill.piece for turn in fills.slots for fill in turn)]
        assert len(pieces) > len(plan.pieces) or not buffer
        for p in pieces:
            given, width = weights[p.source][p.begin : p.begin + p.count], p.width or p.count
            for row, line in enumerate(given.split(width)):
                tensors[p.tensor].view(-1)[p.at + row * p.pitch :][:width].copy_(line)
                part = base[plan.parts[p.part]].flatten()
                assert torch.equal(part[p.first + row * p.pitch :][:width], line), "positions in the whole tensor"
            assert p.own % rows[p.source] == 0
    wanted = fused(base, model)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in parameters(model).items())


def test_stages_give_their_layers() -> None:
    """A pipeline: each process has other rows of the table, and all of each."""
    (rank,), _ = ranks_of(1)
    table = engine_table(engine_model(MOE, torch.float32))
    model = rank.model()
    halves = [[row for row in rank.codec.rows if ("layers.0." in row.megatron) == first] for first in (True, False)]
    codecs = [replace(rank.codec, rows=tuple(rows)) for rows in halves]
    made = [make_plan(table, codec, rank.sizes, 4, Sharding({}, model)) for codec in codecs]
    assert made[0].parts == made[1].parts == tuple(model)
    sizes = [torch.Size(size).numel() for size in model.values()]
    check_coverage(table, tuple(model), sizes, [*made[0].pieces, *made[1].pieces])
    with pytest.raises(CoverError, match=r"the engine's model\.layers\.0.* in no piece"):
        check_coverage(table, tuple(model), sizes, made[1].pieces)


@pytest.mark.parametrize(
    ("name", "shard", "says"),
    [
        ("decoder.layers.1.self_attention.linear_proj.weight", Shard(1, 0, 2), "o_proj.* are in two pieces"),
        ("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight", Shard(0, 0, 2), "experts.* two pieces"),
    ],
)
def test_a_part_in_the_wrong_place_is_named(name: str, shard: Shard, says: str) -> None:
    ranks, _ = ranks_of(2)
    ranks[1].shards[name] = shard
    table = engine_table(engine_model(MOE, torch.float32))
    with pytest.raises(CoverError, match=says):
        check_cover(table, ranks, plans(table, ranks))


def test_a_copy_that_is_given_twice_or_never_is_named() -> None:
    table = engine_table(engine_model(MOE, torch.float32))
    ranks, _ = ranks_of(2)
    made = plans(table, ranks)
    norm = "decoder.final_layernorm.weight"
    again = [p for p in made[0].pieces if made[0].sources[p.source] == norm]
    assert len(again) == 1
    less = [p for p in made[0].pieces if p not in again]
    sizes = [torch.Size(ranks[0].model()[part]).numel() for part in made[0].parts]
    with pytest.raises(CoverError, match=r"model\.norm\.weight.* two pieces"):
        check_coverage(table, made[0].parts, sizes, [*made[0].pieces, *made[1].pieces, *again])
    with pytest.raises(CoverError, match=r"model\.norm\.weight.* in no piece"):
        check_coverage(table, made[0].parts, sizes, [*less, *made[1].pieces])


def test_rows_that_are_no_whole_words_are_refused() -> None:
    config = MOE | {"moe_intermediate_size": 20}
    ranks, _ = ranks_of(2, config)
    table = engine_table(engine_model(config, torch.bfloat16))
    with pytest.raises(PlanError, match="does not start and end there at multiples of"):
        plans(table, ranks, itemsize=2)


@pytest.mark.parametrize("first", [True, False])
def test_the_first_rank_turns_to_the_next_version_before_the_others(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its push reads until all have ended theirs; another that went ahead would refuse what it is about to be asked for."""
    done: list[str] = []

    class Ranks(SingleRank):
        def share_errors(self) -> AbstractContextManager[None]:
            done.append("agreed")
            return super().share_errors()

        def broadcast(self, value: int) -> int:
            done.append("told")
            return 7

    Ranks.first = first
    renew = WeightLock.renew
    monkeypatch.setattr(
        WeightLock, "renew", lambda weight_lock, *to: (done.append(f"renewed {to}"), renew(weight_lock, *to))[1]
    )
    base = base_of(MOE)
    one = pair(MOE, base, tmp_path)
    snapshot = ServedWeights(one.served.weight_source, tuple(base), Ranks()).stage()
    one.feeder.close()
    assert snapshot.version == 7 and done[-1] == "agreed"  # the last one's are the sums
    assert done[:4] == (
        ["agreed", "renewed ()", "told", "agreed"] if first else ["agreed", "told", "agreed", "renewed (7,)"]
    )
