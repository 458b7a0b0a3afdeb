"""Router replay: drives Megatron-Core's RouterReplay so that every token goes to the experts that the engine chose for it.

`Replay.step` opens a step. Each forward in it is a micro-batch, and each router call gets the routes of its (micro-batch,
layer); the live router still gives the differentiable probabilities. Action and target of the model's RouterReplay instances
are set for one router call at a time.

A recomputed forward gets the routes of the micro-batch whose backward is running. A hook on each micro-batch's output says
which one that is, so any number may be in flight and go backward in any order; RouterReplay's own FIFO serves one order only.
`Step.finish` raises unless each (micro-batch, layer) was called as often as forward and recomputation need, and each call used
exactly its target's experts. Outside a step nothing is replayed.

Memory: a micro-batch's routes are on the device from its first router call to its last expected one. Where layers are
recomputed, the routes keep the dtype that they came in (a byte per choice), and a layer's are widened to RouterReplay's int64
for one call. Cost: a micro-batch's routes are copied to the device at once and, where nothing is recomputed, converted at once
for all layers. A router that returns its target itself, as on one rank, is checked without device work, and top-k is not
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import ge
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from artd_schema.data.trajectory import RouteShape
from artd_workers.trainer.placement import ahead, behind


class ReplayError(ValueError):
    """A model cannot replay routes, or a step did not replay what it was given. Trying again would not help."""


ALLOWED: dict[str, tuple[Any, ...]] = {
    "moe_enable_routing_replay": (True,),
    "moe_router_fusion": (False,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_force_biased": (None,),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_expert_capacity_factor": (None,),
    "cuda_graph_impl": ("none",),
}
"""Values of TransformerConfig under which routers use the given experts. With other values Megatron skips RouterReplay (fused, sinkhorn,
quantile), moves or drops tokens after it (capacity), trains the wrong scores (forced), or runs no hooks (graphs)."""


@dataclass(eq=False)
class _Micro:
    """One forward of a step.

    `routes`: [layers, T, topk] of this rank's tokens, None = the live router decides. `forward`, `again`: calls of each layer's
    router in the forward and in recomputed forwards. `recomputed`: how often a backward recomputes each layer. `staged`: the
    routes on the device, from the first call to the last expected one; `done` from then on. `version`: torch's write count of
    `staged` when it was made.
    """

    index: int
    routes: Tensor | None
    forward: list[int]
    again: list[int]
    recomputed: tuple[int, ...]
    backward: bool = False
    done: bool = False
    staged: Tensor | None = None
    version: int = 0

    def target(self, layer: int, device: torch.device) -> Tensor:
        """Return the routes of a layer as RouterReplay takes them.

        The first call sends the routes of all layers. By then the GPU is busy with the first layer's attention, so it does not
        wait for the copy.
        """
        assert self.routes is not None
        if self.done:
            raise ReplayError(
                f"micro-batch {self.index}, MoE layer {layer}: routes were needed once more than the forward and its "
                "recompute need: report this as a bug"
            )
        if self.staged is None:
            staged = ahead(self.routes, device)
            # Where nothing is recomputed, the backward keeps every layer's int64 anyway, so one conversion for all is cheaper.
            self.staged = staged if any(self.recomputed) else staged.to(torch.int64)
            self.version = self.staged._version
        return self.staged[layer].to(torch.int64)

    def count_call(self, layer: int) -> None:
        """Count a finished router call; after the last expected one, free the routes. Raises ReplayError when they were written
        to."""
        (self.again if self.backward else self.forward)[layer] += 1
        if self.backward:
            over = all(map(ge, self.again, self.recomputed))
        else:
            over = all(self.forward) and not any(self.recomputed)
        if over:
            self.leave()

    def leave(self) -> None:
        """Free the routes. Raises ReplayError when they were written to."""
        if self.staged is not None and self.staged._version != self.version:
            raise ReplayError(f"micro-batch {self.index}: its routes were written to in the step: report this as a bug")
        self.done, self.staged = True, None


@dataclass(eq=False)
class Step:
    """The forwards and backwards of one optimizer step. `Replay.step` makes it."""

    routers: tuple[nn.Module, ...]
    shape: RouteShape
    config: TransformerConfig
    recomputed: tuple[int, ...]
    _micros: list[_Micro] = field(default_factory=list)
    _used: list[tuple[int, int, Tensor, Tensor]] = field(default_factory=list)
    _strays: list[tuple[int, int]] = field(default_factory=list)
    _counts: list[Tensor] = field(default_factory=list)
    _now: _Micro | None = None
    _version: int = 0
    _closed: bool = False

    def forward(self, call: Callable[[], Tensor], routes: Tensor | None) -> Tensor:
        """Run a micro-batch's forward and return the result of `call`, on which the backward must depend.

        `routes`: integer ids [layers, T, topk] of all its tokens, row = position * batch + index in the batch; None = route
        live. Raises ReplayError.
        """
        if routes is not None:
            routes = self._local(routes)
        calls = len(self.routers)
        micro = _Micro(len(self._micros), routes, [0] * calls, [0] * calls, self.recomputed)
        self._micros.append(micro)
        self._now = micro
        try:
            out = call()
        finally:
            self._now = None
        self._count()
        if out.requires_grad:
            out.register_hook(partial(self._backward, micro))
        else:
            micro.leave()
        return out

    def finish(self) -> int:
        """End the step after the last backward. Returns the number of replayed router calls, each of them checked.

        Raises ReplayError when a call is missing, came too often or used other experts than it was given.
        """
        self.close()
        self._count()
        for micro in self._micros:
            if micro.routes is not None:
                self._check_calls(micro)
        self._check_experts()
        return sum(sum(micro.forward) + sum(micro.again) for micro in self._micros)

    def _check_calls(self, micro: _Micro) -> None:
        for layer, found in enumerate(zip(micro.forward, micro.again, strict=True)):
            wanted = (1, self.recomputed[layer] if micro.backward else 0)
            if found != wanted:
                raise ReplayError(
                    f"micro-batch {micro.index}, MoE layer {layer}: routes were replayed in {found[0]} forwards and "
                    f"{found[1]} recomputed ones, not in {wanted[0]} and {wanted[1]}: report this as a bug"
                )

    def _count(self) -> None:
        """Compare on the device the experts that the latest calls used with those that they were given."""
        # A recomputed layer's call may come between calls of another micro-batch, which has another length.
        while self._used:
            shape = self._used[0][3].shape
            here = [call for call in self._used if call[3].shape == shape]
            self._used = [call for call in self._used if call[3].shape != shape]
            self._strays += [(micro, layer) for micro, layer, _, _ in here]
            found = strays(torch.stack([call[2] for call in here]), torch.stack([call[3] for call in here]))
            self._counts.append(behind(found))

    def _check_experts(self) -> None:
        if not self._counts:
            return
        # One wait for all calls.
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        for count, (micro, layer) in zip(torch.cat(self._counts).tolist(), self._strays, strict=True):
            if count:
                raise ReplayError(
                    f"micro-batch {micro}, MoE layer {layer}: the router differs from the given routes in {count} places: "
                    "report this as a bug"
                )

    def close(self) -> None:
        """Allow no further backward of a replayed micro-batch."""
        self._closed = True

    def before(self, layer: int, router: nn.Module, args: tuple[Any, ...]) -> None:
        """Set a router's target before its forward (forward pre-hook)."""
        micro = self._now
        if micro is None:
            raise ReplayError(f"MoE layer {layer} was called outside any micro-batch of the step: report this as a bug")
        if micro.routes is None:
            return
        target, tokens = micro.target(layer, args[0].device), args[0].shape[:-1].numel()
        if len(target) != tokens:
            raise ReplayError(
                f"micro-batch {micro.index}, MoE layer {layer}: routes of {len(target)} tokens for {tokens} tokens"
            )
        self._version = target._version
        router.router_replay.set_target_indices(target)
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def after(self, layer: int, router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Count a router's call after its forward (hook), and keep what it used for comparison unless it is the target itself."""
        micro = self._now
        if micro is None or micro.routes is None:
            return
        target, used = router.router_replay.target_topk_idx, output[1]
        clear(router)
        if target._version != self._version:
            raise ReplayError(
                f"micro-batch {micro.index}: its routes were written to in the step, by MoE layer {layer}: report this as a bug"
            )
        micro.count_call(layer)
        if used is not target:
            self._used.append((micro.index, layer, used.detach(), target))
        if micro.done:
            self._count()

    def _backward(self, micro: _Micro, _grad: Tensor) -> None:
        if self._closed and micro.routes is not None:
            raise ReplayError(f"the backward of micro-batch {micro.index} came after its step: report this as a bug")
        micro.backward = True
        self._now = micro

    def _local(self, routes: Tensor) -> Tensor:
        if (routes.shape[0], routes.shape[2]) != (self.shape.layers, self.shape.topk):
            raise ReplayError(f"routes {tuple(routes.shape)} are not [{self.shape.layers}, tokens, {self.shape.topk}]")
        return routes


class Replay:
    """Replays routes in the MoE layers of one model."""

    def __init__(self, model: nn.Module, shape: RouteShape) -> None:
        """Check the model. `shape`: of the routes to replay. Raises ReplayError when this model cannot replay them."""
        self._model, self._shape = model, shape
        self._config: TransformerConfig = model.config
        for name, allowed in ALLOWED.items():
            if (found := getattr(self._config, name)) not in allowed:
                raise ReplayError(f"{name} = {found!r}: expert replay needs {' or '.join(map(repr, allowed))}")
        routers = [module for module in model.modules() if getattr(module, "router_replay", None) is not None]
        self._routers = tuple(sorted(routers, key=lambda router: router.layer_number))
        found = RouteShape(
            layers=len(routers), topk=self._config.moe_router_topk, experts=self._config.num_moe_experts or 0
        )
        if not routers or found != shape:
            raise ReplayError(
                f"the model's routers are {found}, and the routes are {shape}: they belong to another model"
            )
        self._step: Step | None = None

    @contextmanager
    def step(self) -> Iterator[Step]:
        """Open a step: forwards by `Step.forward`, their backwards, then `Step.finish`. It restores the routers in any case."""
        if self._step is not None:
            raise RuntimeError("a step of expert replay is open already")
        self._step = step = Step(self._routers, self._shape, self._config, self._count_recomputed())
        hooks = [
            hook
            for layer, router in enumerate(self._routers)
            for hook in (
                router.register_forward_pre_hook(partial(step.before, layer)),
                router.register_forward_hook(partial(step.after, layer)),
            )
        ]
        try:
            yield step
        finally:
            self._step = None
            step.close()
            for hook in hooks:
                hook.remove()
            for router in self._routers:
                clear(router)

    def forward(self, call: Callable[[], Tensor], routes: Tensor | None) -> Tensor:
        """Run `call` as a micro-batch of the open step. Without an open step, `routes` need a forward without gradients."""
        if self._step is not None:
            return self._step.forward(call, routes)
        if routes is None:
            return call()
        if torch.is_grad_enabled():
            raise RuntimeError("open a step to replay routes with gradients: its backward may recompute the forward")
        with self.step() as step:
            out = step.forward(call, routes)
            step.finish()
        return out

    def _count_recomputed(self) -> tuple[int, ...]:
        """Return how often a backward recomputes each MoE layer."""
        config = self._config
        if not self._model.training or config.recompute_granularity is None:
            return (0,) * len(self._routers)
        if config.recompute_granularity == "selective":
            return (int("moe" in config.recompute_modules),) * len(self._routers)
        every = config.recompute_method == "uniform"
        return tuple(int(every or router.layer_number <= config.recompute_num_layers) for router in self._routers)


def clear(router: nn.Module) -> None:
    """Remove target, action and Megatron's FIFO from a router."""
    router.router_replay.clear_indices()
    router.router_replay.clear_router_replay_action()


def strays(used: Tensor, target: Tensor) -> Tensor:
    """Return in how many places each of n calls differs from its target [n, T, topk].

    `used`: bool maps [n, T, experts], or experts [n, T, topk] in the target's order.
    """
    if used.dtype != torch.bool:
        return (used != target).sum((1, 2))
    return used.sum((1, 2)) + target[0].numel() - 2 * used.gather(2, target).sum((1, 2))
