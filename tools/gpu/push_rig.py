"""A trainer and an engine of `tools.gpu.push`, and one push between them.

Owner of: the number of the last fence. Invariants: a push is measured from sending /pause to the reply of /resume; a call that
raises is the caller's to handle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artd_schema.wire.direct import Offer
from artd_workers.trainer.push.direct.feeder import write_offer
from artd_workers.transfer.contracts import Port

from .push_trainer import Trainer

Line = dict[str, Any]
TIMEOUT_S = 60.0


@dataclass
class Rig:
    """engine: `push_server.Server`, or what stands for it; buffers: the trainer's, where they are not as artd has them."""

    trainer: Trainer
    engine: Any
    port: Port
    folder: Path
    buffers: dict[str, int] = field(default_factory=dict)
    tiny: bool = False
    number: int = 0
    prompts: list[list[int]] = field(default_factory=list)

    def fence(self) -> Line:
        self.number += 1
        return {"instance": "i", "spawn": 1, "push": self.number, "fence": self.number}

    def prepare(self, change: bool = True) -> float:
        """A new checkpoint, staged and expected by the engine; returns seconds of the checksums."""
        if change:
            self.trainer.step(self.number)
        began = time.perf_counter()
        self.trainer.stage(self.folder / "sums.json")
        seconds = time.perf_counter() - began
        self.engine.rpc("artd_direct_expect", str(self.folder / "sums.json"))
        return seconds

    def open(self, offer: Offer) -> Line:
        write_offer(offer, self.folder / "offer")
        return self.engine.rpc("artd_direct_open", str(self.folder / "offer"))

    def push(self, staged: bool = False, keep_kv: bool = False) -> Line:
        """One push of what was prepared; seconds from sending /pause to the reply of /resume, and of its phases. keep_kv: what
        runs goes on with the cache of the old weights, else it is computed again."""
        fence, line = self.fence(), {}
        feed = self.feed(fence["fence"])
        try:
            if staged:
                line["staged"] = self.stage(fence)
            marks = [time.perf_counter()]
            self.engine.pause(keep_kv)
            marks.append(time.perf_counter())
            inside = (
                self.engine.rpc("artd_direct_swap", fence)
                if staged
                else self.engine.rpc("artd_direct_pull", fence, TIMEOUT_S)
            )
            marks.append(time.perf_counter())
        finally:
            feed.join()
        marks.append(time.perf_counter())
        self.engine.resume()
        marks.append(time.perf_counter())
        pause, update, waited, resume = (b - a for a, b in zip(marks, marks[1:], strict=False))
        return (
            line
            | inside
            | {"pause": pause, "update": update, "resume": resume, "total": pause + update + waited + resume}
        )

    def mend(self) -> None:
        """After an item that has failed: the engine runs again, with weights that are known. Raises when it does not."""
        self.engine.rpc("probe_forgive")
        self.engine.resume()
        self.reopen()
        self.prepare(change=False)
        self.push()

    def reopen(self) -> None:
        """The trainer's own offer."""
        self.open(self.trainer.offer)

    def feed(self, fence: int) -> threading.Thread:
        def run() -> None:
            try:
                self.trainer.feed(fence, 5.0 if self.tiny else 15.0)
            except TimeoutError:
                return  # the engine refused before it took anything

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.003)  # the first buffers are filled before the pause
        return thread

    def stage(self, fence: Line) -> float:
        began = time.perf_counter()
        self.engine.rpc("artd_direct_stage", fence, TIMEOUT_S)
        while not self.engine.rpc("artd_direct_staged"):
            time.sleep(0.005)
        return time.perf_counter() - began

    def first_token(self) -> float:
        began = time.perf_counter()
        self.engine.logprobs(self.prompts[:1], 1)
        return time.perf_counter() - began


def over(lines: Sequence[Line], of: Callable[[list[float]], float]) -> Line:
    """Of each value of lines of one kind."""
    return {name: round(of([line[name] for line in lines]), 5) for name in lines[0]}


def apart(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference; NaN when there is one in either."""
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return max(gaps) if all(gap == gap for gap in gaps) else float("nan")
