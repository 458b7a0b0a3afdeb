"""The routing table: which engine answers for which model name, and who may enter it now.

Owner of: the newest Route, the holds, and the number of requests in flight per engine.
Invariants: nothing enters an engine that is held; a hold ends only by a newer Route; whoever entered leaves exactly
once. Everything runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from artd_schema.data.trajectory import RouteShape
from artd_schema.wire.worker import EngineRoute, Route, Served

from .errors import ApiError
from .limits import Limits


@dataclass(frozen=True)
class Place:
    """Where a request may go: an engine, what it serves there, and the table that said so."""

    engine: EngineRoute
    served: Served
    pinned: bool
    seq: int

    @property
    def upstream(self) -> str:
        """The model name that the engine generates by: in merged mode its base model, whatever it holds now."""
        return self.served.name if self.engine.mode == "lora" else self.engine.base_model


@dataclass(frozen=True)
class _Waiting:
    reason: str
    limit_s: float


class Table:
    """Routing table, holds and in-flight counts."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._route = Route(seq=-1, runs=(), engines=())
        self._held: set[str] = set()
        self._in_flight: dict[str, int] = {}
        self._labels: dict[str, Served] = {}
        self._changed = asyncio.Event()
        self._draining = False

    # ---- what the daemon says ---------------------------------------------------------------------------------------

    def take(self, route: Route) -> int:
        """Put a table in force and lift the holds that it does not repeat. Returns the seq now in force."""
        if route.seq > self._route.seq:
            self._route = route
            self._held = {engine.engine for engine in route.engines if engine.hold}
            self._name([served for engine in route.engines for served in engine.served])
            self._notify()
        return self._route.seq

    def hold(self, engine: str) -> int:
        """Admit nothing more to this engine until a newer table. Returns its requests in flight."""
        self._held.add(engine)
        return self.in_flight(engine)

    def drain(self) -> None:
        """Admit nothing at all any more: the gateway is ending."""
        self._draining = True
        self._notify()

    # ---- what requests ask ------------------------------------------------------------------------------------------

    @property
    def sockets(self) -> set[str]:
        return {engine.socket for engine in self._route.engines}

    def in_flight(self, engine: str) -> int:
        return self._in_flight.get(engine, 0)

    def models(self) -> list[str]:
        """Names that a request may use: every run, then its live steps, newest first."""
        live = {served.name: served for engine in self._route.engines for served in engine.served}
        steps = sorted(live.values(), key=lambda served: -served.epoch)
        return [name for run in self._route.runs for name in (run, *(s.name for s in steps if s.run == run))]

    def context_of(self, model: str) -> int | None:
        """Model length in tokens of an engine that serves this name, if one does."""
        for engine in self._route.engines:
            if any(model in (served.name, served.run) for served in engine.served):
                return engine.max_model_len
        return None

    def run_of(self, model: str) -> str:
        """Return the run that a model's name stands for: itself, or what is before its `@`."""
        return model if model in self._route.runs else model.rpartition("@")[0]

    def routes_of(self, model: str) -> RouteShape | None:
        """Return the shape of the routes that the run's engines capture, None when they capture none."""
        run = self.run_of(model)
        return next((e.routes for e in self._route.engines if any(s.run == run for s in e.served)), None)

    async def place(self, model: str) -> Place:
        """Wait until this name may enter an engine. Errors: ApiError 404 (unknown), 503 (nothing served, held,
        ending)."""
        start = time.monotonic()
        while True:
            changed = self._changed
            found = self._resolve(model)
            if isinstance(found, Place):
                return found
            left = start + found.limit_s - time.monotonic()
            if left <= 0 or not await _within(changed, left):
                message = f"{found.reason} after {found.limit_s:.0f} s; try again"
                raise ApiError(503, "not_ready", message, param="model", retry_after_s=self._limits.retry_after_s)

    def enter(self, place: Place) -> bool:
        """Count a request in, unless its place has been held, moved or superseded since: then ask for a new place."""
        now = next((e for e in self._route.engines if e.engine == place.engine.engine), None)
        if self._draining or now is None or now.engine in self._held:
            return False
        if now.socket != place.engine.socket or place.served not in now.served:
            return False
        self._in_flight[now.engine] = self.in_flight(now.engine) + 1
        return True

    def leave(self, place: Place) -> None:
        left = self.in_flight(place.engine.engine) - 1
        if left < 0:
            raise AssertionError(f"a request left engine {place.engine.engine} that never entered it")
        self._in_flight[place.engine.engine] = left

    def moved(self, place: Place) -> bool:
        """True when the daemon has said anything since that concerns this place."""
        return self._route.seq > place.seq or place.engine.engine in self._held

    async def newer(self, place: Place, timeout_s: float) -> bool:
        """Wait for a table or hold newer than this place; False at the timeout."""
        deadline = time.monotonic() + timeout_s
        while not self.moved(place):
            left = deadline - time.monotonic()
            if left <= 0 or not await _within(self._changed, left):
                return self.moved(place)
        return True

    async def named(self, label: str, timeout_s: float) -> Served | None:
        """What a weight version label stands for; waits for the route that names it, None at the timeout."""
        deadline = time.monotonic() + timeout_s
        while (served := self._labels.get(label)) is None:
            left = deadline - time.monotonic()
            if left <= 0 or not await _within(self._changed, left):
                return self._labels.get(label)
        return served

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _name(self, served: list[Served]) -> None:
        """Learn what labels stand for. After a rollback a run serves an older epoch: what was newer is forgotten, for the next
        step of that number is another one under the same label."""
        newest: dict[str, int] = {}
        for each in served:
            newest[each.run] = max(each.epoch, newest.get(each.run, each.epoch))
        kept = {n: old for n, old in self._labels.items() if old.epoch <= newest.get(old.run, old.epoch)}
        self._labels = kept | {each.name: each for each in served}

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _resolve(self, model: str) -> Place | _Waiting:
        if self._draining:
            raise ApiError(503, "draining", "the gateway is ending", retry_after_s=self._limits.retry_after_s)
        run = self.run_of(model)
        if run not in self._route.runs:
            raise self._unknown(model, f"model {model!r} does not exist")
        pinned = model != run
        serving = [(e, s) for e in self._route.engines for s in e.served if s.run == run]
        found = [(e, s) for e, s in serving if not pinned or s.name == model]
        if not found and serving:
            raise self._unknown(model, f"model {model!r} is not live")
        if not found:
            return _Waiting(f"run {run!r} serves nothing yet", self._limits.ready_s)
        free = [(e, s) for e, s in found if e.engine not in self._held]
        if not free:
            return _Waiting(f"every engine of run {run!r} is still held for a push", self._limits.hold_s)
        engine, served = max(free, key=lambda pair: (pair[1].epoch, -self.in_flight(pair[0].engine)))
        return Place(engine, served, pinned, self._route.seq)

    def _unknown(self, model: str, what: str) -> ApiError:
        known = ", ".join(self.models()) or "none (no run exists)"
        return ApiError(404, "model_not_found", f"{what}; known names: {known}", param="model")


async def _within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
