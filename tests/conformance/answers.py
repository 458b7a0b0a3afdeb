"""A server that answers one call of one method wrongly, slowly or not at all.

`METHODS` is every method of `Adapter` that calls the server; `answers` tries each against one fault. The relay answers in place of the
server, which hears nothing and stays intact.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from artd_schema.data.trajectory import RouteShape
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Adapter, EngineError, EngineTimeout, Fence
from tests.fake_daemon import INSTANCE

from .bench import Bench
from .spawn import refused

SLACK_S = 15.0
"""What a call may take beyond its deadline on a busy machine: less than a drip takes that nobody cuts off."""
FENCE = Fence(INSTANCE, 1, 1, 1)
SHAPE = RouteShape(layers=1, topk=1, experts=2)
METHODS: dict[str, Callable[[Adapter, Bench, Deadline], Any]] = {
    "pause": lambda a, b, d: a.pause(0.05, d),
    "resume": lambda a, b, d: a.resume(d),
    "begin": lambda a, b, d: a.begin(FENCE, d),
    "join": lambda a, b, d: a.join("somewhere", d),
    "receive": lambda a, b, d: a.receive(FENCE, b.weights(0).tensors, d),
    "load_merged": lambda a, b, d: a.load_merged(FENCE, b.weights(0).tensors, b.disk(0), d),
    "finish": lambda a, b, d: a.finish("toy@0", d),
    "load_adapter": lambda a, b, d: a.load_adapter("x", Path("/x"), d),
    "check_adapter": lambda a, b, d: a.check_adapter(Path("/x"), b.weights(0).tensors, d),
    "unload_adapter": lambda a, b, d: a.unload_adapter("x", d),
    "in_flight": lambda a, b, d: a.in_flight("x", d),
    "score": lambda a, b, d: a.score("toy", [[1, 2, 3]], d),
    "warm": lambda a, b, d: a.warm(d),
    "capture_routes": lambda a, b, d: a.capture_routes(SHAPE, d),
    "abort_all": lambda a, b, d: a.abort_all(d),
    "direct_table": lambda a, b, d: a.direct_table(d),
    "direct_open": lambda a, b, d: a.direct_open(Path(__file__), d),
    "direct_expect": lambda a, b, d: a.direct_expect(Path("/x"), d),
    "direct_room": lambda a, b, d: a.direct_room(d),
    "direct_stage": lambda a, b, d: a.direct_stage(FENCE, d),
    "direct_pull": lambda a, b, d: a.direct_pull(FENCE, d),
    "direct_swap": lambda a, b, d: a.direct_swap(FENCE, d),
}
"""Each method that speaks to the server, and how it is called (`Speech.methods`: the calls that it makes)."""
GUARDED = ("pause", "resume", "join", "receive", "finish", "load_adapter", "unload_adapter", "abort_all")
"""Those that begin with a route of the server's own, which carries no fence."""
FAULTS = (500, "close", "garbage", "odd", "hang", "drip")


def answers(bench: Bench, fault: Any) -> None:
    """Whichever call of whichever method meets this fault: an EngineError, in time, and the server is none the worse."""
    spawn, limit = bench.engine(), 0.2
    adapter = spawn.adapter()
    if not adapter.capabilities.weight_version or not adapter.capabilities.abort_route:
        raise AssertionError("the table of methods is that of an engine with every route")
    speech, waits = bench.kind.speech, fault in ("hang", "drip")
    fine = {"*": {"say": speech.fine}}
    for number in range(max(map(len, speech.methods.values()))):
        now = {name: routes[number] for name, routes in speech.methods.items() if number < len(routes)}
        if fault in ("garbage", "odd"):
            now = {name: route for name, route in now.items() if name not in speech.texts}
        made = {name: spawn.adapter() for name in now}  # one each: what it has joined or opened is its own
        with spawn.faults(fine | dict.fromkeys(now.values(), fault)), ThreadPoolExecutor(24) as pool:
            tried = {name: pool.submit(METHODS[name], made[name], bench, Deadline(limit)) for name in now}
            for name, call in tried.items():
                try:
                    with refused(kind=EngineTimeout if waits else EngineError, within_s=limit + SLACK_S):
                        call.result()
                except AssertionError as error:
                    raise AssertionError(f"{name}, {now[name]}: {error}") from None
    with spawn.faults({speech.version: fault}), refused(within_s=limit + SLACK_S):
        spawn.adapter(limit)
    with spawn.faults({speech.health: fault}):
        assert not adapter.healthy(Deadline(limit))
    assert adapter.healthy(Deadline(bench.kind.patience_s)) and spawn.serves(bench.served)
