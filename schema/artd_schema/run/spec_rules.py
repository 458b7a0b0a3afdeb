"""What of a run's spec excludes what, apart from what it learns with (`loss_rules`): a run is refused by the first rule that it breaks."""

from __future__ import annotations

from msgspec import UNSET

from .spec import RunSpec, Target

TOGETHER: tuple[tuple[Target, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj"))
"""Linears that are adapted all or not at all: the trainer computes their products together."""


def layout_error(spec: RunSpec) -> str:
    """Return why no model's processes can be laid out as the spec asks; "" if they can."""
    asked = spec.trainer
    if max(asked.near, asked.expert_parallel) % min(asked.near, asked.expert_parallel):
        return (
            f"trainer.tensor_parallel x context_parallel ({asked.near}) and expert_parallel ({asked.expert_parallel}): one "
            "must divide the other"
        )
    if asked.processes > asked.context_parallel and spec.parameters == "full":
        return (
            "parameters='full' is trained by processes that each hold the whole model: leave trainer.tensor_parallel, "
            "expert_parallel and pipeline_parallel at 1 (context_parallel may be more), or use parameters='lora'"
        )
    return ""


def length_error(spec: RunSpec) -> str:
    """Return why some answers of the engine could never be trained; "" if all can, or if the spec allows that
    (`drop_longer`)."""
    longest = spec.engine.max_model_len
    if spec.row_tokens >= longest or spec.drop_longer:
        return ""
    return (
        f"row_length={spec.row_length} is less than engine.max_model_len={longest}, and sequences in between would be sampled and "
        f"never trained: leave row_length out (it is then {longest}), lower engine.max_model_len, or say drop_longer=True"
    )


def in_flight_error(spec: RunSpec) -> str:
    """Return why no push of this run could let requests continue as the spec asks; "" if some can, or if the spec does
    not ask for it."""
    asked, way = spec.engine.in_flight, spec.engine.transfer
    if asked == "drain":
        return ""
    needs = f"engine.in_flight={asked!r} needs pushes that are verified before the engine goes on"
    if spec.rollout_weights_mode == "lora":
        return f"{needs}; with rollout_weights_mode='lora' nothing is paused, requests end on the step that they began with: leave it out"
    if spec.engine.device == "cpu":
        return f"{needs}, and those are of a GPU's memory: with engine.device='cpu' leave it out"
    if way == "stock":
        return f"{needs}, and engine.transfer='stock' has none: use 'auto', or leave it out"
    return ""


def targets_error(spec: RunSpec) -> str:
    """Return why a run's adapter cannot have the targets that it asks for; "" = it can."""
    targets = spec.lora.targets
    if targets is UNSET:
        return ""
    if spec.parameters == "full":
        return "lora.targets: parameters='full' trains every weight, and there is no adapter: leave it out"
    for group in TOGETHER:
        held = [name for name in group if name in targets]
        if held and len(held) < len(group):
            return f"lora.targets: {', '.join(group)} are adapted together: name all of them, or none"
    return ""
