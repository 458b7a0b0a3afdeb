"""Surveys which tensors the kernels of a loaded vLLM model read, and whether they may be written from outside.

`survey` lists every tensor of the model, and refuses by name what it does not know: a class of layer, a quantisation method, a
kernel's own layout, a buffer that may be derived from weights. It is an allow-list: what is new in vLLM is an obstacle until
somebody has looked at it. Classes are known by their names, so this file imports no vLLM and is tested without it. The lists
are those of vLLM 0.25.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from artd_schema.wire.direct import EngineTable, EngineTensor, Obstacle

from .fusions import parts_of

LAYERS = frozenset({
    "QKVParallelLinear", "MergedColumnParallelLinear", "ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear",
    "VocabParallelEmbedding", "ParallelLMHead", "RMSNorm", "RoutedExperts",
})  # fmt: skip
"""Classes whose parameters are those of the checkpoint, at most fused."""
METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"})
MOE_BACKENDS = frozenset({"TRITON"})
"""Backends that keep [experts, 2 x inner, hidden] and [experts, hidden, inner] in the checkpoint's order."""
CONSTANTS = frozenset({
    "cos_sin_cache", "_q_scale", "_k_scale", "_v_scale", "_prob_scale", "q_range", "k_range", "v_range", "kv_cache",
    "_expert_map", "expert_mask",
})  # fmt: skip
"""Tensors beside the parameters that do not depend on weights: rotary tables, scales of 1, the KV cache, expert numbers."""


def survey(model: nn.Module, settings: dict[str, Any], version: str) -> EngineTable:
    """Return the table of a model in this process. `settings`: from `extension.settings_of`."""
    obstacles = list(_settings(settings))
    tensors: list[EngineTensor] = []
    backends: set[str] = set()
    segments: dict[int, int] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        kind = type(module).__name__
        own = {name: p for name, p in module.named_parameters(recurse=False) if id(p) not in seen}
        obstacles += [Obstacle(_join(path, name), why) for name, why in _unknown(module)]
        if own and kind not in LAYERS:
            obstacles.append(
                Obstacle(
                    path or "the model", f"{kind} is not a layer whose weights are known to have a checkpoint's layout"
                )
            )
        if kind == "RoutedExperts" and (backend := _backend(module)):
            backends.add(backend)
            if backend not in MOE_BACKENDS:
                obstacles.append(
                    Obstacle(path, f"the MoE backend {backend} has a layout of its own: use --moe-backend triton")
                )
        for name, parameter in own.items():
            seen.add(id(parameter))
            tensors.append(_entry(_join(path, name), parameter.data, kind, segments))
            if not parameter.is_contiguous():
                obstacles.append(
                    Obstacle(_join(path, name), "it is not contiguous: its kernel has padded or transposed it")
                )
            if parameter.device.type != "cuda":
                obstacles.append(Obstacle(_join(path, name), f"it is on {parameter.device.type}, not on a GPU"))
    return EngineTable(
        engine="vllm", version=version, moe_backend=",".join(sorted(backends)), tensors=tuple(tensors),
        obstacles=tuple(obstacles),
    )  # fmt: skip


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the table's tensors by name, in its order."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


def _settings(settings: dict[str, Any]) -> Iterator[Obstacle]:
    for name, value in settings.items():
        if value:
            yield Obstacle(name, f"{value!r} is not supported by the direct push")


def _unknown(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, why) of what a module holds beside its parameters that may depend on weights."""
    method = getattr(module, "quant_method", None)
    if method is not None and type(method).__name__ not in METHODS:
        yield "quant_method", f"{type(method).__name__} may keep weights in a form of its own"
    held = dict(module.named_buffers(recurse=False)) | {n: v for n, v in vars(module).items() if isinstance(v, Tensor)}
    for name in sorted(held):
        if held[name].numel() and name not in CONSTANTS:
            yield name, "a tensor that may be derived from weights, and is not known to be a constant"


def _backend(module: nn.Module) -> str:
    backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    return str(getattr(backend, "value", backend or "unknown"))


def _entry(name: str, tensor: Tensor, kind: str, segments: dict[int, int]) -> EngineTensor:
    base = tensor.untyped_storage().data_ptr()
    segment = segments.setdefault(base, len(segments))
    dtype = str(tensor.dtype).removeprefix("torch.")
    at = tensor.data_ptr() - base
    return EngineTensor(name, dtype, tuple(tensor.shape), tensor.stride(), kind, segment, at, parts_of(name))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
