"""A server that answers one call of one method wrongly, slowly or not at all.

`METHODS` is every method of `Adapter` that calls the server, with its calls; `answers` tries each against one fault. The relay
answers in place of the server, which hears nothing and stays intact.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from artd_schema.trajectory import RouteShape
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Adapter, EngineError, EngineTimeout, Fence
from tests.engine.daemon import INSTANCE

from .bench import Bench
from .spawn import refused

SLACK_S = 15.0
"""What a call may take beyond its deadline on a busy machine: less than a drip takes that nobody cuts off."""
FENCE = Fence(INSTANCE, 1, 1, 1)
SHAPE = RouteShape(layers=1, topk=1, experts=2)
METHODS: dict[str, tuple[tuple[str, ...], Callable[[Adapter, Bench, Deadline], Any]]] = {
    "pause": (("/pause",), lambda a, b, d: a.pause(0.05, d)),
    "resume": (("/resume",), lambda a, b, d: a.resume(d)),
    "begin": (("artd_begin",), lambda a, b, d: a.begin(FENCE, d)),
    "join": (("/init_weight_transfer_engine",), lambda a, b, d: a.join("somewhere", d)),
    "receive": (
        ("/start_weight_update", "/update_weights", "/finish_weight_update", "artd_finish"),
        lambda a, b, d: a.receive(FENCE, b.weights(0).tensors, d),
    ),
    "load_merged": (
        ("artd_load_merged", "artd_finish"),
        lambda a, b, d: a.load_merged(FENCE, b.weights(0).tensors, b.disk(0), d),
    ),
    "finish": (
        ("/update_weight_version", "artd_label", "/reset_prefix_cache"),
        lambda a, b, d: a.finish("toy@0", d),
    ),
    "load_adapter": (("/v1/load_lora_adapter",), lambda a, b, d: a.load_adapter("x", Path("/x"), d)),
    "check_adapter": (
        ("artd_check_adapter",),
        lambda a, b, d: a.check_adapter(Path("/x"), b.weights(0).tensors, d),
    ),
    "unload_adapter": (("/v1/unload_lora_adapter",), lambda a, b, d: a.unload_adapter("x", d)),
    "in_flight": (("/metrics",), lambda a, b, d: a.in_flight("x", d)),
    "score": (("/v1/completions",), lambda a, b, d: a.score("toy", [[1, 2, 3]], d)),
    "warm": (("artd_warm",), lambda a, b, d: a.warm(d)),
    "capture_routes": (("artd_capture_routes",), lambda a, b, d: a.capture_routes(SHAPE, d)),
    "abort_all": (("/abort_requests",), lambda a, b, d: a.abort_all(d)),
    "direct_table": (("artd_direct_table",), lambda a, b, d: a.direct_table(d)),
    "direct_open": (("artd_direct_open",), lambda a, b, d: a.direct_open(Path(__file__), d)),
    "direct_expect": (("artd_direct_expect",), lambda a, b, d: a.direct_expect(Path("/x"), d)),
    "direct_room": (("artd_direct_room",), lambda a, b, d: a.direct_room(d)),
    "direct_stage": (("artd_direct_stage", "artd_direct_staged"), lambda a, b, d: a.direct_stage(FENCE, d)),
    "direct_pull": (("artd_direct_pull",), lambda a, b, d: a.direct_pull(FENCE, d)),
    "direct_swap": (("artd_direct_swap",), lambda a, b, d: a.direct_swap(FENCE, d)),
}
"""Each method that speaks to the server: the calls that it makes, and how it is called."""
GUARDED = ("pause", "resume", "join", "receive", "finish", "load_adapter", "unload_adapter", "abort_all")
"""Those that begin with a route of the server's own, which carries no fence."""
TEXT = ("load_adapter", "unload_adapter")
"""vLLM answers these with a sentence: any text is a success, and what is served is verified by the canary."""
FAULTS = (500, "close", "garbage", "odd", "hang", "drip")


def answers(bench: Bench, fault: Any) -> None:
    """Whichever call of whichever method meets this fault: an EngineError, in time, and the server is none the worse."""
    spawn, limit = bench.engine(), 0.2
    adapter = spawn.adapter()
    if not adapter.capabilities.weight_version or not adapter.capabilities.abort_route:
        raise AssertionError("the table of methods is that of an engine with every route")
    waits = fault in ("hang", "drip")
    for number in range(max(len(routes) for routes, _ in METHODS.values())):
        now = {name: (routes[number], run) for name, (routes, run) in METHODS.items() if number < len(routes)}
        if fault in ("garbage", "odd"):
            now = {name: one for name, one in now.items() if name not in TEXT}
        made = {name: spawn.adapter() for name in now}  # one each: what it has joined or opened is its own
        with spawn.faults({"*": "fine"} | {route: fault for route, _ in now.values()}), ThreadPoolExecutor(24) as pool:
            tried = {name: pool.submit(run, made[name], bench, Deadline(limit)) for name, (_, run) in now.items()}
            for name, call in tried.items():
                try:
                    with refused(kind=EngineTimeout if waits else EngineError, within_s=limit + SLACK_S):
                        call.result()
                except AssertionError as error:
                    raise AssertionError(f"{name}, {now[name][0]}: {error}") from None
    with spawn.faults({"/version": fault}), refused(within_s=limit + SLACK_S):
        spawn.adapter(limit)
    with spawn.faults({"/health": fault}):
        assert not adapter.healthy(Deadline(limit))
    assert adapter.healthy(Deadline(bench.kind.patience_s)) and spawn.serves(bench.served)
