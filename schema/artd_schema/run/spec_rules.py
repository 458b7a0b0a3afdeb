"""What of a run's spec excludes what, apart from what it learns with (`loss_rules`): a run is refused by the first rule that it breaks."""

from __future__ import annotations

from .spec import RunSpec


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
