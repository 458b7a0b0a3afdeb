"""The direct push without a GPU: plan, pull, staging and checksums over plain memory, against the merge of the export."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from artd_schema.wire.direct import EngineTable, EngineTensor, Obstacle, Run, Segment
from artd_workers.deadline import Deadline
from artd_workers.engines.gate import FenceError
from artd_workers.engines.pull.pull import _join_copies
from artd_workers.engines.pull.session import WrongWeights
from artd_workers.engines.vllm.direct.fusions import parts_of
from artd_workers.engines.vllm.direct.survey import parameters, survey
from artd_workers.models.registry import plan_for
from artd_workers.trainer.push.direct.plan import PlanError, make_plan
from artd_workers.trainer.push.direct.schedule import make_schedule
from artd_workers.transfer import checksum
from artd_workers.transfer.contracts import PullError
from artd_workers.transfer.coverage import CoverError
from artd_workers.transfer.merge import merged_tensors
from artd_workers.transfer.ring import Page
from tests.direct_rig import PLAIN, Pair, engine_model, engine_table, feeding, fused, pair
from tools.gpu.push_refusals import changed, exchanged, runs_of
from tools.gpu.shape import RandomWeights, config, size_of

pytestmark = pytest.mark.torch
MOE = config(2, tiny=True)
DENSE = {k: v for k, v in MOE.items() if "experts" not in k and not k.startswith("moe_")} | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
}  # fmt: skip
TIED = DENSE | {"tie_word_embeddings": True}
KINDS = {"moe": MOE, "dense": DENSE, "tied": TIED}


def base_of(shape: dict[str, Any]) -> dict[str, Tensor]:
    plan = plan_for(shape)
    sizes = shape | {"moe_intermediate_size": shape.get("moe_intermediate_size", shape["intermediate_size"])}
    weights = RandomWeights(plan, sizes | {"num_experts": shape.get("num_experts", 0)}, "cpu")
    return {name: weights[name] for name in weights}


def made(shape: dict[str, Any], folder: Path, **rest: Any) -> Pair:
    torch.manual_seed(0)
    return pair(shape, base_of(shape), folder, **rest)


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Pair]:
    """A mixture of experts, staged and opened, expecting the right sums."""
    one = made(MOE, tmp_path)
    one.open()
    one.session.expect(one.stage())
    yield one
    one.session.close()
    one.feeder.close()


def served(one: Pair, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """What the engine must hold by its own names: the export's merge."""
    return fused(dict(merged_tensors(one.base, one.live, one.scale, dtype)), one.model)


def same(one: Pair, dtype: torch.dtype = torch.bfloat16) -> bool:
    wanted = served(one, dtype)
    return all(torch.equal(tensor, wanted[name]) for name, tensor in parameters(one.model).items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [4, 0])
def test_a_pull_gives_the_export(kind: str, rank: int, tmp_path: Path) -> None:
    one = made(KINDS[kind], tmp_path, rank=rank)
    one.open()
    one.session.expect(one.stage())
    one.push()
    assert same(one)
    one.session.close()
    assert one.port.opened == []


@pytest.mark.parametrize("buffer_bytes", [1 << 12, 24 << 10, 1 << 22])
def test_buffers_of_any_size_and_another_dtype(buffer_bytes: int, tmp_path: Path) -> None:
    one = made(MOE, tmp_path, dtype=torch.float16, buffer_bytes=buffer_bytes)
    one.open()
    one.session.expect(one.stage())
    one.push()
    assert same(one, torch.float16)


def test_what_is_fed_is_what_was_staged(ready: Pair) -> None:
    wanted = served(ready)
    for tensor in ready.live.values():
        tensor.mul_(1.5)  # the next train step
    ready.push()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in parameters(ready.model).items())
    ready.session.expect(ready.stage())
    ready.push()
    assert same(ready)


def test_staged_pull_touches_nothing_until_it_is_swapped_in(ready: Pair) -> None:
    ready.push()
    before = {name: tensor.clone() for name, tensor in parameters(ready.model).items()}
    ready.live["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].add_(1.0)
    ready.session.expect(ready.stage())
    fence = ready.fence()
    with feeding(ready, fence.fence, 20.0):
        ready.session.stage(fence, 20.0)
        while not ready.session.poll_staging():
            pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in parameters(ready.model).items())
    with pytest.raises(PullError, match="nothing is staged"):
        ready.session.swap(ready.fence())
    ready.session.swap(fence)
    assert same(ready)


