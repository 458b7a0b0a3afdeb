"""Defines what a model family must say, and the rules that decoders share.

`Plan` is all that the trainer needs to build a GPTModel and move weights. It names each layer's mixer and MLP, which code that
treats layers differently asks. `decoder_plan` reads the fields that Llama-style configs have in common. A field that would
change the mathematics and is not handled raises UnsupportedModel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from artd_schema.data.trajectory import RouteShape

from .codec import Codec, Heads, Row

HfConfig = Mapping[str, Any]


class UnsupportedModel(ValueError):
    """A config that artd does not train exactly; the text names the field."""


@dataclass(frozen=True)
class Mixer:
    """How a layer mixes tokens.

    `kind`: attention is softmax attention over query groups. `rows`: its weights. `qk_norm`: whether each head's queries and
    keys are normalised.
    """

    kind: Literal["attention"]
    rows: tuple[Row, ...]
    qk_norm: bool


@dataclass(frozen=True)
class Mlp:
    """What a layer does to each token separately. `kind`: dense is one MLP, sparse is routed experts; `rows`: its weights."""

    kind: Literal["dense", "sparse"]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Layer:
    """One decoder layer: a norm and the mixer, a norm and the MLP."""

    mixer: Mixer
    mlp: Mlp

    @property
    def sparse(self) -> bool:
        """Whether the MLP consists of experts that a router chooses."""
        return self.mlp.kind == "sparse"


@dataclass(frozen=True)
class Plan:
    """How to build a model.

    `transformer`: keyword arguments of TransformerConfig. `model`: keyword arguments of GPTModel. `decoder`: the layers.
    `special_ids`: token ids that the canary avoids. `routes`: the shape of router replay, None for a dense model.
    """

    family: str
    transformer: dict[str, Any]
    model: dict[str, Any]
    codec: Codec
    decoder: tuple[Layer, ...]
    vocab_size: int
    special_ids: frozenset[int]
    routes: RouteShape | None = None

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return len(self.decoder)


NORMS = (
    Row("decoder.layers.{i}.input_layernorm.weight", ("model.layers.{i}.input_layernorm.weight",)),
    Row("decoder.layers.{i}.pre_mlp_layernorm.weight", ("model.layers.{i}.post_attention_layernorm.weight",)),
)
ATTENTION = (
    Row(
        "decoder.layers.{i}.self_attention.linear_qkv.weight",
        tuple(f"model.layers.{{i}}.self_attn.{name}_proj.weight" for name in "qkv"),
        "query_groups",
        lora=True,
    ),
    Row(
        "decoder.layers.{i}.self_attention.linear_proj.weight", ("model.layers.{i}.self_attn.o_proj.weight",), lora=True
    ),
)
QK_NORMS = tuple(
    Row(
        f"decoder.layers.{{i}}.self_attention.{name}_layernorm.weight",
        (f"model.layers.{{i}}.self_attn.{name}_norm.weight",),
    )
    for name in "qk"
)
GATED_MLP = (
    Row(
        "decoder.layers.{i}.mlp.linear_fc1.weight",
        ("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight"),
        "concat",
        lora=True,
    ),
    Row("decoder.layers.{i}.mlp.linear_fc2.weight", ("model.layers.{i}.mlp.down_proj.weight",), lora=True),
)
_EMBEDDING = Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
_FINAL_NORM = Row("decoder.final_layernorm.weight", ("model.norm.weight",))
_HEAD = Row("output_layer.weight", ("lm_head.weight",))


GATED = Mlp("dense", GATED_MLP)


def attention(qk_norm: bool) -> Mixer:
    """Return grouped-query attention. `qk_norm`: with RMSNorm on each head's queries and keys."""
    return Mixer("attention", (*ATTENTION, *(QK_NORMS if qk_norm else ())), qk_norm)


def dense_layers(config: HfConfig, mixer: Mixer) -> list[Layer]:
    """Return the layers of a decoder that has this mixer and a SiLU-gated MLP in each."""
    return [Layer(mixer, GATED)] * int(config["num_hidden_layers"])


def decoder_plan(
    family: str,
    config: HfConfig,
    layers: Sequence[Layer],
    transformer: Mapping[str, Any] | None = None,
    routes: RouteShape | None = None,
) -> Plan:
    """Plan a decoder with RMSNorm and rotary positions. `transformer`, `routes`: what its MLPs add. Raises UnsupportedModel."""
    _refuse(config)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    shape = Heads(heads, groups, int(config.get("head_dim") or hidden // heads))
    tied = bool(config.get("tie_word_embeddings", False))
    common: dict[str, Any] = {
        "num_layers": len(layers),
        "hidden_size": hidden,
        "ffn_hidden_size": int(config["intermediate_size"]),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": float(config["rms_norm_eps"]),
        "qk_layernorm": any(layer.mixer.qk_norm for layer in layers),
    }
    model = {
        "vocab_size": int(config["vocab_size"]),
        "max_sequence_length": int(config["max_position_embeddings"]),
        "share_embeddings_and_output_weights": tied,
        **_rope(config),
    }
    per_model = (_EMBEDDING, _FINAL_NORM) if tied else (_EMBEDDING, _FINAL_NORM, _HEAD)
    if any(layer.sparse for layer in layers):
        common["moe_layer_freq"] = [int(layer.sparse) for layer in layers]
    codec = Codec.expand(per_model, [(*NORMS, *layer.mixer.rows, *layer.mlp.rows) for layer in layers], shape)
    return Plan(
        family, common | dict(transformer or {}), model, codec, tuple(layers), model["vocab_size"], _special_ids(config), routes,
    )  # fmt: skip


def _refuse(config: HfConfig) -> None:
    wanted = {
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
        "use_sliding_window": (False, False),
        "pretraining_tp": (1, 1),
        "attention_dropout": (0.0, 0.0),
        "partial_rotary_factor": (1.0, 1.0),
        "quantization_config": (None, None),
    }
    for name, (default, value) in wanted.items():
        found = config.get(name, default)
        if found != value:
            raise UnsupportedModel(
                f"config.json: {name} = {found!r} is not supported (only {value!r}); choose another model"
            )


def _rope(config: HfConfig) -> dict[str, Any]:
    """Return rotary arguments from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older versions)."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("config.json: a partial rotary embedding is not supported; choose another model")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {"rotary_base": theta}
    # Megatron fixes all of Llama 3's constants but the factor.
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(rope.get(name) == value for name, value in fixed.items()):
        return {"rotary_base": theta, "rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    if kind == "llama3":
        raise UnsupportedModel(f"config.json: rope scaling llama3 is supported with {fixed} only, not {dict(rope)}")
    raise UnsupportedModel(f"config.json: rope_type = {kind!r} is not supported (default and llama3 are)")


def _special_ids(config: HfConfig) -> frozenset[int]:
    found: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
