"""A direct push without a GPU: plain memory for CUDA's, modules with vLLM's names and shapes for vLLM's.

Queues work at once. Only `Session` fills an "engine" here.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from artd_schema.wire.direct import EngineTable, Offer, Plan
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Fence
from artd_workers.engines.gate import Gate
from artd_workers.engines.pull.session import Session
from artd_workers.engines.vllm.direct.survey import parameters, survey
from artd_workers.models.codec import peft_names
from artd_workers.models.registry import plan_for
from artd_workers.trainer.push.direct.checksums import ServedWeights
from artd_workers.trainer.push.direct.feeder import Aborted, Feeder
from artd_workers.trainer.push.direct.plan import make_plan
from artd_workers.trainer.push.direct.weight_lock import WeightLock
from artd_workers.trainer.push.direct.weight_source import WeightSource
from artd_workers.trainer.push.snapshot import Snapshot
from artd_workers.transfer import checksum
from artd_workers.transfer.checksum import WORD, Span
from tests.plain_wire import PlainWire

PLAIN: dict[str, Any] = {"quantization": None, "enable_lora": False}


class Done:
    def done(self) -> bool:
        return True


class MemoryQueue:
    def copy(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)

    def copy2d(self, to: int, pitch: int, source: int, width: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memmove(to + row * pitch, source + row * width, width)

    def sum(self, table: Sequence[Span], sums: Tensor, spans: tuple[int, int], copy: bool = False) -> None:
        for span in chain.from_iterable(map(lines, table[slice(*spans)])):
            size = span.words * WORD
            if copy:
                ctypes.memmove(span.address, span.other, size)
            words = torch.frombuffer((ctypes.c_char * size).from_address(span.address), dtype=torch.int64)
            sums[span.part] += checksum.sum_of(words, span.first)

    def mark(self) -> Done:
        return Done()

    def after(self, mark: Done) -> None:
        assert mark.done()

    def settle(self) -> None:
        return


def lines(span: Span) -> Iterator[Span]:
    """Its rows."""
    width = span.width or span.words
    for row in range(span.words // width):
        skip = row * (span.step or width) * WORD
        other = span.other + skip if span.other else 0
        yield Span(span.address + skip, span.first + row * span.pitch, width, span.part, other)


class MemoryPort:
    """A handle is an address: exporter and importer are one process."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.wires: list[PlainWire] = []

    def share(self, tensor: Tensor) -> tuple[bytes, int, int]:
        storage = tensor.untyped_storage()
        return struct.pack("<q", storage.data_ptr()), storage.data_ptr(), storage.nbytes()

    def open(self, handle: bytes) -> int:
        self.opened.append(struct.unpack("<q", handle)[0])
        return self.opened[-1]

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def free(self) -> int:
        return 1 << 40

    def queue(self) -> MemoryQueue:
        return MemoryQueue()

    def sums(self, spans: Sequence[Span]) -> Sequence[Span]:
        return spans

    def wire(self) -> PlainWire:
        self.wires.append(PlainWire())
        return self.wires[-1]


def _layer(name: str, **weights: Sequence[int]) -> nn.Module:
    """A module whose class has vLLM's name, with parameters of these shapes."""
    module: Any = type(name, (nn.Module,), {})()
    for key, size in weights.items():
        module.register_parameter(key, nn.Parameter(torch.full(tuple(size), torch.nan), requires_grad=False))
    return module