def test_addresses_stay_and_every_byte_comes_from_the_push(ready: Pair) -> None:
    at = {name: tensor.data_ptr() for name, tensor in parameters(ready.model).items()}
    for _ in range(3):
        for tensor in parameters(ready.model).values():
            tensor.fill_(torch.nan)
        ready.push()
        assert same(ready)
    assert {name: tensor.data_ptr() for name, tensor in parameters(ready.model).items()} == at


# ---- refusals ---------------------------------------------------------------------------------------------------------


EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


@pytest.mark.parametrize(
    ("first", "second"),
    [(EXPERT.format(2, "down"), EXPERT.format(5, "down")), (EXPERT.format(3, "gate"), EXPERT.format(3, "up"))],
)
def test_exchanged_parts_are_refused_by_the_sums_of_their_places(first: str, second: str, tmp_path: Path) -> None:
    """The engine sums each range as the part that the plan of its own table names there."""
    one = made(MOE, tmp_path, buffer_bytes=1 << 22)
    one.open(exchanged(one.feeder.offer(), first, second))
    one.session.expect(one.stage())
    with pytest.raises(WrongWeights, match="2 of"):
        one.push()
    with pytest.raises(FenceError, match="unknown"):
        one.session.pull(one.fence(), 1.0)


def test_one_flipped_bit_is_refused(ready: Pair) -> None:
    weight = ready.weights["decoder.layers.1.self_attention.linear_proj.weight"]
    weight.view(-1).view(torch.uint8)[4321] ^= 1
    with pytest.raises(WrongWeights, match=r"1 of .*model.layers.1.self_attn.o_proj.weight"):
        ready.push()


def test_a_missing_range_is_refused_before_anything_is_opened(ready: Pair) -> None:
    gone = next(run for run in runs_of(ready.feeder.offer()) if run.first)
    with pytest.raises(CoverError, match="in no piece"):
        ready.session.open(changed(ready.feeder.offer(), lambda run: None if run == gone else run))
    twice = msgspec.structs.replace(gone, at=gone.at - 8)
    with pytest.raises(CoverError, match="in two pieces"):
        ready.session.open(changed(ready.feeder.offer(), lambda run: twice if run == gone else run))
    outside = msgspec.structs.replace(gone, byte=1 << 40)
    with pytest.raises(CoverError, match="outside of the memory"):
        ready.session.open(changed(ready.feeder.offer(), lambda run: outside if run == gone else run))
    assert ready.port.opened == []


def test_an_offer_that_cannot_be_opened_leaves_nothing_open(ready: Pair) -> None:
    offer = ready.feeder.offer()
    (feed,) = offer.feeds
    feed = msgspec.structs.replace(feed, segments=(*feed.segments, Segment(b"short", 1)))
    broken = msgspec.structs.replace(offer, feeds=(feed,))
    with pytest.raises(struct.error):
        ready.session.open(broken)
    assert ready.port.opened == []
    with pytest.raises(PullError, match="no trainer's offer"):
        ready.session.pull(ready.fence(), 1.0)
    ready.session.open(offer)
    ready.session.expect(ready.stage())
    ready.push()


def test_a_trainer_that_fails_or_is_silent_ends_the_pull(ready: Pair) -> None:
    fence = ready.fence()
    with pytest.raises(PullError, match="0.05 s passed"):
        ready.session.pull(fence, 0.05)
    ready.feeder.outlet.begin(7)
    ready.feeder.outlet.fail()
    with pytest.raises(PullError, match="failed to fill"):
        ready.session._link.pull.run(7, Deadline(5.0), None)


def test_nothing_is_copied_before_the_trainer_feeds_this_fence(ready: Pair) -> None:
    """Not even what lies ready at any time."""
    with pytest.raises(PullError, match="for fence 1"):
        ready.session.pull(ready.fence(), 0.05)
    assert all(bool(tensor.isnan().all()) for tensor in parameters(ready.model).values())


def test_neighbours_are_one_copy_within_a_tensor_only() -> None:
    """CUDA refuses a copy that goes on into the next allocation, and two tensors often are neighbours."""
    first, second, other = Run(0, 0, 0, 0, 0, 0, 8), Run(0, 8, 1, 0, 0, 16, 4), Run(1, 0, 2, 0, 0, 24, 4)
    assert _join_copies([first, second, other], [1000, 1024], [500], 2) == [(1000, 500, 24), (1024, 524, 8)]
    elsewhere = msgspec.structs.replace(second, segment=1, byte=0)
    assert _join_copies([first, elsewhere], [1000, 1024], [500, 516], 2) == [(1000, 500, 16), (1016, 516, 8)]
    assert _join_copies([second, first], [1000, 1024], [500], 2) == [(1016, 516, 8), (1000, 500, 16)]


