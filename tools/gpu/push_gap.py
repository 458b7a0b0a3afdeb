"""Pushes while streams decode: what each stream waits, and what a prefill of the same tokens takes.

Owner of: no state. Invariants: a gap is the time between two tokens of one stream, as its client sees them; all clocks are this
machine's one monotonic clock, the worker's too; a prefill begins with all its requests queued at a paused engine, as a push leaves
them, and nothing cached.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .push_rig import Line, Rig, over

STREAMS, CONTEXT, ANSWER = 32, 1024, 2500
WAIT_S, QUIET_S, SHOWN = 60.0, 0.3, 40
WARM_S = 100.0
_DRAWN = itertools.count(1)


@dataclass
class Load:
    """Streams that decode at once. tiny: few and short ones."""

    rig: Rig
    running: list[Any] = field(default_factory=list)

    def __enter__(self) -> Load:
        prompts = fresh(self.rig, [CONTEXT] * STREAMS)
        self.running = [self.rig.engine.stream(prompt, ANSWER) for prompt in prompts]
        self.settle(time.perf_counter())
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.running:
            stream.stop()
        time.sleep(QUIET_S)

    def settle(self, since: float) -> None:
        """Until each has four tokens that came after `since`, and a little longer. Raises RuntimeError."""
        end = time.perf_counter() + WAIT_S
        while not all(len(stream.at) > 4 and stream.at[-4] > since for stream in self.running):
            if time.perf_counter() > end or not all(stream.is_alive() for stream in self.running):
                raise RuntimeError("a stream has ended or waits for its next token: see vllm.log")
            time.sleep(0.02)
        time.sleep(QUIET_S)

    def contexts(self) -> list[int]:
        """Tokens of each by now."""
        return [CONTEXT + len(stream.at) for stream in self.running]

    def push(self, staged: bool, kept: bool) -> Pushed:
        self.rig.prepare()
        self.rig.engine.rpc("probe_watch")
        begin = time.perf_counter()
        seconds = self.rig.push(staged=staged, keep_kv=kept)
        resumed, contexts = time.perf_counter(), self.contexts()
        self.settle(resumed)
        found = self.rig.engine.rpc("probe_watch")
        gaps = [gap_across(stream.at, begin, resumed) for stream in self.running]
        first = max(next(at for at in stream.at if at > resumed) for stream in self.running)
        steps = [step for step in found["steps"] if begin <= step[0] <= first]
        return Pushed(begin, seconds, gaps, first - resumed, contexts, steps, found["kernels"])


@dataclass(frozen=True)
class Pushed:
    """One push. gaps: each stream's; again: seconds from the reply of /resume to the last stream's first token; contexts: tokens of
    each stream at it; steps, kernels: the engine's, see `ProbeCalls.probe_watch`."""

    begin: float
    seconds: Line
    gaps: list[float]
    again: float
    contexts: list[int]
    steps: list[Sequence[float]]
    kernels: list[Sequence[Any]]

    def shown(self) -> Line:
        """Its steps: milliseconds since /pause, in the call, tokens, requests; and which kernels were made ready."""
        steps = [(*(round(1e3 * s, 1) for s in (at - self.begin, took)), *sizes) for at, took, *sizes in self.steps]
        kernels = [(round(1e3 * (at - self.begin), 1), name) for at, name in self.kernels]
        return {"gap": max(self.gaps), "again": self.again, "steps": steps[-SHOWN:], "kernels": kernels}


def streams(rig: Rig, rounds: int) -> Iterator[Line]:
    """Time of pushes and gaps with the KV cache kept."""
    for staged in (False, True):
        with Load(rig) as load:
            pushed = [load.push(staged, True) for _ in range(_count(rounds))]
        yield _line(staged, True, pushed)


