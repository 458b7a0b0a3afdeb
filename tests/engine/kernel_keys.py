"""Lists what vLLM would compile its experts' kernel for, by vLLM's own code, without a GPU: `VLLM_PYTHON kernel_keys.py DEVICE
MOST SHAPE...`.

A SHAPE is EXPERTS,CHOSEN,INNER. It prints a JSON line for each: `keys` has a number for each number of tokens 1 .. MOST, equal
where Triton would share both kernels of a layer; `steps` is what artd would run. DEVICE names the tuned tiles, where there are
any. The kernel is replaced by a function that records its arguments; tensors have no memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe import RoutedExperts, fused_moe
from vllm.platforms import current_platform

from artd_workers.engines.vllm.warm import experts_of, steps

HIDDEN = 64


class Noted:
    """Stands for the kernel. Triton tells integers apart as 1, multiples of 16, others; constants by their value."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **constants: Any) -> None:
            told = [("one" if one == 1 else one % 16 == 0) if isinstance(one, int) else one is None for one in given]
            self.calls.append((told, sorted(constants.items())))

        return launch


def layer(experts: int, chosen: int, inner: int) -> Any:
    """vLLM's own class, with what its kernel is launched by."""
    made: Any = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(made)
    made.w13_weight = torch.nn.Parameter(empty(experts, 2 * inner, HIDDEN), requires_grad=False)
    made.w2_weight = torch.nn.Parameter(empty(experts, HIDDEN, inner), requires_grad=False)
    made.top_k, made.global_num_experts = chosen, experts
    made.quant_method, made.rocm_aiter_fmoe_enabled = None, False
    made.register_buffer("_expert_map", None)
    return made


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def key(made: Any, tokens: int) -> str:
    """Of both launches of a layer, as `TritonExperts.apply` makes them."""
    up, down, chosen = made.w13_weight, made.w2_weight, made.top_k
    tiles = fused_moe.try_get_optimal_moe_config(up.size(), down.size(), chosen, None, tokens)
    ids = torch.empty((tokens, chosen), dtype=torch.int32, device="meta")
    rows = fused_moe._prepare_expert_assignment(ids, tiles, tokens, chosen, made.global_num_experts, None)
    noted = fused_moe.fused_moe_kernel = Noted()
    none: dict[str, Any] = dict.fromkeys(
        ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
    )
    inner = down.size(2)
    for given, weight, width, mul, each in (
        (empty(tokens, HIDDEN), up, 2 * inner, False, chosen),
        (empty(tokens * chosen, inner), down, HIDDEN, True, 1),
    ):
        weights = empty(tokens, chosen) if mul else None
        fused_moe.invoke_fused_moe_triton_kernel(
            given, weight, empty(tokens, chosen, width), None, None, weights, *rows, mul, each, tiles, compute_type="bf16", **none
        )  # fmt: skip
    return repr(noted.calls)


def main() -> None:
    device, most, *shapes = sys.argv[1:]
    type(current_platform).get_device_name = classmethod(lambda *_: device)
    _custom_ops.moe_align_block_size = lambda *_: None
    for shape in shapes:
        made = layer(*map(int, shape.split(",")))
        numbers: dict[str, int] = {}
        keys = [numbers.setdefault(key(made, tokens), len(numbers)) for tokens in range(1, int(most) + 1)]
        print(json.dumps({"keys": keys, "steps": steps(experts_of(made), int(most))}))


if __name__ == "__main__":
    main()
