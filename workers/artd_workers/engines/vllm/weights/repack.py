"""What vLLM 0.32 on CPU needs so that a model can be loaded again in place.

Purpose: its CPU kernels read weights in a form of their own. vLLM packs experts when a layer's kernel is made, and a head tied to
the embedding when the model is made; weights that come later would never reach these, without any error.
Owner of: no state. Invariants: after `forget_kernels` the next load of a layer makes its kernel, and packs, as the first did;
after `pack_tied_heads` a tied head answers by the embedding as it is now. On a GPU neither does anything: kernels read the
parameters themselves, and CUDA graphs hold their addresses.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform


def forget_kernels(model: torch.nn.Module) -> None:
    """Call before a reload begins."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_tied_heads(model: torch.nn.Module) -> None:
    """Call after a reload has ended."""
    if not current_platform.is_cpu():
        return
    vocabularies = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embedded = {id(one.weight) for one in vocabularies if not isinstance(one, ParallelLMHead)}
    for one in vocabularies:
        if isinstance(one, ParallelLMHead) and id(one.weight) in embedded:
            one.quant_method.process_weights_after_loading(one)
