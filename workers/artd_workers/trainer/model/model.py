"""Builds Megatron-Core's GPTModel from a plan, with any mask, any positions and LoRA, without patching a library.

`build` makes the module; `Policy` computes logprobs of chosen tokens. This file owns the process-wide group of one rank that
Megatron needs (its rendezvous is in memory, so no port listens beyond loopback). On the CPU weights and arithmetic are float32,
whatever the checkpoint stores (widening bf16 is exact); on a GPU they follow the placement. Base weights require no gradient
unless a test asks for one. There is no dropout, so a forward draws no random numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor, nn

from artd_workers.models.base import Plan
from artd_workers.trainer import tree_mask
from artd_workers.trainer.model.experts.grouped import slots
from artd_workers.trainer.model.experts.router_replay import Replay, Step
from artd_workers.trainer.parallel import context
from artd_workers.trainer.parallel.layout import ALONE, Parallel, part
from artd_workers.trainer.parallel.pipeline import Stage
from artd_workers.trainer.placement import CPU, Placement, ahead

from . import logits as head
from . import tensor_linears
from .layers import ExplicitRotary, block_spec, config_of, kit_of
from .lora import Lora


def start_distributed(cuda: bool = False) -> None:
    """Make the one-rank group that Megatron needs, unless there is one."""
    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def build(
    plan: Plan, weights: Mapping[str, Tensor], parallel: Parallel = ALONE, placement: Placement = CPU
) -> GPTModel:
    """Build a GPTModel with these base weights (Hugging Face names), frozen. Raises ValueError if the weights do not fit.

    It is in eval mode, or in train mode if layers are recomputed, because Megatron recomputes only then; nothing else depends
    on the mode. `parallel`: this process holds one part of the model, and Megatron's process groups exist.
    """
    start_distributed(placement.cuda)
    # Routers register in a process-wide list, which would keep every earlier model alive.
    RouterReplay.clear_global_router_replay_instances()
    config = config_of(plan, parallel, placement)
    layers = parallel.layers(plan)
    model = GPTModel(
        config, block_spec(plan, kit_of(placement, parallel), layers), position_embedding_type="rope",
        pre_process=layers.start == 0, post_process=layers.stop == plan.layers, **plan.model,
    )  # fmt: skip
    rope = {name: value for name, value in plan.model.items() if name.startswith(("rotary_", "rope_"))}
    model.rotary_pos_emb = ExplicitRotary(config.kv_channels, 1.0, use_cpu_initialization=not placement.cuda, **rope)
    model.to(placement.device)
    load_base(model, plan, weights, parallel)
    if placement.recompute and layers.start == 0:
        model.embedding.register_forward_hook(_want_gradient)
    return model.requires_grad_(False).train(placement.again)


def _want_gradient(_embedding: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Make the embedding's output require a gradient: Megatron recomputes a layer only for such an input."""
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


@torch.no_grad()
def load_base(model: GPTModel, plan: Plan, weights: Mapping[str, Tensor], parallel: Parallel = ALONE) -> None:
    """Copy base weights in. Raises ValueError when names or shapes are not the plan's."""
    parameters = slots(model)
    names = {row.megatron: parallel.own_name(row.megatron, plan) for row in plan.codec.rows}
    here = [row for row in plan.codec.rows if names[row.megatron] is not None]
    for name, whole in plan.codec.to_megatron(weights, here):
        own = names[name] or name
        parameter = parameters.pop(own)
        tensor = part(name, whole)
        if parameter.shape != tensor.shape:
            raise ValueError(
                f"{name}: the checkpoint has {tuple(tensor.shape)}, config.json says {tuple(parameter.shape)}"
            )
        parameter.copy_(tensor)
    if left := sorted(name for name in parameters if ".adapter." not in name):
        raise ValueError(f"the weight table leaves {left[0]} unset")


@dataclass(frozen=True)
class Scores:
    """Per scored token [n]: the logprob (natural logarithm, at its temperature) and the entropy in nats, without gradient."""

    logprobs: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, found: Tensor) -> Scores:
        """Make scores of `found` [2, n], the result of `logits.score_targets`."""
        return cls(found[0], found[1].detach())