def test_a_feed_lasts_until_the_engine_has_copied_all(tmp_path: Path) -> None:
    """Though it has nothing more to fill: what is in the buffers is read until then."""
    one = made(MOE, tmp_path, buffer_bytes=1 << 22)
    one.open()
    one.session.expect(one.stage())
    fence, ended = one.fence(), threading.Event()
    feed = threading.Thread(target=lambda: (one.feed(fence.fence, 20.0), ended.set()))
    feed.start()
    turns = sum(unit.slot >= 0 for unit in one.feeder.offer().feeds[0].units)
    while one.feeder.outlet.ready < turns:
        pass
    assert turns <= 3 and not ended.wait(0.05)
    one.session.pull(fence, 20.0)
    feed.join(20.0)
    assert ended.is_set() and same(one)


def test_a_feed_nobody_takes_ends(ready: Pair) -> None:
    with pytest.raises(TimeoutError, match="0 of"):
        ready.feed(9, 0.05)
    page = ready.feeder.outlet
    assert isinstance(page, Page) and page.failed


# ---- the plan ---------------------------------------------------------------------------------------------------------


def plan_of(table: EngineTable, shape: dict[str, Any] = MOE) -> Any:
    codec = plan_for(shape).codec
    sizes = {name: tuple(tensor.shape) for name, tensor in codec.to_megatron(base_of(shape))}
    return make_plan(table, codec, sizes, 2)


@pytest.fixture
def table() -> EngineTable:
    return engine_table(engine_model(MOE, torch.bfloat16))


def reshaped(table: EngineTable, name: str, size: tuple[int, ...]) -> EngineTable:
    new = [msgspec.structs.replace(t, shape=size) if t.name == name else t for t in table.tensors]
    return msgspec.structs.replace(table, tensors=tuple(new))


def test_gaps_and_overlaps_are_named(table: EngineTable) -> None:
    assert len(plan_of(table).pieces) > 2 * 3 * MOE["num_experts"]
    with pytest.raises(
        CoverError, match=r"the engine's model.embed_tokens.weight: elements 32768 to 36863 are in no piece"
    ):
        plan_of(reshaped(table, "model.embed_tokens.weight", (576, 64)))
    with pytest.raises(CoverError, match=r"model.norm.weight: pieces reach to element 63, but it has 32"):
        plan_of(reshaped(table, "model.norm.weight", (32,)))
    fewer = msgspec.structs.replace(table, tensors=table.tensors[1:])
    with pytest.raises(CoverError, match=r"the model's model.embed_tokens.weight: elements 0 to 32767 are in no piece"):
        plan_of(fewer)
    more = msgspec.structs.replace(table.tensors[-1], name="model.extra.bias")
    with pytest.raises(CoverError, match=r"the engine's model.extra.bias: elements 0"):
        plan_of(msgspec.structs.replace(table, tensors=(*table.tensors, more)))


def recorded() -> EngineTable:
    """vLLM 0.25.1's own table of two layers of Qwen3-30B-A3B's shape, as a GPU run wrote it (`tools.gpu.push`, item table)."""
    found = json.loads((Path(__file__).parent / "vllm_0251_qwen3_moe.json").read_text())
    tensors = tuple(
        EngineTensor(*map(_tuples, line), segment=0, at=0, parts=parts_of(line[0])) for line in found["tensors"]
    )
    return EngineTable(
        engine=found["engine"], version=found["version"], moe_backend=found["moe_backend"], tensors=tensors
    )


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def test_the_stand_in_is_laid_out_as_vllm_is() -> None:
    with torch.device("meta"):
        here = survey(engine_model(config(2), torch.bfloat16), PLAIN, "0.25.1").tensors
    place = {"segment": 0, "at": 0}
    assert tuple(msgspec.structs.replace(t, **place) for t in here) == recorded().tensors


