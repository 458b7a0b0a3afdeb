"""The trainer's kernels alone, tile by tile: `python -m tools.gpu.kernels [--items merge,layer,thin,linear] [--out DIR] [--tiny]`.

Purpose: one JSON line for each kernel and tile, appended to DIR/kernels.jsonl as soon as it is known: microseconds, bytes a
second, and whether it gives what it has to. `--tiny`: the same in Triton's interpreter on a CPU, in small, to try the script.
Needs this repository's packages on PYTHONPATH; neither Megatron-Core nor Transformer Engine but for `layer`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from types import SimpleNamespace
from typing import Any

from tools.gpu import lines  # first: it sets the environment

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from artd_schema.wire.direct import Piece
from artd_workers.models.codec import peft_names
from artd_workers.trainer.model.experts import routed
from artd_workers.trainer.model.experts.routed import Order, PlainAdapted
from artd_workers.trainer.model.kernels import adapted as thin
from artd_workers.trainer.model.kernels.adapted import Tile as Thin
from artd_workers.trainer.push.direct.merge_cuda import CudaFiller, Tile
from artd_workers.trainer.push.direct.schedule import Fill
from artd_workers.transfer.merge import merge as exact

Line = dict[str, Any]
RANK, SCALE, EXPERTS, TOPK = 16, 2.0, 128, 8
MERGES = [Tile.of(RANK)] + [
    Tile(*one)
    for one in (
        (32, 1, 256, 1),
        (128, 1, 256, 1),
        (256, 1, 256, 1),
        (16, 1, 256, 1),
        (64, 1, 128, 1),
        (64, 1, 64, 1),
        (64, 1, 256, 2),
        (64, 1, 512, 1),
        (64, 1, 512, 2),
        (64, 1, 512, 4),
        (32, 1, 128, 1),
        (32, 1, 512, 2),
        (64, 2, 256, 1),
    )
]
"""Tiles of the merge; the first is the one in use, the last the one that was."""
TILES = {
    "gather": ((64, 64, 4), (64, 128, 4), (128, 128, 8), (64, 256, 8)),
    "widen": ((64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 128, 8)),
    "activate": ((64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8)),
    "activate_backward": ((64, 32, 4), (64, 64, 4), (64, 64, 8), (64, 128, 8)),
    "gradients": ((64, 128, 4), (32, 128, 4), (16, 128, 4), (32, 64, 4), (32, 256, 4)),
}
"""Tiles of the thin products, beside the one in use."""
IN_USE = dict(thin.TILES)


def timed(call: Callable[[], object], tiny: bool, rounds: int = 20) -> float:
    """Median seconds of a call on the device."""
    if tiny:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    for _ in range(3):
        call()
    seconds = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return statistics.median(seconds)


def merge(tiny: bool) -> Iterator[Line]:
    """One buffer of the ring, by every tile; each buffer compared bit by bit with the CPU's merge, a few parts of it."""
    device = "cpu" if tiny else "cuda"
    dtype = torch.float32 if tiny else torch.bfloat16  # the interpreter cuts off where a GPU rounds
    stream = SimpleNamespace(stream=None if tiny else torch.cuda.current_stream())
    for rows, width, count in ((40, 96, 3),) if tiny else ((768, 2048, 80), (2048, 768, 80)):
        parts = [f"part{i}.weight" for i in range(count)]
        weight = torch.randn(count * rows, width, device=device).to(dtype)
        flat = torch.randn(count * RANK * (rows + width), device=device) * 0.02
        adapter, at = {}, 0
        for part in parts:
            for name, shape in zip(peft_names(part), ((RANK, width), (rows, RANK)), strict=True):
                adapter[name] = flat[at : (at := at + shape[0] * shape[1])].view(shape)
        size = rows * width
        turn = [Fill(Piece(0, 0, i, 0, 0, 0, i * size, size), i * size) for i in range(count)]
        out = torch.empty(count * size, dtype=dtype, device=device)
        checked = range(0, count, max(1, count // 4))
        wanted = {
            i: exact(
                weight[i * rows : (i + 1) * rows].cpu(),
                *(adapter[n].cpu() for n in peft_names(parts[i])),
                scale=SCALE,
                dtype=dtype,
            )
            for i in checked
        }
        for tile in MERGES[:2] if tiny else MERGES:
            filler = CudaFiller([turn], [weight], parts, adapter, flat, SCALE, tile)
            out.zero_()
            seconds = timed(partial(filler.fill, 0, out, stream), tiny)
            equal = all(torch.equal(out[i * size : (i + 1) * size].cpu().view(rows, width), wanted[i]) for i in checked)
            yield {
                "what": "merge", "rows": rows, "width": width, "tile": astuple(tile), "us": 1e6 * seconds,
                "merged_tb_s": out.nbytes / seconds / 1e12, "bit_equal": equal,
            }  # fmt: skip


class Layer:
    """One layer's tensors between the products, for a row of 7,690 tokens of the 30B-A3B shape."""

    def __init__(self, tiny: bool) -> None:
        tokens, self.hidden, self.inner, experts, topk = (
            (37, 96, 48, 5, 2) if tiny else (7690, 2048, 768, EXPERTS, TOPK)
        )
        device, self.dtype = ("cpu", torch.float16) if tiny else ("cuda", torch.bfloat16)
        torch.manual_seed(0)

        def draw(*size: int, std: float = 1.0, dtype: torch.dtype = self.dtype) -> Tensor:
            return (torch.randn(size, device=device) * std).to(dtype)

        self.x, self.grad = draw(tokens, self.hidden), draw(tokens, self.hidden)
        scores = draw(tokens, experts, dtype=torch.float32)
        chosen = scores.topk(topk)
        self.probs, self.way = chosen.values.softmax(-1), Order.of(chosen.indices, experts)
        rows, self.experts = tokens * topk, experts
        self.weights = (
            draw(experts, 2 * self.inner, self.hidden, std=0.02),
            draw(experts, self.hidden, self.inner, std=0.02),
        )
        self.pairs = (
            OnePair(draw, experts, 2, self.hidden, self.inner),
            OnePair(draw, experts, 1, self.inner, self.hidden),
        )
        (self.a1, self.b1), (self.a2, self.b2) = (pair.join(self.dtype) for pair in self.pairs)
        self.low1, self.low2 = draw(rows, 2 * RANK), draw(rows, RANK)
        self.both, self.out = draw(rows, 2 * self.inner), draw(rows, self.hidden)
        self.slope = draw(rows, self.inner)
        self.keep = False

    def written(self, tensor: Tensor) -> Tensor:
        """What a call may write to: the tensor itself when only time counts, unless `keep`."""
        return tensor.clone() if self.keep else tensor


class OnePair(nn.Module):
    """As `grouped.GroupedAdapter`, with a B that is not zero."""

    def __init__(self, draw: Any, experts: int, parts: int, width: int, out: int) -> None:
        super().__init__()
        self.a = nn.Parameter(draw(experts, parts, RANK, width, std=0.02, dtype=torch.float32))
        self.b = nn.Parameter(draw(experts, parts, out, RANK, std=0.02, dtype=torch.float32))
        self.scale = SCALE
        with torch.no_grad():
            apart = torch.eye(parts, device=self.b.device)[:, None, :, None]
            joined = (self.b[:, :, :, None, :] * apart).flatten(3, 4).flatten(1, 2)
            self._joined = {
                d: ((SCALE * self.a.flatten(1, 2)).to(d), joined.to(d)) for d in (torch.bfloat16, torch.float16)
            }

    def join(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._joined[dtype]

    def gradients(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.a.shape[1]
        own = b.unflatten(1, (parts, -1)).unflatten(3, (parts, RANK))
        d_b = own.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).float().contiguous()
        return a.unflatten(1, (parts, RANK)).float() * self.scale, d_b


def calls(it: Layer) -> dict[str, tuple[str, int, Callable[[Any], tuple[Tensor, ...]]]]:
    """By name: the function, the bytes that it has to move, and a call of it from either module."""
    flat, way, (one, two) = it.probs.flatten(), it.way, it.pairs
    wide, inner = it.out.nbytes, it.slope.nbytes

    def widened(steps: Any, low: Tensor, weight: Tensor) -> tuple[Tensor]:
        y = it.written(it.out)
        steps.widen(y, low, weight, way)
        return (y,)

    def activated(steps: Any) -> tuple[Tensor, ...]:
        both = it.written(it.both)
        return (*steps.activate(both, it.low1, it.b1, it.a2, flat, way), both)

    return {
        "rows in, times A": ("gather", wide, lambda s: s.gather(it.x, way, it.a1.transpose(1, 2))),
        "slopes in, times B": ("gather", wide, lambda s: s.gather(it.grad, way, it.b2)),
        "times B, added": ("widen", 2 * wide, lambda s: widened(s, it.low2, it.b2.transpose(1, 2))),
        "times A, added": ("widen", 2 * wide, lambda s: widened(s, it.low1, it.a1)),
        "activation": ("activate", 5 * inner, activated),
        "activation's gradient": (
            "activate_backward", 6 * inner,
            lambda s: s.activate_backward(it.slope, it.low2, it.a2, it.both, it.b1, flat, way),
        ),
        "gradients of gate and up": (
            "gradients", 2 * inner,
            lambda s: s.gradients(one, way, (it.x, True), it.low1, (it.both, False), it.low1),
        ),
        "gradients of down": (
            "gradients", inner, lambda s: s.gradients(two, way, (it.slope, False), it.low2, (it.grad, True), it.low2)
        ),
    }  # fmt: skip


def thins(tiny: bool) -> Iterator[Line]:
    """Every thin product of a layer by every tile, and whether it agrees with plain torch on the same device."""
    it = Layer(tiny)
    for what, (function, size, call) in calls(it).items():
        used = astuple(IN_USE[function])
        for tile in (used,) if tiny else (used, *(one for one in TILES[function] if one != used)):
            thin.TILES[function] = Thin(*tile)
            try:
                it.keep = True
                found, wanted = call(thin), call(PlainAdapted)
                it.keep = False
                seconds = timed(partial(call, thin), tiny)
            except Exception as error:  # a tile that does not fit is a result too
                yield {"what": what, "tile": tile, "error": f"{type(error).__name__}: {error}"[:200]}
                continue
            yield {
                "what": what, "function": function, "tile": tile, "us": 1e6 * seconds, "tb_s": size / seconds / 1e12,
                "relative": [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, wanted, strict=True)],
            }  # fmt: skip
        thin.TILES[function] = IN_USE[function]
        seconds = timed(partial(call, PlainAdapted), tiny, 5)
        yield {"what": what, "function": function, "tile": "plain torch", "us": 1e6 * seconds}
    products = (
        (it.out, it.a1.transpose(1, 2)), (it.low1, it.b1.transpose(1, 2)), (it.slope, it.a2.transpose(1, 2)),
        (it.low2, it.b2.transpose(1, 2)), (it.out, it.b2), (it.low2, it.a2), (it.both, it.b1), (it.low1, it.a1),
        (it.low1.t(), it.out), (it.both.t(), it.low1), (it.low2.t(), it.slope), (it.out.t(), it.low2),
    )  # fmt: skip
    each = [1e6 * timed(partial(F.grouped_mm, a, b, offs=it.way.ends), tiny) for a, b in products]
    yield {"what": "each thin product of a layer by grouped_mm", "us": sum(each), "each_us": each}


def layer(tiny: bool) -> Iterator[Line]:
    """All experts of a layer, forward and backward: with adapters, and bare."""
    it = Layer(tiny)
    x = it.x.clone().requires_grad_()
    for name, pairs in (("with adapters", it.pairs), ("bare", None)):

        def once(pairs: Any = pairs) -> None:
            x.grad = None
            routed.apply(x, it.probs, it.way, it.weights, pairs).backward(it.grad)

        yield {"what": f"experts of a layer, {name}", "us": 1e6 * timed(once, tiny)}


def linear(tiny: bool) -> Iterator[Line]:
    """Attention's linears with their adapters: the thin product added to the other, or the other way round; and the backward's."""
    device, dtype, tokens = ("cpu", torch.float32, 64) if tiny else ("cuda", torch.bfloat16, 7690)
    for name, out, width, rank in (("qkv", 5120, 2048, 3 * RANK), ("proj", 2048, 4096, RANK)):
        x, weight = (torch.randn(size, width, device=device).to(dtype) for size in (tokens, out))
        low, b, slope = (
            torch.randn(size, device=device).to(dtype) for size in ((tokens, rank), (out, rank), (tokens, out))
        )
        ways: dict[str, Callable[[], object]] = {
            "bare": lambda x=x, weight=weight: x @ weight.t(),
            "thin added": lambda x=x, weight=weight, low=low, b=b: (x @ weight.t()).addmm_(low, b.t()),
            "added to thin": lambda x=x, weight=weight, low=low, b=b: (low @ b.t()).addmm_(x, weight.t()),
            "slope times B": lambda slope=slope, b=b: slope @ b,
            "gradient of B": lambda slope=slope, low=low: slope.t() @ low,
            "gradient of A": lambda x=x, low=low: low.t() @ x,
        }
        yield {"what": f"linear {name}"} | {way: 1e6 * timed(call, tiny) for way, call in ways.items()}


ITEMS: dict[str, lines.Item] = {"merge": merge, "layer": layer, "thin": thins, "linear": linear}

if __name__ == "__main__":
    sys.exit(lines.main("kernels", ITEMS))
