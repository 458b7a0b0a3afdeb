"""Measures a batch's trajectories, and counts what is not trained and why, for the metrics of its step.

Pure. Whatever is left out is counted once, by its kind. docs/metrics.md defines each name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from artd_schema.data.manifest import Drop

from .forest import Answer, Forest
from .inputs import Source

CLIENT = "client/"
"""The prefix of a metric that the program sent with its trajectories."""
CLIENT_NAMES = 64
"""The most client metrics that a step keeps: those that most trajectories have."""
KINDS = ("too_long", "no_tokens", "no_turns", "group")


def measure(sources: Seq[Source], packed: Seq[bool], forest: Forest, drops: Seq[Drop]) -> dict[str, float]:
    """Return the metrics by name. `packed` says for each source whether any part of it is trained."""
    lost = {drop.trajectory for drop in drops}
    found = {
        "trained_trajectories": sum(packed),
        "trained_sequences": len(forest.sequence_of),
        "dropped_trajectories": len(sources) - sum(packed),
        "shortened_trajectories": sum(source.id in lost for source, some in zip(sources, packed, strict=True) if some),
        "dropped_sequences": sum(drop.kind in ("too_long", "no_tokens") for drop in drops),
        "dropped_tokens": sum(drop.tokens for drop in drops),
    }
    kinds: Counter[str] = Counter(drop.kind for drop in drops)
    found |= {f"dropped_{kind}": kinds[kind] for kind in KINDS}
    if kinds["truncated"]:
        found["dropped_truncated"] = kinds["truncated"]
    own = client(source.metrics for source in sources)
    return {name: float(value) for name, value in found.items()} | answers(forest.answers) | own


def answers(turns: Seq[Answer]) -> dict[str, float]:
    """Return the mean and maximum length of the answers in tokens, and the share that ended at a length limit among
    those whose end is known."""
    found: dict[str, float] = {}
    if turns:
        lengths = [turn.tokens for turn in turns]
        found = {"answer_tokens_mean": sum(lengths) / len(lengths), "answer_tokens_max": float(max(lengths))}
    if known := [turn for turn in turns if turn.finish_reason]:
        found["truncated_fraction"] = sum(turn.finish_reason == "length" for turn in known) / len(known)
    return found


def client(given: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each client metric over the trajectories that have it, for at most CLIENT_NAMES names."""
    values: dict[str, list[float]] = {}
    for metrics in given:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    kept = sorted(values, key=lambda name: (-len(values[name]), name))[:CLIENT_NAMES]
    # Divide before adding: the sum of finite numbers may overflow.
    means = {name: math.fsum(value / len(values[name]) for value in values[name]) for name in kept}
    found = {CLIENT + name: mean for name, mean in means.items() if math.isfinite(mean)}
    return found | ({"client_names_left_out": float(len(values) - len(kept))} if len(values) > len(kept) else {})
