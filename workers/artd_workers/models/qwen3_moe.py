"""Qwen3 mixtures of experts (`Qwen3MoeForCausalLM`): as Qwen3, with routed experts in place of the MLP of sparse layers.

The router takes the softmax of its logits and chooses the largest `num_experts_per_tok`. With `norm_topk_prob` their weights
are scaled to a sum of 1, which equals a softmax over the chosen logits alone (Megatron: no "pre-softmax"). The load-balancing
loss of pre-training (`router_aux_loss_coef`) is not part of a policy loss and is left out.
"""

from __future__ import annotations

from artd_schema.data.trajectory import RouteShape
from artd_schema.run.families import sparse_layers

from .base import GATED, HfConfig, Layer, Mlp, Plan, UnsupportedModel, attention, decoder_plan, dense_layers
from .codec import Row

ROUTER = Row("decoder.layers.{i}.mlp.router.weight", ("model.layers.{i}.mlp.gate.weight",))
EXPERT = (
    Row(
        "decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight",
        ("model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "model.layers.{i}.mlp.experts.{e}.up_proj.weight"),
        "concat",
        lora=True,
    ),
    Row(
        "decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight",
        ("model.layers.{i}.mlp.experts.{e}.down_proj.weight",),
        lora=True,
    ),
)


def plan(config: HfConfig) -> Plan:
    """Plan a model. Raises UnsupportedModel for shared experts and numbers of experts that are not handled exactly, and as
    Qwen3 does."""
    sparse = sparse_layers(
        int(config["num_hidden_layers"]), experts_of(config), int(config.get("decoder_sparse_step", 1)),
        config.get("mlp_only_layers") or (),
    )  # fmt: skip
    mixer = attention(qk_norm=True)
    if not any(sparse):
        return decoder_plan("qwen3_moe", config, dense_layers(config, mixer))
    shape = RouteShape(layers=sum(sparse), topk=int(config["num_experts_per_tok"]), experts=experts_of(config))
    normalised = bool(config.get("norm_topk_prob", False))
    _refuse(config, shape, normalised)
    moe = Mlp("sparse", (ROUTER, *(row.of(expert) for expert in range(shape.experts) for row in EXPERT)))
    transformer = {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.topk,
        "moe_ffn_hidden_size": int(config["moe_intermediate_size"]),
        "moe_router_pre_softmax": not normalised,
    }
    layers = [Layer(mixer, moe if is_sparse else GATED) for is_sparse in sparse]
    return decoder_plan("qwen3_moe", config, layers, transformer, shape)


def experts_of(config: HfConfig) -> int:
    """Return the routed experts of a sparse layer: `num_experts`, which transformers 5 writes as `num_local_experts`."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _refuse(config: HfConfig, shape: RouteShape, normalised: bool) -> None:
    if not 1 <= shape.topk <= shape.experts:
        raise UnsupportedModel(
            f"config.json: num_experts_per_tok = {shape.topk} is not between 1 and the {shape.experts} experts"
        )
    if shape.topk == 1 and normalised:
        raise UnsupportedModel(
            "config.json: norm_topk_prob with num_experts_per_tok = 1 gives every expert the weight 1, so its router "
            "cannot learn; choose another model"
        )
    if config.get("shared_expert_intermediate_size"):
        raise UnsupportedModel("config.json: shared_expert_intermediate_size is not supported; choose another model")
