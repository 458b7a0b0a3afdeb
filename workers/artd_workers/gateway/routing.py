"""The routing table: which engine answers for which model name, and who may enter it now.

It owns the newest Route, the holds, and what is in flight in each engine. Nothing enters an engine that is held, a hold ends only by a newer
Route, and whoever entered leaves exactly once. Requests for a run go to the engines that serve its newest step; among those `Balance` chooses.
Everything runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from artd_schema.data.trajectory import RouteShape
from artd_schema.wire.worker import EngineRoute, Route, Served
from artd_workers.gateway.balance.balance import Balance, Work
from artd_workers.gateway.balance.prefixes import Cache

from .errors import ApiError
from .limits import Limits


@dataclass(frozen=True)
class Place:
    """Where a request may go: an engine, what it serves there, and the table that said so. avoid: an engine that failed the request before."""

    engine: EngineRoute
    served: Served
    pinned: bool
    seq: int
    avoid: str = ""

    @property
    def upstream(self) -> str:
        """The model name that the engine generates by: in merged mode its base model, whatever it holds now."""
        return self.served.name if self.engine.mode == "lora" else self.engine.base_model

    @property
    def cache(self) -> Cache:
        """The prefix cache: the gateway's salt keeps those of two policy epochs apart."""
        return self.engine.socket, self.served.epoch


@dataclass(frozen=True)
class Visit:
    """A request in an engine. tokens: what it adds to the engine's load."""

    place: Place
    tokens: int


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
        self._balance = Balance()
        self._turn = 0
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

    def has_choice(self, place: Place) -> bool:
        """Return whether several engines serve the place's run."""
        return sum(any(s.run == place.served.run for s in e.served) for e in self._route.engines) > 1

    def has_other(self, place: Place, engine: str) -> bool:
        """Return whether another engine than this one may be entered for what the place serves."""
        return any(route.engine != engine for route in self._open(place.served))

    async def place(self, model: str, avoid: str = "") -> Place:
        """Wait until this name may enter an engine, another one than `avoid` if there is one. Raises ApiError 404 (unknown), 503 (nothing
        served, held, ending)."""
        start = time.monotonic()
        while True:
            changed = self._changed
            found = self._resolve(model, avoid)
            if isinstance(found, Place):
                return found
            left = start + found.limit_s - time.monotonic()
            if left <= 0 or not await _within(changed, left):
                message = f"{found.reason} after {found.limit_s:.0f} s; try again"
                raise ApiError(503, "not_ready", message, param="model", retry_after_s=self._limits.retry_after_s)

    def settle(self, place: Place, work: Work) -> Place:
        """Return the place that suits a request best, now that its tokens are known: of the engines that serve the same as `place` does."""
        engines = self._open(place.served)
        if place.engine.socket not in {engine.socket for engine in engines}:
            return place  # `enter` refuses it
        places = [Place(engine, place.served, place.pinned, self._route.seq, place.avoid) for engine in engines]
        places = [one for one in places if one.engine.engine != place.avoid] or places
        chosen = self._balance.choose(work, [one.cache for one in places])
        return next(one for one in places if one.cache == chosen)

    def enter(self, place: Place, work: Work) -> Visit | None:
        """Count a request in; None when its place has been held, moved or superseded since: then ask for a new place."""
        now = next((e for e in self._route.engines if e.engine == place.engine.engine), None)
        if self._draining or now is None or now.engine in self._held:
            return None
        if now.socket != place.engine.socket or place.served not in now.served:
            return None
        self._in_flight[now.engine] = self.in_flight(now.engine) + 1
        return Visit(place, self._balance.enter(work, place.cache))

    def leave(self, visit: Visit) -> None:
        engine = visit.place.engine
        left = self.in_flight(engine.engine) - 1
        if left < 0:
            raise AssertionError(f"a request left engine {engine.engine} that never entered it")
        self._in_flight[engine.engine] = left
        self._balance.leave(engine.socket, visit.tokens)

    def learn(self, place: Place, work: Work, answers: Sequence[Sequence[int]]) -> None:
        """Note what the engine answered to the first prompt, for the next turn."""
        if work.prefix.tokens:
            self._balance.learn(work, place.cache, answers)

    def moved(self, place: Place) -> bool:
        """Return whether the daemon has said anything since that concerns this place."""
        return self._route.seq > place.seq or place.engine.engine in self._held

    async def newer(self, place: Place, timeout_s: float) -> bool:
        """Wait for a table or hold newer than this place; False at the timeout."""
        deadline = time.monotonic() + timeout_s
        while not self.moved(place):
            left = deadline - time.monotonic()
            if left <= 0 or not await _within(self._changed, left):
                return self.moved(place)
        return True

    async def find(self, label: str, timeout_s: float) -> Served | None:
        """Return what a weight version label stands for, None at the timeout. Waits for the route that names it."""
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

    def _open(self, served: Served) -> list[EngineRoute]:
        """Return the engines that serve this and may be entered."""
        return [e for e in self._route.engines if served in e.served and e.engine not in self._held]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _resolve(self, model: str, avoid: str) -> Place | _Waiting:
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
        epoch = max(s.epoch for _, s in free)
        newest = [(e, s) for e, s in free if s.epoch == epoch]
        newest = [(e, s) for e, s in newest if e.engine != avoid] or newest
        self._turn = (self._turn + 1) % len(newest)  # requests that are rendered are not in flight yet
        turns = (*newest[self._turn :], *newest[: self._turn])
        engine, served = min(turns, key=lambda pair: self.in_flight(pair[0].engine))
        return Place(engine, served, pinned, self._route.seq, avoid)

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