def test_the_plan_of_the_recorded_table() -> None:
    codec, real = plan_for(config(2)).codec, config(2)
    sizes = {row.megatron: [size_of(part, real) for part in row.parts] for row in codec.rows}
    held = {name: (sum(s[0] for s in parts), *parts[0][1:]) for name, parts in sizes.items()}
    plan = make_plan(recorded(), codec, held, 2)
    groups, experts = real["num_key_value_heads"], real["num_experts"]
    assert len(plan.pieces) == 3 + 2 * (3 * groups + 1 + 2 + 2 + 1 + 3 * experts)
    assert sum(piece.count for piece in plan.pieces) == sum(torch.Size(t.shape).numel() for t in recorded().tensors)
    made = {i: held[name][-1] for i, name in enumerate(plan.sources) if "linear_" in name}
    turns = make_schedule(plan, made, 128 << 20).slots
    assert len(turns) == -(-sum(p.count for p in plan.pieces if p.source in made) // (128 << 20))
    for fills in turns:  # back to back
        assert [one.at for one in fills] == [sum(x.piece.count for x in fills[:i]) for i in range(len(fills))]


def test_an_obstacle_is_the_plans_refusal(table: EngineTable) -> None:
    with pytest.raises(PlanError, match=r"model.layers.3: MLA"):
        plan_of(msgspec.structs.replace(table, obstacles=(Obstacle("model.layers.3", "MLA"),)))
    mixed = msgspec.structs.replace(table.tensors[-1], dtype="float32")
    with pytest.raises(PlanError, match="one dtype"):
        plan_of(msgspec.structs.replace(table, tensors=(*table.tensors[:-1], mixed)))


# ---- the survey -------------------------------------------------------------------------------------------------------


def obstacles(model: torch.nn.Module, settings: dict[str, Any] = PLAIN) -> list[str]:
    return [f"{o.where}: {o.why}" for o in survey(model, settings, "0.25.1").obstacles if "not on a GPU" not in o.why]


def test_the_survey_names_what_it_does_not_know() -> None:
    model: Any = engine_model(MOE, torch.bfloat16)
    assert obstacles(model) == []
    assert survey(model, PLAIN, "x").moe_backend == "TRITON"
    attention, routed = model.model.layers[1].self_attn, model.model.layers[0].mlp.experts.routed_experts
    routed.quant_method.unquantized_backend = "FlashInfer CUTLASS"
    attention.o_proj.quant_method = type("Fp8LinearMethod", (), {})()
    attention.W_UK_T = torch.ones(2)
    attention.q_norm.register_buffer("cos_sin_cache", torch.ones(2))
    attention.register_parameter("odd", torch.nn.Parameter(torch.ones(4, 4).t()))
    found = obstacles(model, {"quantization": "fp8"})
    wanted = ["quantization: 'fp8'", "routed_experts: the MoE backend FlashInfer CUTLASS", "o_proj.quant_method: Fp8LinearMethod",
              "self_attn.W_UK_T: a tensor that may be derived", "self_attn: Module is not a layer", "self_attn.odd: it is not contiguous"]  # fmt: skip
    assert len(found) == len(wanted)
    assert all(any(text in one for one in found) for text in wanted), found


# ---- checksums --------------------------------------------------------------------------------------------------------


def by_hand(words: list[int]) -> int:
    mask, total = (1 << 64) - 1, 0
    for i, word in enumerate(words):
        h = (word ^ ((i + 1) * checksum.P1)) & mask
        h = ((h ^ (h >> 32)) * checksum.P2) & mask
        h = ((h ^ (h >> 29)) * checksum.P3) & mask
        total += h ^ (h >> 32)
    return checksum.to_signed(total)


def test_the_checksum_is_its_definition_in_any_pieces() -> None:
    words = torch.randint(-(1 << 62), 1 << 62, (1001,), generator=torch.Generator().manual_seed(3))
    assert checksum.sum_of(words) == by_hand([int(w) & ((1 << 64) - 1) for w in words])
    parts = sum(checksum.sum_of(words[at : at + 77], at) for at in range(0, 1001, 77))
    assert checksum.to_signed(parts) == checksum.sum_of(words)
    assert checksum.sum_of(words.view(torch.bfloat16).view(143, 28)) == checksum.sum_of(words)


def test_any_flipped_bit_and_any_exchange_shows() -> None:
    words = torch.arange(64)
    seen = {checksum.sum_of(words)}
    for bit in range(0, 64 * 64, 7):
        other = words.clone()
        other[bit // 64] ^= checksum.to_signed(1 << bit % 64)
        seen.add(checksum.sum_of(other))
    for i in range(63):
        other = words.clone()
        other[[i, i + 1]] = other[[i + 1, i]]
        seen.add(checksum.sum_of(other))
    assert len(seen) == 1 + len(range(0, 64 * 64, 7)) + 63
