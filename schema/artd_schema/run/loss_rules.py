"""What of the fields that a run learns with excludes what, and each number's bounds: a run is refused by the first rule that it breaks.

Pure. The daemon asks before it makes a run; the trainer relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import UNSET

from .losses import EXAMPLES, OWN
from .spec import AdvantageSpec, RunSpec

Finding = tuple[str, str]
"""(field of the spec, what is wrong and what to do instead)."""


def loss_finding(spec: RunSpec) -> Finding | None:
    """Return the first rule that a run's loss, advantages or schedule breaks; None where it can be trained with them, or its loss is none
    of artd."""
    return next((found for rule in RULES for found in rule(spec)), None)


def _clips(spec: RunSpec) -> Iterator[Finding]:
    loss, own = spec.loss, OWN.get(spec.loss.kind)
    for name in ("clip_low", "clip_high"):
        if own is not None and getattr(own, name) is None and getattr(loss, name) is not UNSET:
            has = [kind for kind, other in OWN.items() if getattr(other, name) is not None]
            yield f"loss.{name}", f"loss.{name}: {loss.kind!r} has no such bound: leave it out, or use {', '.join(has)}"
    if own is not None and own.clip_low is not None and loss.clip_low is not UNSET and loss.clip_low >= 1:
        yield (
            "loss.clip_low",
            f"loss.clip_low={loss.clip_low:g}: no ratio is below 1 - clip_low then; use a number below 1, such as 0.2",
        )


def _params(spec: RunSpec) -> Iterator[Finding]:
    loss = spec.loss
    bounds = OWN[loss.kind].params if loss.kind in OWN else {}
    for name, value in (loss.params or {}).items():
        low, high = bounds.get(name, (value, value))
        if not low <= value <= high:
            yield (
                f"loss.params.{name}",
                f"loss.params: {name}={value:g} of {loss.kind!r} must be from {low:g} to {high:g}",
            )


def _divisor(spec: RunSpec) -> Iterator[Finding]:
    if spec.loss.divisor is not UNSET and spec.loss.normalise != "constant":
        yield (
            "loss.divisor",
            f"loss.divisor counts with loss.normalise='constant' alone, and it is {spec.loss.normalise!r}: leave one of them out",
        )


def _corrections(spec: RunSpec) -> Iterator[Finding]:
    loss = spec.loss
    if loss.correction is UNSET:
        return
    for name in ("icepop", "product", "geometric"):
        bounds = getattr(loss.correction, name)
        if bounds is not UNSET and not bounds[0] < bounds[1]:
            yield (
                f"loss.correction.{name}",
                f"loss.correction.{name}={list(bounds)}: give (lowest, highest), such as (0.5, 5.0)",
            )
    if loss.correction.tis is not UNSET and loss.proximal != "trainer" and loss.kind != "reinforce":
        yield (
            "loss.correction.tis",
            f"loss.correction.tis: {loss.kind!r} has the ratio to the engine in its own formula, and would be weighed by it twice: "
            "add loss.proximal='trainer', use kind 'reinforce', or leave tis out",
        )


def _kl(spec: RunSpec) -> Iterator[Finding]:
    kl = spec.loss.kl
    if kl is UNSET:
        return
    if spec.parameters == "full":
        yield (
            "loss.kl",
            "loss.kl is the distance to the base model, which a trainer of every weight no longer holds: use parameters='lora', or "
            "leave loss.kl out",
        )
    if kl.estimator == "k1" and kl.into == "loss":
        yield (
            "loss.kl.estimator",
            "loss.kl: k1 in the loss has a gradient of zero on average (arXiv:2510.01555): use into='advantage', or estimator 'k2' or 'k3'",
        )


def _advantages(spec: RunSpec) -> Iterator[Finding]:
    how = spec.advantages
    if how is UNSET:
        return
    if spec.scale_rewards and (how.batch_scale or how.baseline in ("none", "given")):
        other = "advantages.batch_scale" if how.batch_scale else f"advantages.baseline={how.baseline!r}"
        yield (
            "scale_rewards",
            f"scale_rewards divides by the deviation within a group, which {other} does without: leave one of them out",
        )
    if how.baseline == "given" and (
        how.batch_scale or how.length is not UNSET or not how.positive == how.negative == 1.0
    ):
        yield (
            "advantages.baseline",
            "advantages.baseline='given' takes the program's advantages as they are: leave batch_scale, length, positive and negative out",
        )
    if not (how.positive or how.negative):
        yield (
            "advantages.positive",
            "advantages.positive and advantages.negative are both 0, which trains nothing: raise one of them",
        )
    if how.length is not UNSET and how.length.buffer > how.length.limit:
        yield (
            "advantages.length.buffer",
            f"advantages.length.buffer={how.length.buffer} is more than limit={how.length.limit}: give at most the limit",
        )


def _schedule(spec: RunSpec) -> Iterator[Finding]:
    schedule = spec.optimizer.schedule
    if schedule is UNSET:
        return
    if schedule.kind == "constant":
        if schedule.steps is not UNSET or schedule.floor:
            yield (
                "optimizer.schedule",
                "optimizer.schedule: 'constant' does not fall, and has neither steps nor floor: leave them out, or use 'linear' or 'cosine'",
            )
    elif schedule.steps is UNSET:
        yield (
            "optimizer.schedule.steps",
            f"optimizer.schedule: {schedule.kind!r} falls until an optimizer step: give its number, such as steps=200",
        )
    elif schedule.steps <= schedule.warmup:
        yield (
            "optimizer.schedule.steps",
            f"optimizer.schedule: steps={schedule.steps} counts from the run's first step and must be more than warmup={schedule.warmup}",
        )


def _minibatches(spec: RunSpec) -> Iterator[Finding]:
    parts = spec.optimizer.minibatches or 1
    if parts > spec.groups_per_step:
        yield (
            "optimizer.minibatches",
            f"optimizer.minibatches={parts}: each takes a group or more, and a batch has groups_per_step={spec.groups_per_step}: use fewer",
        )


def _group_size(spec: RunSpec) -> Iterator[Finding]:
    compares = (spec.advantages or AdvantageSpec()).baseline in ("group", "leave_one_out")
    if spec.group_size < 2 and compares:
        yield (
            "group_size",
            "group_size=1 trains nothing: a reward counts by how it differs from the others of its group, so a group of one is discarded; "
            "use 2 or more answers to each prompt, or advantages={'baseline': 'none'}",
        )


def _examples(spec: RunSpec) -> Iterator[Finding]:
    if spec.loss.kind != EXAMPLES:
        return
    for name in ("correction", "proximal"):
        if getattr(spec.loss, name) is not UNSET:
            yield (
                f"loss.{name}",
                f"loss.{name} compares with the engine that sampled, and examples are not sampled: leave it out",
            )
    if spec.group_size != 1:
        yield (
            "group_size",
            f"group_size={spec.group_size}: an example is a group of its own: leave group_size out with loss.kind='sft'",
        )
    if spec.advantages != AdvantageSpec(baseline="none"):
        yield (
            "advantages",
            "advantages come from rewards, and examples have none: leave advantages out with loss.kind='sft'",
        )


RULES: tuple[Callable[[RunSpec], Iterator[Finding]], ...] = (
    _clips,
    _params,
    _divisor,
    _corrections,
    _kl,
    _schedule,
    _minibatches,
    _advantages,
    _examples,
    _group_size,
)