class Policy:
    """A model and its adapter. `lora` None = the base model."""

    def __init__(self, plan: Plan, model: GPTModel, lora: Lora | None, parallel: Parallel = ALONE) -> None:
        """Attach the adapter, which is this rank's part of it. `parallel`: the layout that the model was built with."""
        self.plan, self.model, self.lora, self.parallel = plan, model, lora, parallel
        self.device = next(model.parameters()).device
        config = model.config
        self.stage = Stage(parallel, (1, config.hidden_size), config.params_dtype, self.device)
        self._replay: Replay | None = None
        if plan.routes is not None:
            # the layers, of all that have routes, that are in this pipeline stage
            self._own = parallel.expert_layers(plan)
            self._replay = Replay(model, msgspec.structs.replace(plan.routes, layers=self._own.stop - self._own.start))
        if lora is not None:
            lora.attach(model)

    def open_replay(self, wanted: bool) -> AbstractContextManager[Step | None]:
        """Open a step whose forwards and backwards replay routes. If not `wanted`, nothing is replayed and the block gets None."""
        if not wanted:
            return nullcontext()
        if self._replay is None:
            raise ValueError("the batch has routes of experts, and the model is dense: it belongs to another run")
        return self._replay.step()

    def hidden_logits(
        self, tokens: Tensor, positions: Tensor, seen: Tensor, rows: Tensor, routes: Tensor | None = None
    ) -> Tensor:
        """Return the logits [n, vocab] of all words at `rows` [n] of one packed row, for few rows; other arguments as for
        `project_rows`."""

        def logits(hidden: Tensor, weight: Tensor) -> Tensor:
            found = hidden @ weight.t()
            return tensor_linears.gather_logits(found) if self.parallel.sp else found

        return self.project_rows(tokens, positions, seen, rows, routes, logits)

    def hidden_scores(
        self, tokens: Tensor, positions: Tensor, seen: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor,
        routes: Tensor | None = None, entropy_gradient: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return fp32 [2, n]: logprobs and entropies (see `logits.score_targets`) of `targets` [n], predicted at `rows` [n].

        Each has its temperature [n] (> 0). Other arguments are those of `project_rows`.
        """
        targets, temperatures = ahead(targets, self.device), ahead(temperatures, self.device)
        group = parallel_state.get_tensor_model_parallel_group() if self.parallel.sp else None

        def scores(hidden: Tensor, weight: Tensor) -> Tensor:
            return head.score_targets(hidden, weight, targets, temperatures, group, entropy_gradient)

        return self.project_rows(tokens, positions, seen, rows, routes, scores)

    def project_rows(
        self, tokens: Tensor, positions: Tensor, seen: Tensor, rows: Tensor, routes: Tensor | None,
        onto: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        """Return what `onto` makes of the hidden states [n, h] at `rows` [n] of one packed row, and of this rank's part [words,
        h] of the head.

        On a pipeline stage that is not the last, it returns what the stage sends on. `tokens`, `positions`: int64 [s], any
        device. `seen`: `until` int64 [s] of a row in preorder (see `tree_mask`; on the CPU), or bool [s, s], True where query q
        (first) must not see key k. Only `rows` go through the language-model head. Where ranks share a row, `rows` are among
        this rank's `own_tokens`. `routes`: expert ids [MoE layers, s, topk] to replay (with gradients only inside
        `open_replay`); None routes live.
        """
        begin = self.own_tokens(len(tokens)).start
        rows = ahead(rows - begin if begin else rows, self.device)

        def project(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
            chosen = (
                tensor_linears.gather_hidden(hidden_states, rows)
                if self.parallel.sp
                else hidden_states.index_select(0, rows)[:, 0]
            )
            return onto(chosen, output_layer.weight if output_weight is None else output_weight)

        def forward() -> Tensor:
            ids, at, mask = self._inputs(tokens, positions, seen)
            self.model.rotary_pos_emb.positions = at[None]
            self.model.set_input_tensor(self.stage.receive(len(ids) // self.parallel.tp))
            out = self.model(ids[None], at[None], mask, output_processor=project)
            if not self.stage.last:
                self.stage.send(out)
            return out

        if self._replay is None:
            if routes is not None:
                raise ValueError("a dense model has no experts to replay")
            return forward()
        return self._replay.forward(forward, None if routes is None else self._own_routes(routes))

    def _inputs(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a row, or this rank's part of it, as the layers take it: token ids and positions [s'], and the mask.

        The mask is that of `layers` or `cuda_layers`; its keys are the whole row's.
        """
        part = self._each(len(tokens))
        own = slice(part * context.part_index(), part * (context.part_index() + 1))
        multiple = part * self.parallel.cp
        if seen.ndim == 1 and self.device.type == "cpu":
            seen = tree_mask.hidden(seen)
        if seen.ndim == 2:
            ids, at, mask = context.pad_row(tokens, positions, seen, multiple)
            return ids[own].to(self.device), at[own].to(self.device), mask[own].to(self.device)[None, None]
        extra = multiple - len(tokens)
        ids, at = (F.pad(ahead(x, self.device), (0, extra))[own] for x in (tokens, positions))
        # Padding after a chain may see the chain, because nothing sees the padding.
        chain = tree_mask.is_chain(seen) and self.parallel.cp == 1
        until = None if chain else ahead(tree_mask.fill(seen, extra), self.device)[None, None, None]
        return ids, at, until

    def _each(self, size: int) -> int:
        return context.tokens_per_rank(self.parallel, size, self.device.type == "cuda")

    def own_tokens(self, size: int) -> range:
        """Return which tokens of a row of `size` are this rank's, padding included."""
        part = self._each(size)
        return range(part * context.part_index(), part * (context.part_index() + 1))

    def _own_routes(self, routes: Tensor) -> Tensor:
        """Return a row's routes for this rank's layers and tokens."""
        near, part = self.parallel.tp, self._each(routes.shape[1])
        if self.parallel.world == 1:
            return routes
        place = context.part_index() * near + parallel_state.get_tensor_model_parallel_rank()
        return context.routes_of_rank(routes[self._own], place, part // near)

    def score(
        self,
        tokens: Tensor,
        positions: Tensor,
        seen: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        routes: Tensor | None = None,
    ) -> Scores:
        """Return `hidden_scores` at any `rows`, on all ranks; without gradient where ranks share a row or the layers.
        Collective."""
        if self.parallel.cp == self.stage.count == 1:
            return Scores.of(self.hidden_scores(tokens, positions, seen, rows, targets, temperatures, routes))
        mine = self._mine(len(tokens), rows)
        out = self.hidden_scores(tokens, positions, seen, rows[mine], targets[mine], temperatures[mine], routes)
        found = self._gather_rows(out.t() if self.stage.last else out, mine, 2, torch.float32)
        return Scores.of(found.t())

    def logits(
        self, tokens: Tensor, positions: Tensor, seen: Tensor, rows: Tensor, routes: Tensor | None = None
    ) -> Tensor:
        """Return `hidden_logits` at any `rows`, on all ranks; without gradient where ranks share a row or the layers.
        Collective."""
        if self.parallel.cp == self.stage.count == 1:
            return self.hidden_logits(tokens, positions, seen, rows, routes)
        mine = self._mine(len(tokens), rows)
        out = self.hidden_logits(tokens, positions, seen, rows[mine], routes)
        return self._gather_rows(out, mine, self.plan.vocab_size, self.model.config.params_dtype)

    def _mine(self, size: int, rows: Tensor) -> Tensor:
        """Return which of `rows` are among this rank's tokens of a row of `size`; bool [n]."""
        own = self.own_tokens(size)
        return (rows >= own.start) & (rows < own.stop)

    def _gather_rows(self, out: Tensor, mine: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return [n, width] on all ranks. The ranks of the last stage each have the rows `mine`. Collective."""
        found = torch.zeros(len(mine), width, dtype=dtype, device=self.device)
        if self.stage.last:
            found[mine.to(self.device)] = out.detach()
        return self.stage.broadcast_from_last(context.all_reduce(found))

    def score_sequence(self, tokens: Tensor, temperature: float = 1.0, routes: Tensor | None = None) -> Tensor:
        """Return logprobs [s - 1] of tokens 1.. of a plain sequence [s], without gradient. `routes`: as for `project_rows`."""
        size = len(tokens)
        until, rows, heat = tree_mask.chain(size), torch.arange(size - 1), torch.full((size - 1,), temperature)
        with torch.no_grad():
            return self.score(tokens, torch.arange(size), until, rows, tokens[1:], heat, routes).logprobs
