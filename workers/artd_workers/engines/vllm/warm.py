"""Makes every form of vLLM's Triton kernel for experts ready, before anything is served.

Triton compiles the kernel anew for each choice of tiles and for each pattern of sizes that 16 divides; both depend on how many
tokens a step has. vLLM's own start meets the forms of its graphs and of its largest step; the first request with another form
would wait for the compiler. Here vLLM's dummy step runs once for each form. The steps follow from vLLM's own choice of tiles. A
dummy step has no request and no attention, writes no KV cache, draws no random number and is not counted; what it leaves in
buffers, every step overwrites. A failure only costs time. Read in vLLM 0.25.1 and 0.32; it imports vLLM only when called.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

_SPARSE = 4
"""vLLM does not sort rows if there are this many times fewer of them than experts."""
_ALIGNED = 16


@dataclass(frozen=True)
class Experts:
    """Layers of one shape.

    `tiles(tokens)` is vLLM's choice of tiles. `chosen` is the number of experts for each token, `known` that of the
    model. `mapped` says whether vLLM looks up in a map which experts this rank has.
    """

    tiles: Callable[[int], Mapping[str, int]]
    chosen: int
    known: int
    mapped: bool = False

    def form(self, tokens: int) -> Hashable:
        """Return what the kernel is compiled for; steps with equal forms share a kernel."""
        tiles = self.tiles(tokens)
        rows, block = tokens * self.chosen, tiles["BLOCK_SIZE_M"]
        padded = rows * block if rows < self.known else rows + self.known * (block - 1)
        unsorted = not self.mapped and _SPARSE * rows <= self.known
        return (*sorted(tiles.items()), unsorted, _special(rows), _special(padded))


def steps(experts: Sequence[Experts], most: int) -> list[int]:
    """Return, of steps of 1 to `most` tokens, the smallest of each form; the commonest forms come first, since time may run
    out."""
    first: dict[Hashable, int] = {}
    met: Counter[Hashable] = Counter()
    for tokens in range(1, most + 1 if experts else 1):
        form = tuple(one.form(tokens) for one in experts)
        first.setdefault(form, tokens)
        met[form] += 1
    return [first[form] for form, _ in met.most_common()]


def warm(runner: Any, timeout_s: float) -> dict[str, float]:
    """Run the steps in a worker's model runner; start none after `timeout_s` seconds.

    Returns `forms` that exist, `run` of them, `kernels` that Triton made ready (compiled, or read from its cache on disk), and
    `seconds`.
    """
    from vllm.config import CUDAGraphMode

    began, done = time.monotonic(), 0
    wanted = steps(experts_of(runner.get_model()), runner.max_num_tokens)
    with _made_ready() as kernels:
        for tokens in wanted:
            if time.monotonic() - began >= timeout_s:
                break
            runner._dummy_run(tokens, cudagraph_runtime_mode=CUDAGraphMode.NONE, skip_eplb=True)
            done += 1
        runner._sync_device()
    return {"forms": len(wanted), "run": done, "kernels": len(kernels), "seconds": time.monotonic() - began}


def experts_of(model: Any) -> list[Experts]:
    """Return the shapes of a loaded model's unquantised experts; most models have one."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

    found: dict[Hashable, Experts] = {}
    for module in model.modules():
        if not isinstance(module, RoutedExperts):
            continue
        up, down = module.w13_weight, module.w2_weight
        known, mapped = module.global_num_experts, module.expert_map is not None
        dtype = FUSED_MOE_UNQUANTIZED_CONFIG.config_name(up.dtype)
        shape = (tuple(up.shape), tuple(down.shape), module.top_k, dtype)
        tiles = partial(try_get_optimal_moe_config, *shape)
        found.setdefault((shape, known, mapped), Experts(tiles, module.top_k, known, mapped))
    return list(found.values())


def _special(size: int) -> int:
    """Return what Triton specialises on for an integer: 1, a multiple of 16, or any other."""
    return 1 if size == 1 else _ALIGNED if size % _ALIGNED == 0 else 0


@contextmanager
def _made_ready() -> Iterator[list[str]]:
    """Collect the names of the kernels that Triton makes ready inside the block.

    vLLM's own monitor, which warns of the first kernel of each name, does not hear of these; its warning means one that was
    missed.
    """
    from vllm.triton_utils import HAS_TRITON

    names: list[str] = []
    if not HAS_TRITON:
        yield names
        return
    from triton import knobs

    told = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **words: names.append(getattr(words.get("fn"), "name", "?"))
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = told
