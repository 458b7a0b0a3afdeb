"""Says where a model lives and in what numbers it computes: everything that differs between CPU and GPU, by name.

`Placement` chooses the device, the dtype of base weights and activations, whether the experts of a layer are one parameter
(grouped products) or many, and what is recomputed. `of` makes a run's, and `model.build` takes it. Masters and the optimizer's
moments are fp32 everywhere. Nothing here imports Transformer Engine, which exists only with a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from artd_schema.run.spec import RunSpec
from artd_workers.transfer.nccl import stock


@dataclass(frozen=True)
class Placement:
    """Where and how a model computes.

    `device`: `cpu` or `cuda`. `dtype`: of base weights and activations. `grouped`: a layer's experts are one parameter.
    `recompute`: how many layers, from the first, keep only their input and run again in the backward. `selective`: the sparse
    part of every layer does so instead.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    grouped: bool = False
    recompute: int = 0
    selective: bool = False

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def again(self) -> bool:
        """Whether anything runs again in the backward."""
        return self.selective or self.recompute > 0

    def settings(self) -> dict[str, Any]:
        """Return the arguments for TransformerConfig."""
        numbers = {
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            "bf16": self.dtype == torch.bfloat16,
            "use_cpu_initialization": not self.cuda,
        }
        if not self.again:
            return numbers
        if self.selective:
            return numbers | {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
        again = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": self.recompute}
        return numbers | again


CPU = Placement()
"""float32, one expert after the other, so a batch gives the same bits again."""
CUDA = Placement("cuda", torch.bfloat16, grouped=True)
"""bf16 with Transformer Engine, FlexAttention and grouped products."""


def device_of(spec: RunSpec) -> str:
    """Return `cpu` or `cuda`. Raises ValueError when the run wants a GPU and there is none."""
    asked = spec.trainer.device
    if asked == "cpu":
        return asked
    found = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if found else "cpu"
    if not found:
        raise ValueError(
            "trainer.device is cuda, and torch sees no GPU here: start artd where there is one, or use cpu"
        )
    return asked


def prepare(spec: RunSpec) -> None:
    """Set the environment that a run's libraries read when they are imported. Call it before Megatron-Core is imported."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device_of(spec) == "cuda":
        for name, value in stock.ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if spec.trainer.tensor_parallel > 1:
            # Megatron's overlaps expect one queue for all launches. Only then, because a push's launches wait behind a train step's.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    else:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"


def of(spec: RunSpec, layers: int) -> Placement:
    """Return a run's placement. Raises ValueError when its device cannot do what the run wants."""
    device, asked = device_of(spec), spec.trainer
    dtype = getattr(torch, asked.dtype)
    if device == "cpu":
        if dtype != torch.float32 or asked.recompute != "none":
            raise ValueError(
                f"trainer.dtype={asked.dtype!r} with recompute={asked.recompute!r} needs a GPU, and this trainer is on a CPU: "
                "use float32 and none there"
            )
        return CPU
    return Placement(device, dtype, True, layers if asked.recompute == "full" else 0, asked.recompute == "selective")


def ahead(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without waiting: from the CPU to a GPU by way of pinned memory."""
    if device.type == "cuda" and not tensor.is_cuda:
        return _pin(tensor).to(device, non_blocking=True)
    return tensor.to(device)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to pinned memory with this thread alone.

    torch's own copy wakes all its threads for more than 32 k numbers, and they disturb the thread that launches kernels.
    """
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    held.numpy()[...] = tensor.numpy()
    return held


def behind(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU without waiting; it may be read after the device was waited for."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