def _box(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def engine_model(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The parameters of vLLM 0.25.1's Qwen3, Qwen3-MoE and Llama with tensor-parallel size 1, all NaN."""
    llama = config.get("model_type") == "llama"
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, groups = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def mlp() -> nn.Module:
        if "num_experts" not in config:
            inner = config["intermediate_size"]
            both = _layer("MergedColumnParallelLinear", weight=(2 * inner, hidden))
            return _box(gate_up_proj=both, down_proj=_layer("RowParallelLinear", weight=(hidden, inner)))
        experts, inner = config["num_experts"], config["moe_intermediate_size"]
        routed: Any = _layer(
            "RoutedExperts", w13_weight=(experts, 2 * inner, hidden), w2_weight=(experts, hidden, inner)
        )
        routed.quant_method = type("UnquantizedFusedMoEMethod", (), {"unquantized_backend": "TRITON"})()
        gate = _layer("ReplicatedLinear", weight=(experts, hidden))
        return _box(gate=gate, experts=_box(routed_experts=routed))

    def layer() -> nn.Module:
        attention = _box(
            qkv_proj=_layer("QKVParallelLinear", weight=(queries + 2 * groups, hidden)),
            o_proj=_layer("RowParallelLinear", weight=(hidden, queries)),
            **({} if llama else {name: _layer("RMSNorm", weight=(head,)) for name in ("q_norm", "k_norm")}),
        )  # fmt: skip
        norms = {name: _layer("RMSNorm", weight=(hidden,)) for name in ("input_layernorm", "post_attention_layernorm")}
        return _box(self_attn=attention, mlp=mlp(), **norms)

    vocab = (config["vocab_size"], hidden)
    model = _box(
        model=_box(
            embed_tokens=_layer("VocabParallelEmbedding", weight=vocab),
            layers=nn.ModuleList(layer() for _ in range(config["num_hidden_layers"])),
            norm=_layer("RMSNorm", weight=(hidden,)),
        ),
        lm_head=_layer("ParallelLMHead", weight=vocab),
    )
    if config.get("tie_word_embeddings"):
        model.lm_head = model.model.embed_tokens
    return model.to(dtype)


def fused(hf: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """What an engine must hold by its own names, fused by hand. hf: what is served, by Hugging Face name."""
    out = {}
    for name, tensor in parameters(model).items():
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        if last == "qkv_proj":
            out[name] = torch.cat([hf[f"{stem}.{x}_proj.weight"] for x in "qkv"])
        elif last == "gate_up_proj":
            out[name] = torch.cat([hf[f"{stem}.{x}_proj.weight"] for x in ("gate", "up")])
        elif last in ("w13_weight", "w2_weight"):
            experts, words = stem.removesuffix(".routed_experts"), ("gate", "up") if "13" in last else ("down",)
            numbers = range(len(tensor))
            out[name] = torch.stack([torch.cat([hf[f"{experts}.{e}.{x}_proj.weight"] for x in words]) for e in numbers])
        else:
            out[name] = hf[name]
    return out


def engine_table(model: nn.Module) -> EngineTable:
    """Its table, without the obstacle that it lies on a CPU."""
    table = survey(model, PLAIN, "0.25.1")
    assert {o.why for o in table.obstacles} == {"it is on cpu, not on a GPU"}
    return msgspec.structs.replace(table, obstacles=())


@dataclass
class Pair:
    """A trainer's source and an engine's session over one model. base: by Hugging Face name; live: the trained adapter."""

    served: ServedWeights
    feeder: Feeder
    session: Session
    port: MemoryPort
    plan: Plan
    table: EngineTable
    model: nn.Module
    base: dict[str, Tensor]
    weights: dict[str, Tensor]
    live: dict[str, Tensor]
    scale: float
    number: int = 0
    snapshot: Snapshot | None = None

    def fence(self) -> Fence:
        self.number += 1
        return Fence("i", 1, self.number, self.number)

    def open(self, offer: Offer | None = None) -> None:
        self.session.open(offer or self.feeder.offer())

    def stage(self) -> dict[str, int]:
        """As a checkpoint does; returns its checksums by name."""
        self.snapshot = self.served.stage()
        return {entry.name: entry.sum64 for entry in self.snapshot.entries if entry.sum64 is not None}

    def feed(self, fence: int, timeout_s: float) -> None:
        """Feed a push of what was staged. Raises what `Feeder.feed` raises, Stale."""
        assert self.snapshot is not None
        deadline = Deadline(timeout_s)
        with self.snapshot.hold(deadline, self.feeder.abort):
            self.feeder.feed(fence, deadline)

    def push(self, timeout_s: float = 20.0) -> dict[str, float]:
        fence = self.fence()
        with feeding(self, fence.fence, timeout_s):
            return self.session.pull(fence, timeout_s)


class feeding:
    """The trainer's feed in a thread."""

    def __init__(self, pair: Pair, fence: int, timeout_s: float) -> None:
        self._pair = pair
        self._thread = threading.Thread(target=self._run, args=(fence, timeout_s))

    def _run(self, fence: int, timeout_s: float) -> None:
        try:
            self._pair.feed(fence, timeout_s)
        except (TimeoutError, Aborted):
            return  # the engine gave up: its own error says why

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:  # nobody takes the rest
            self._pair.feeder.abort()
        self._thread.join()


def adapter_for(config: Mapping[str, Any], base: Mapping[str, Tensor], rank: int) -> Iterator[tuple[str, Tensor]]:
    """(PEFT name, tensor) of an adapter that does something, fp32, on the base's device."""
    for row in plan_for(config).codec.lora_rows():
        for part in row.parts:
            (out, size), device = base[part].shape, base[part].device
            for name, shape in zip(peft_names(part), ((rank, size), (out, rank)), strict=True):
                yield name, torch.randn(shape, device=device) * 0.05


def pair(
    config: Mapping[str, Any], base: Mapping[str, Tensor], folder: Path, rank: int = 4, dtype: torch.dtype = torch.bfloat16,
    buffer_bytes: int = 1 << 14, buffers: int = 3,
) -> Pair:  # fmt: skip
    """rank 0: no adapter. The trainer's tensors are the codec's, each by itself."""
    plan, held = plan_for(config), dict(base.items())
    weights = {name: tensor.contiguous().clone() for name, tensor in plan.codec.to_megatron(held)}
    live = dict(adapter_for(config, held, rank)) if rank else {}
    model = engine_model(config, dtype)
    table, port = engine_table(model), MemoryPort()
    weight_source = WeightSource(port, plan.codec, weights, WeightLock(live, dict, 2.0), dtype, buffers, buffer_bytes)
    served = ServedWeights(weight_source, tuple(held))
    made = make_plan(table, plan.codec, weight_source.shapes, dtype.itemsize)
    feeder = Feeder(weight_source, made, folder)
    found = parameters(model)
    session = Session(Gate("i", 1), port, tuple(found), tuple(found.values()))
    return Pair(served, feeder, session, port, made, table, model, held, weights, live, 2.0)
