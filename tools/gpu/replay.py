"""What replay costs a train step: the same rows through the same experts, live and replayed.

Purpose: `cost` compares the times of whole steps in pairs, `kernels` says which kernels and operations differ. Owner of: no
state. Invariants: clocks are read with the device idle; after the warm-up every step counts.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import torch

from artd_schema.run.spec import LossSpec, OptimizerSpec
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.step.step import Optimizer, train_step

from . import rows
from .policies import made, on, settle

SECONDS = 45
"""How long `cost` goes on with the rounds of a row length, of which there are at least 30."""
GROUPS = 6
LENGTHS = {"two rows": 16_384, "one row": 32_768}
"""Row lengths by how many rows they make of the batch. Rows so long that the device sets the pace: of 8,192 it takes little longer
than what launches its kernels, and a round's percentage scattered by 8 to 12."""
WARM = 6
Times = tuple[float, float]


class Steps:
    """Train steps on one batch, live and replayed; the learning rate is so small that all of them are the same step."""

    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self._policy, lora = made(2 if tiny else 8, tiny, on(tiny))
        self._optimizer = Optimizer.make(lora, OptimizerSpec(lr=1e-12))
        self.batches: dict[str, Batch] = {}
        self.about: dict[str, Any] = {}

    def take(self, length: int) -> None:
        """The batch in rows of at most `length` tokens from now on (tiny: a sixteenth)."""
        plan, each = self._policy.plan, 32 if self.tiny else 512
        live = rows.packed(GROUPS, 8, each, each, length // 16 if self.tiny else length, plan.vocab_size)
        self.batches = {"live": live, "replayed": rows.with_routes(self._policy, live)}
        self.about = {"layers": plan.layers, "row_tokens": [len(row.tokens) for row in live.rows]}

    def step(self, kind: str) -> dict[str, float]:
        return train_step(self._policy, self._optimizer, self.batches[kind], LossSpec(), 0)

    def timed(self, kind: str) -> Times:
        """Seconds of a step: by this process's clock and by the device's."""
        settle(self.tiny)
        marks = [] if self.tiny else [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        started = time.perf_counter()
        for mark in marks[:1]:
            mark.record()
        self.step(kind)
        for mark in marks[1:]:
            mark.record()
        settle(self.tiny)
        wall = time.perf_counter() - started
        return wall, marks[0].elapsed_time(marks[1]) / 1000 if marks else wall

    def warm(self) -> int:
        """Step until the last few steps took as long as those before them, or long enough; gives how many it took."""
        took: list[float] = []
        while len(took) < (2 if self.tiny else 60):
            took += [self.timed(kind)[0] for kind in self.batches]
            last, before = took[-WARM:], took[-2 * WARM : -WARM]
            if len(before) == WARM and abs(statistics.median(last) / statistics.median(before) - 1) < 0.01:
                break
        return len(took)


@contextmanager
def no_garbage() -> Iterator[None]:
    """Python collects nothing inside, and looks through nothing that is there now."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def cost(tiny: bool) -> Iterator[dict[str, Any]]:
    """Rounds of four steps, live replayed replayed live or the other way round: what drifts evenly counts the same in both."""
    steps = Steps(tiny)
    for name, length in LENGTHS.items():
        steps.take(length)
        with no_garbage():
            throttled, warm = _throttled(), steps.warm()
            found = _rounds(steps)
        clocks = {
            clock: compared(*([times[which] for times in found[kind]] for kind in ("live", "replayed")))
            for which, clock in enumerate(("wall", "device"))
        }
        losses = {kind: steps.step(kind)["loss"] for kind in found}
        yield {
            "what": f"cost of replay, paired, {name}", **steps.about, "rounds": len(found["live"]) // 2,
            "steps_of_a_kind_a_round": 2, "warm_steps": warm, **clocks, "losses": losses,
            "threads": torch.get_num_threads(), "throttled": _throttled() - throttled, "gpu": _gpu(tiny),
        }  # fmt: skip


def _rounds(steps: Steps) -> dict[str, list[Times]]:
    """Times of each kind, two a round."""
    found: dict[str, list[Times]] = {kind: [] for kind in steps.batches}
    number, least, until = 0, 3 if steps.tiny else 30, time.perf_counter() + (0 if steps.tiny else SECONDS)
    while number < least or time.perf_counter() < until:
        if number % 10 == 0:
            gc.collect()
            for kind in steps.batches:
                steps.step(kind)
        order = ("live", "replayed") if number % 2 else ("replayed", "live")
        for kind in (*order, *reversed(order)):
            found[kind].append(steps.timed(kind))
        number += 1
    return found


def compared(live: list[float], replayed: list[float]) -> dict[str, Any]:
    """By how many percent replayed steps took longer, two of each a round: the rounds, their mean and their Hodges-Lehmann shift
    (J. L. Hodges, E. L. Lehmann, 1963), each with its 95 % interval; all seconds in quantiles."""
    pairs = zip(live[::2], live[1::2], replayed[::2], replayed[1::2], strict=True)
    percent = [100 * ((c + d) / (a + b) - 1) for a, b, c, d in pairs]
    mean, half = statistics.mean(percent), 1.96 * statistics.stdev(percent) / len(percent) ** 0.5
    shift, interval = shifted(percent)
    return {
        "percent": mean, "interval": [mean - half, mean + half], "shift_percent": shift, "shift_interval": interval,
        "live_s": _quantiles(live), "replayed_s": _quantiles(replayed), "rounds": [round(one, 3) for one in percent],
    }  # fmt: skip


def shifted(values: Sequence[float]) -> tuple[float, list[float]]:
    """The median of the means of all pairs, and the 95 % interval that goes with Wilcoxon's signed-rank test (its normal
    approximation): a round in which something else had the machine moves neither."""
    count = len(values)
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    spread = 1.96 * (count * (count + 1) * (2 * count + 1) / 24) ** 0.5
    skip = max(0, int(count * (count + 1) / 4 - spread))
    return statistics.median(means), [means[skip], means[-1 - skip]]


def _quantiles(seconds: list[float]) -> list[float]:
    """5, 25, 50, 75, 95 %."""
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return [round(cuts[at], 6) for at in (0, 4, 9, 14, 18)]


def _throttled() -> int:
    """How often the scheduler has stopped this container for having used up its share of the cores; 0 where it does not say."""
    file = Path("/sys/fs/cgroup/cpu.stat")
    lines = file.read_text().split("\n") if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("nr_throttled ")), 0)


def _gpu(tiny: bool) -> str:
    """Clock and power, right after the steps."""
    if tiny:
        return ""
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


Counts = dict[str, tuple[float, int]]


def kernels(tiny: bool) -> Iterator[dict[str, Any]]:
    """What a replayed step does that a live one does not, and the other way round."""
    steps = Steps(tiny)
    steps.take(LENGTHS["two rows"])
    steps.warm()
    for on_device in (False,) if tiny else (False, True):
        seen = {kind: _profiled(steps, kind, on_device) for kind in steps.batches}
        live, replayed = seen["live"], seen["replayed"]
        differ = [
            (round(replayed.get(key, (0, 0))[0] - live.get(key, (0, 0))[0]), replayed.get(key, (0, 0))[1] - live.get(key, (0, 0))[1], key[:100])
            for key in live.keys() | replayed.keys()
        ]  # fmt: skip
        changed = [one for one in differ if one[1]]
        yield {
            "what": f"{'kernels' if on_device else 'operations'} of a replayed step less those of a live one: us, calls, name",
            "us": {kind: round(sum(us for us, _ in found.values())) for kind, found in seen.items()},
            "calls": {kind: sum(count for _, count in found.values()) for kind, found in seen.items()},
            "of_other_count_us": sum(one[0] for one in changed),
            "differ": sorted(changed, key=lambda one: -abs(one[0])),
            "slower_or_faster": sorted(differ, key=lambda one: -abs(one[0]))[:12],
        }


def _profiled(steps: Steps, kind: str, on_device: bool) -> Counts:
    """Microseconds and calls of each operation or kernel in one step."""
    kinds = [torch.profiler.ProfilerActivity.CPU] + ([] if steps.tiny else [torch.profiler.ProfilerActivity.CUDA])
    steps.step(kind)
    settle(steps.tiny)
    with torch.profiler.profile(activities=kinds) as seen:
        steps.step(kind)
        settle(steps.tiny)
    cuda = torch.autograd.DeviceType.CUDA
    found = [event for event in seen.key_averages() if (event.device_type == cuda) == on_device]
    return {e.key: (e.self_device_time_total if on_device else e.self_cpu_time_total, e.count) for e in found}