def gap(rig: Rig, rounds: int) -> Iterator[Line]:
    """The KV cache computed again: against a prefill of the same tokens, without artd's warm-up (`artd_warm`) and after it. This engine
    was started by the script, not by artd's harness, so nobody has called it before."""
    rig.engine.rpc("probe_watch")
    yield {"what": "prefill of an engine that has done none", **prefill(rig, [CONTEXT] * STREAMS)}
    yield {"what": "the same again", **prefill(rig, [CONTEXT] * STREAMS)}
    yield from (line | {"cold": True} for line in computed_again(rig, rounds, False, ", no warm-up"))
    for what in ("warm-up", "warm-up, all being ready"):
        yield {"what": what, "warm": rig.engine.rpc("artd_warm", WARM_S)}
    for staged in (False, True):
        yield from computed_again(rig, rounds, staged, "")


def computed_again(rig: Rig, rounds: int, staged: bool, note: str) -> Iterator[Line]:
    with Load(rig) as load:
        pushed = [load.push(staged, False) for _ in range(_count(rounds))]
    middle = sorted(pushed, key=lambda one: sum(one.contexts))[len(pushed) // 2]
    same = prefill(rig, middle.contexts)
    line = _line(staged, False, pushed)
    gaps = (line["gap_median"], line["gap_largest"])
    past = dict(zip(("median_past_prefill", "largest_past_prefill"), (g - same["seconds"] for g in gaps), strict=True))
    yield line | {"what": line["what"] + note, "prefill": same, "prefill_s": same["seconds"], **past}


def prefill(rig: Rig, lengths: Sequence[int]) -> Line:
    """Requests of these lengths, one token each; seconds from the reply of /resume to the last one's token."""
    engine = rig.engine
    engine.pause()
    running = [engine.stream(prompt, 1) for prompt in fresh(rig, lengths)]
    time.sleep(QUIET_S + 0.02 * len(lengths))
    engine.rpc("probe_watch")
    engine.resume()
    resumed = time.perf_counter()
    for stream in running:
        stream.join(WAIT_S)
    last = max(stream.at[0] for stream in running)
    found = engine.rpc("probe_watch")
    return {
        "seconds": last - resumed, "tokens": sum(lengths), "kernels": len(found["kernels"]),
        "steps": [(round(1e3 * (at - resumed), 1), tokens, requests) for at, _, tokens, requests in found["steps"]][:SHOWN],
    }  # fmt: skip


def fresh(rig: Rig, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts that nobody has sent before."""
    vocab, number = rig.trainer.config["vocab_size"] - 10, next(_DRAWN)
    return [[(11 * i + 17 * j + 7919 * number * (i + 1)) % vocab + 5 for j in range(n)] for i, n in enumerate(lengths)]


def gap_across(at: Sequence[float], begin: float, end: float) -> float:
    """The longest wait between two tokens that has a part in begin .. end."""
    return max((b - a for a, b in itertools.pairwise(at) if b > begin and a < end), default=0.0)


def _count(rounds: int) -> int:
    return max(rounds // 5, 4)


def _line(staged: bool, kept: bool, pushed: Sequence[Pushed]) -> Line:
    """Of a run of pushes: medians, each push's median and largest gap of a stream, and the slowest push step by step."""
    lines = [one.seconds for one in pushed]
    half, most = [statistics.median(one.gaps) for one in pushed], [max(one.gaps) for one in pushed]
    return {
        "what": f"{'staged' if staged else 'in place'}, {STREAMS} streams, KV {'kept' if kept else 'computed again'}",
        "rounds": len(pushed), "median": over(lines, statistics.median), "largest": over(lines, max),
        "gap_p50": statistics.median(half), "gap_median": statistics.median(most), "gap_largest": max(most),
        "gaps": [[round(a, 3), round(b, 3)] for a, b in zip(half, most, strict=True)],
        "again": [round(one.again, 3) for one in pushed], "tokens": [sum(one.contexts) for one in pushed],
        "slowest": max(pushed, key=lambda one: max(one.gaps)).shown(),
    }  # fmt: skip
