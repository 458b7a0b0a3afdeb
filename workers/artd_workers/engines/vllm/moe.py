"""What vLLM 0.32 on CPU needs so that a mixture of experts can be loaded again in place.

Purpose: its CPU kernel wants experts packed in a form of its own. It packs them when a layer's kernel is made, which happens
at the first load only: experts that come later stay unpacked, and the model answers nonsense without any error.
Owner of: no state. Invariant: after `forget_kernels` the next load of a layer makes its kernel, and packs, as the first did.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform


def forget_kernels(model: torch.nn.Module) -> None:
    """Call before a reload begins. On a GPU it does nothing: there kernels stay, as CUDA graphs hold their addresses."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def incomplete(model: torch.nn.Module) -> list[str]:
    """Layers of a reload under way that got some of their weights, but not all: vLLM would fill the rest with anything.

    An embedding is left out: its rows are padded, so it never gets all.
    """
    found = []
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        partly = info.can_load() and 0 < (info.load_numel or 0) < (info.load_numel_total or 0)
        if partly and not isinstance(module, VocabParallelEmbedding):
            found.append(name)
    return found
