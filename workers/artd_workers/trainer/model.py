"""Megatron-Core's GPTModel on CPU: built from a plan, with any mask, any positions and LoRA, and no patch of any library.

Purpose: `build` makes the module; `Policy` computes logprobs of chosen tokens. Owner of: the process-wide gloo group of one
rank that Megatron asks for (rendezvous in memory: no port of ours listens beyond loopback).
Invariants: weights and arithmetic are float32 whatever the checkpoint stores (a bf16 checkpoint is widened, exactly);
base weights never require a gradient unless a test asks; no dropout, so a forward draws no random numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from ..models.base import Plan
from .layers import ExplicitRotary, block_spec, config_of
from .lora import Lora
from .parallel import Parallel, padded, part
from .replay import Replay, Step

ALONE = Parallel()


def start_distributed() -> None:
    """Make the one-rank gloo group that Megatron needs. Idempotent."""
    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def build(plan: Plan, weights: Mapping[str, Tensor], parallel: Parallel = ALONE) -> GPTModel:
    """A GPTModel with these base weights (Hugging Face names), frozen, in eval mode. Raises ValueError if they misfit.

    parallel: this process holds one part of it, and Megatron's process groups exist.
    """
    start_distributed()
    # Routers enter themselves into a process-wide list, which would keep every model before this one alive.
    RouterReplay.clear_global_router_replay_instances()
    config = config_of(plan, parallel)
    model = GPTModel(config, block_spec(plan), position_embedding_type="rope", **plan.model)
    rope = {name: value for name, value in plan.model.items() if name.startswith(("rotary_", "rope_"))}
    model.rotary_pos_emb = ExplicitRotary(config.kv_channels, 1.0, use_cpu_initialization=True, **rope)
    load_base(model, plan, weights, parallel)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def load_base(model: GPTModel, plan: Plan, weights: Mapping[str, Tensor], parallel: Parallel = ALONE) -> None:
    """Copy base weights in. Raises ValueError when names or shapes are not the plan's."""
    parameters = dict(model.named_parameters())
    experts = plan.routes.experts if plan.routes is not None else 0
    for name, whole in plan.codec.to_megatron(weights):
        own = parallel.own_name(name, experts)
        if own is None:
            continue
        parameter = parameters.pop(own)
        tensor = part(name, whole, parameter)
        if parameter.shape != tensor.shape:
            raise ValueError(
                f"{name}: the checkpoint has {tuple(tensor.shape)}, config.json says {tuple(parameter.shape)}"
            )
        parameter.copy_(tensor)
    if left := sorted(name for name in parameters if ".adapter." not in name):
        raise ValueError(f"the weight table leaves {left[0]} unset")


@dataclass(frozen=True)
class Scores:
    """Per scored token [n]: logprob (natural log, at its temperature) and, without gradient, the entropy in nats."""

    logprobs: Tensor
    entropy: Tensor


class Policy:
    """Model and adapter together. `lora` None = the base model."""

    def __init__(self, plan: Plan, model: GPTModel, lora: Lora | None) -> None:
        self.plan, self.model, self.lora = plan, model, lora
        self._replay = Replay(model, plan.routes) if plan.routes is not None else None
        if lora is not None:
            sizes = model.config.tensor_model_parallel_size, model.config.expert_model_parallel_size
            if sizes != (1, 1):
                raise ValueError(f"adapters are not split over processes: this model is, tp={sizes[0]}, ep={sizes[1]}")
            lora.attach(model)

    def replaying(self, wanted: bool) -> AbstractContextManager[Step | None]:
        """A step whose forwards replay routes through their backwards; not wanted: None, and nothing is replayed."""
        if not wanted:
            return nullcontext()
        if self._replay is None:
            raise ValueError("the batch has routes of experts, and the model is dense: it belongs to another run")
        return self._replay.step()

    def hidden_logits(
        self, tokens: Tensor, positions: Tensor, hidden_from: Tensor, rows: Tensor, routes: Tensor | None = None
    ) -> Tensor:
        """Logits [n, vocab] at `rows` [n] of one packed row.

        tokens, positions: int64 [s]; hidden_from: bool [s, s], True where query q (first) must not see key k. Only `rows`
        go through the language-model head. routes: expert ids [MoE layers, s, topk] to replay instead of the live router's
        (with gradients only inside `replaying`); None routes live.
        """

        def project(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
            shared = self.model.config.sequence_parallel  # then the head itself gathers the tokens
            chosen = hidden_states if shared else hidden_states[rows]
            logits, _bias = output_layer(chosen, weight=output_weight, runtime_gather_output=True)
            return logits[rows, 0] if shared else logits[:, 0]

        def forward() -> Tensor:
            config = self.model.config
            multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
            ids, at, mask = padded(tokens, positions, hidden_from, multiple)
            self.model.rotary_pos_emb.positions = at[None]
            return self.model(ids[None], at[None], mask[None, None], output_processor=project)

        if self._replay is None:
            if routes is not None:
                raise ValueError("a dense model has no experts to replay")
            return forward()
        return self._replay.forward(forward, routes)

    def score(
        self,
        tokens: Tensor,
        positions: Tensor,
        hidden_from: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        routes: Tensor | None = None,
    ) -> Scores:
        """Logprobs of `targets` [n] as predicted at `rows` [n], each at its temperature [n] (> 0). routes: as there."""
        logits = self.hidden_logits(tokens, positions, hidden_from, rows, routes).float() / temperatures[:, None]
        logprobs = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return Scores(logprobs.gather(-1, targets[:, None])[:, 0], entropy)

    def score_sequence(self, tokens: Tensor, temperature: float = 1.0, routes: Tensor | None = None) -> Tensor:
        """Logprobs [s - 1] of tokens 1.. of a plain sequence [s], without gradient. routes: as in `hidden_logits`."""
        size = len(tokens)
        hidden_from = torch.ones(size, size, dtype=torch.bool).triu(1)
        rows = torch.arange(size - 1)
        with torch.no_grad():
            temperatures = torch.full((size - 1,), temperature)
            return self.score(tokens, torch.arange(size), hidden_from, rows, tokens[1:], temperatures, routes).logprobs
