"""A run's engine as the suite sees it: one spawn after the other, and the pushes to them.

A case may take the engine, push to it, and replace it as the daemon would. A bench owns a temporary folder, the spawns in it
and the run's fence. A spawn that `engine` returns serves what was pushed last and verified; the next spawns start ahead of
time; `close` leaves no process.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from artd_schema.data.manifest import WeightTable
from artd_schema.wire import worker as w
from artd_workers.engines.adapter import DiskLoad, Fence
from tests.awake import SOON_S
from tests.fake_daemon import INSTANCE

from .spawn import Feed, Kind, Spawn, reference


@dataclass
class Bench:
    """The suite's stand-in for a run. spawned: the last spawn's number; fence: the last one given; served: the last step that
    got live."""

    kind: Kind
    root: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="artd-c-")))
    spawned: int = 0
    fence: int = 0
    served: int = 0
    _now: Spawn | None = None
    _coming: deque[Future[Spawn]] = field(default_factory=deque)
    _made: list[Spawn] = field(default_factory=list)
    _pool: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor)

    # ---- spawns -------------------------------------------------------------------------------------------------------

    def engine(self, step: int = 0) -> Spawn:
        """The living spawn, or a new one that was pushed this step from disk, as after any start."""
        if self._now is None or self._now.daemon.process.poll() is not None:
            while len(self._coming) < 1 + self.kind.ahead:
                self.spawned += 1
                self._coming.append(self._pool.submit(self.spawn, self.spawned))
            self._now = self._coming.popleft().result()
            assert self._now.socket, self._now.daemon.received
            self.live(self._now, self.order(step))
        return self._now

    def replace(self, step: int) -> Spawn:
        """What the daemon does when an engine has ended: a new spawn, and the newest committed step from disk."""
        self.drop()
        return self.engine(step)

    def drop(self) -> None:
        """End the living spawn: after a case that failed in the middle of a push, say."""
        if self._now is not None:
            self._now.end()
        self._now = None

    def close(self) -> None:
        for one in self._coming:
            one.exception()
        for spawn in self._made:
            spawn.end()
        self._pool.shutdown()
        shutil.rmtree(self.root, ignore_errors=True)

    def spawn(self, number: int, faults: dict[str, Any] | None = None) -> Spawn:
        """A spawn of its own (see `Spawn.start`), which is ended with the bench."""
        made = Spawn.start(self.kind, self.root / str(number), number, faults)
        self._made.append(made)
        return made

    # ---- pushes -------------------------------------------------------------------------------------------------------

    def order(self, step: int, feed: Feed | None = None, **changes: Any) -> w.Push:
        """A push of a checkpoint from disk, or from a feed; every call has the next fence."""
        self.fence += 1
        ref = reference(self.kind.checkpoint(step), step)
        values = {
            "push": self.fence, "fence": self.fence, "checkpoint": ref, "mode": self.kind.spec.rollout_weights_mode,
            "source": "disk", "name": f"toy@{step}", "drain_s": 0.3,
            "deadline_s": self.kind.patience_s,
        }  # fmt: skip
        live = {"source": "live", "rendezvous": feed.rendezvous, "transfer": feed.transfer} if feed else {}
        return w.Push(**(values | live | changes))

    def live(self, spawn: Spawn, push: w.Push) -> w.Live:
        """Have it pushed and verified."""
        spawn.daemon.send(push)
        answer = spawn.daemon.expect((w.Live, w.PushFailed, w.Refused), push.deadline_s + push.drain_s + SOON_S)
        assert isinstance(answer, w.Live), answer
        assert answer.fence == push.fence
        self.served = push.checkpoint.step
        return answer

    def take_fence(self, spawn: Spawn) -> Fence:
        """The next fence, for calls beside the harness."""
        return fence_of(spawn, self.order(0))

    def weights(self, step: int) -> WeightTable:
        return msgspec.json.decode((self.kind.checkpoint(step) / "weights.json").read_bytes(), type=WeightTable)

    def disk(self, step: int) -> DiskLoad:
        """A load of this checkpoint, as the harness would ask for it."""
        spec = self.kind.spec
        base = None if spec.parameters == "full" else Path(spec.model)
        return DiskLoad(base, self.kind.checkpoint(step), spec.lora.alpha / spec.lora.rank, spec.engine.dtype)


def fence_of(spawn: Spawn, push: w.Push) -> Fence:
    """What the harness would show to the engine for this push."""
    return Fence(INSTANCE, spawn.number, push.push, push.fence)
