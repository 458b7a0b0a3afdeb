"""Loads through vLLM's layerwise reload: a layer is processed again when all of it is there, and copied to where it was.

It serves models whose kernels read a layout of their own: on a CPU linears are repacked, so writing parameters in place would
be wrong. Runs in vLLM 0.32 on CPU and 0.25 on CUDA.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from .hashing import Entry, WeightError
from .load import Source, feed
from .repack import forget_kernels, pack_tied_heads


class Reload:
    """A `load.Load` by layerwise reload."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._config = model_config
        self._expected: set[str] = set()
        self.seconds: dict[str, float] = {}
        self.bytes = 0

    def start(self) -> None:
        self._expected = {name for name, _ in self._model.named_parameters()}  # a tied head has its embedding's name
        forget_kernels(self._model)
        initialize_layerwise_reload(self._model)

    def load(self, table: list[Entry], source: Source) -> None:
        began = time.perf_counter()
        loaded = feed(self, self._model, table, source)
        if missing := sorted(self._expected - loaded):
            raise WeightError(f"{len(missing)} parameters of the model got no weights, the first is {missing[0]}")
        if partly := incomplete(self._model):
            raise WeightError(
                f"{len(partly)} layers of the model got only some of their weights, the first is {partly[0]}"
            )
        self.seconds["load"] = time.perf_counter() - began - self.seconds["transfer"]

    def finish(self) -> None:
        finalize_layerwise_reload(self._model, self._config)
        pack_tied_heads(self._model)


def incomplete(model: torch.nn.Module) -> list[str]:
    """Return the layers of a running reload that got some but not all of their weights; vLLM would leave the rest undefined.

    An embedding is left out, because its rows are padded and never complete.
    """
    found = []
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        partly = info.can_load() and 0 < (info.load_numel or 0) < (info.load_numel_total or 0)
        if partly and not isinstance(module, VocabParallelEmbedding):
            found.append(name)
    return found
