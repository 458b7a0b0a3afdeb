"""What vLLM 0.32 on a CPU needs so that a model can be loaded again in place.

Its CPU kernels read packed weights. vLLM packs experts when it makes a layer's kernel, and a head tied to the embedding when it
makes the model; weights that come later would never reach these, without any error. After `forget_kernels` the next load of a
layer makes its kernel, and packs, as the first load did. After `pack_tied_heads` a tied head uses the present embedding. On a
GPU neither does anything: kernels read the parameters themselves, and CUDA graphs hold their addresses.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform


def forget_kernels(model: torch.nn.Module) -> None:
    """Make the next load build the experts' kernels again. Call it before a reload."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_tied_heads(model: torch.nn.Module) -> None:
    """Pack heads that are tied to the embedding again. Call it after a reload."""
    if not current_platform.is_cpu():
        return
    vocabularies = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embedded = {id(one.weight) for one in vocabularies if not isinstance(one, ParallelLMHead)}
    for one in vocabularies:
        if isinstance(one, ParallelLMHead) and id(one.weight) in embedded:
            one.quant_method.process_weights_after_loading(one)
