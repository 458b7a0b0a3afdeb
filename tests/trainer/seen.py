"""Records what operations of torch return while they run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Logits(TorchDispatchMode):
    """The largest number of tokens of which an operation gave something for every word. weight: numbers in the head's own weight,
    which has as many words."""

    def __init__(self, words: int, weight: int) -> None:
        super().__init__()
        self.words, self.weight, self.tokens = words, weight, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and self.words in tensor.shape and tensor.numel() != self.weight:
                self.tokens = max(self.tokens, tensor.numel() // self.words)
        return out
