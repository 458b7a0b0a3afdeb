"""A CPU under a GPU's name, for libraries that need one: Megatron's optimizer asks for tensors of type
`torch.cuda.FloatTensor`, and makes some with device="cuda".

While it is entered it replaces parts of torch, and changes no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """What is asked for on a GPU is made on the CPU; a tensor's type is told as a GPU's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(found, str) else found


@contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """In this thread, until the end of the block."""
    device = patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
    with _OnCpu(), device, patch.object(torch.cuda, "current_stream"):
        yield
