"""A direct push as the harness drives it, against a scripted server: the order of its calls, and what each failure does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from artd_schema.run.spec import EngineSpec, RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.direct import OFFER, TABLE, EngineTable, EngineTensor, Obstacle
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import EngineError, Fence, capabilities
from artd_workers.engines.push import Pusher, PushError, Stale
from artd_workers.engines.transfers import table_of, transfers_of
from artd_workers.engines.vllm import guard
from artd_workers.engines.vllm.versions import VERSIONS
from tests.engine.conftest import Bench
from tests.fake_daemon import INSTANCE, SPAWN

OPEN = ["artd_direct_open", "artd_direct_expect"]
STAGE = ["artd_direct_stage", "artd_direct_staged", "artd_direct_staged"]
AFTER = ["/update_weight_version", "artd_label", "/reset_prefix_cache", "/resume", "/v1/completions"]


def direct(bench: Bench, step: int, trainer: int = 1, offered: bool = True, **changes: Any) -> w.Push:
    """A push of the pair with this spawn of the trainer, whose offer lies there."""
    folder = bench.root / f"direct-{trainer}"
    folder.mkdir(exist_ok=True)
    if offered:
        (folder / OFFER).touch()
    values = {"source": "live", "transfer": "direct", "rendezvous": str(folder), "deadline_s": 30.0}
    return bench.push(step, **values | changes)


@pytest.mark.parametrize(
    ("transfer", "room", "calls"),
    [
        ("in_place", True, ["/pause", "artd_direct_pull"]),
        ("auto", False, ["artd_direct_room", "/pause", "artd_direct_pull"]),
        ("auto", True, ["artd_direct_room", *STAGE, "/pause", "artd_direct_swap"]),
        ("staged", False, [*STAGE, "/pause", "artd_direct_swap"]),
        ("nccl", False, ["artd_direct_room", "/pause", "artd_direct_pull"]),
        ("nccl", True, ["artd_direct_room", *STAGE, "/pause", "artd_direct_swap"]),
    ],
)
def test_calls_and_phases_in_order(bench: Bench, transfer: str, room: bool, calls: list[str]) -> None:
    bench.engine, bench.script = {"transfer": transfer}, {"room": room}
    with bench.serve() as pusher:
        way = "nccl" if transfer == "nccl" else "direct"
        live = pusher.run(direct(bench, 0, transfer=way))
        again = pusher.run(direct(bench, 1, transfer=way))
    assert bench.routes() == ["/version", *OPEN, *calls, *AFTER, OPEN[1], *calls, *AFTER]
    phases = [
        "open",
        *(["stage"] if calls[-1].endswith("swap") else []),
        "hold",
        "pause",
        "transfer",
        "load",
        "resume",
        "verify",
    ]
    assert list(live.seconds) == list(again.seconds) == phases
    assert live.max_abs == 0.0
    waited = [
        call["body"]["kwargs"].get("timeout_s")
        for call in bench.calls()
        if call["route"] in ("artd_direct_pull", STAGE[0])
    ]
    assert waited and all(0 < seconds <= 30.0 for seconds in waited), "a call that waits takes its own time-out"


@pytest.mark.parametrize(
    ("version", "way", "kept"),
    [("0.25.1", "direct", True), ("0.25.1", "nccl", True), ("0.25.1", "disk", False)],
)
def test_a_canary_does_not_wait_beside_requests_that_went_on(bench: Bench, version: str, way: str, kept: bool) -> None:
    """Their push is verified by its checksums; the gateway would wait with the canary."""
    bench.engine, bench.script = {"transfer": "in_place", "in_flight": "keep"}, {"version": version}
    changes = {"source": "disk"} if way == "disk" else {"transfer": way}
    with bench.serve() as pusher:
        live = pusher.run(direct(bench, 0, **changes))
    assert ("/v1/completions" in bench.routes(), "verify" in live.seconds) == (not kept, not kept)
    assert (live.max_abs, live.mean_abs) == ((None, None) if kept else (0.0, 0.0))


def test_an_offer_is_opened_once_for_each_pair(bench: Bench) -> None:
    with bench.serve() as pusher:
        for trainer in (1, 1, 2, 2, 1):
            pusher.run(direct(bench, 0, trainer))
    opened = [Path(call["body"]["kwargs"]["offer"]) for call in bench.calls() if call["route"] == OPEN[0]]
    assert [path.parent.name for path in opened] == ["direct-1", "direct-2", "direct-1"]


def test_what_has_no_fence_says_whose_it_is(bench: Bench) -> None:
    with bench.serve() as pusher:
        pusher.run(direct(bench, 0))
    owners = {call["route"]: call["body"]["kwargs"]["owner"] for call in bench.calls() if call["route"] in OPEN}
    assert owners == dict.fromkeys(OPEN, guard.owner(INSTANCE, SPAWN))


def test_pushes_from_disk_and_directly_take_turns(bench: Bench) -> None:
    with bench.serve() as pusher:
        for step, source in enumerate(("disk", "live", "disk", "live")):
            pusher.run(direct(bench, step, source=source))
    assert bench.routes().count("artd_load_merged") == bench.routes().count("artd_direct_swap") == 2


@pytest.mark.parametrize(
    ("route", "phase"),
    [
        ("direct_open", "open"),
        ("direct_expect", "open"),
        ("direct_room", "open"),
        ("direct_stage", "stage"),
        ("hold", "hold"),
        ("pause", "pause"),
        ("direct_swap", "transfer"),
        ("direct_pull", "transfer"),
        ("finish", "load"),
        ("resume", "resume"),
        ("score", "verify"),
    ],
)
def test_every_call_can_fail(bench: Bench, route: str, phase: str) -> None:
    bench.prepare()
    adapter = Failing(route, room=route != "direct_pull")
    pusher = Pusher(adapter, bench.config.spec, "toy", bench.root, "i", 1, adapter.hold)
    with pytest.raises(PushError, match="no such luck") as failed:
        pusher.run(direct(bench, 0))
    assert failed.value.phase == phase
    assert adapter.calls[-1] == route, "nothing is called after it"


class Failing:
    """An adapter on which one call fails."""

    def __init__(self, route: str, room: bool) -> None:
        self._route, self._room = route, room
        self.capabilities = capabilities(VERSIONS, "0.25.1")
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def made(*_: Any) -> Any:
            self.calls.append(name)
            if name == self._route:
                raise EngineError("no such luck")
            return self._room if name == "direct_room" else {}

        return made


@pytest.mark.parametrize("route", ["artd_direct_staged", "artd_direct_swap"])
def test_a_wait_ends_at_its_deadline(bench: Bench, route: str) -> None:
    bench.script = {"faults": {route: "hang"}}
    with bench.serve() as pusher, pytest.raises(PushError, match=route):
        pusher.run(direct(bench, 0, deadline_s=0.3))


def test_a_trainer_that_offers_nothing_ends_the_push_before_the_pause(bench: Bench) -> None:
    with bench.serve() as pusher, pytest.raises(PushError, match="left no offer") as failed:
        pusher.run(direct(bench, 0, offered=False, deadline_s=0.2))
    assert failed.value.phase == "open"
    assert bench.routes() == ["/version"]


def test_an_offer_that_could_not_be_opened_is_tried_again(bench: Bench) -> None:
    bench.script = {"faults": {OPEN[0]: 500}}
    with bench.serve() as pusher:
        for step in range(2):
            with pytest.raises(PushError):
                pusher.run(direct(bench, step))
    assert bench.routes() == ["/version", OPEN[0], OPEN[0]]


def test_an_old_fence_is_refused_here_and_in_the_engine(bench: Bench) -> None:
    with bench.serve() as pusher:
        pusher.run(direct(bench, 1, fence=7))
        seen = bench.routes()
        with pytest.raises(Stale):
            pusher.run(direct(bench, 2, fence=7))
        assert bench.routes() == seen
        pusher._seen = -1  # as that of a harness that was stopped before
        with pytest.raises(PushError, match="has seen fence 7") as failed:
            pusher.run(direct(bench, 3, fence=6))
        assert failed.value.phase == "stage"
        adapter, old = pusher._adapter, Fence(INSTANCE, SPAWN, 3, 6)
        adapter.pause(0.0, Deadline(5))
        for call in (adapter.direct_pull, adapter.direct_swap):
            with pytest.raises(EngineError, match="has seen fence 7"):
                call(old, Deadline(5))


TENSOR = EngineTensor("model.norm.weight", "bfloat16", (8,), (1,), "RMSNorm", 0, 0)
PLAIN = EngineTable(engine="vllm", version="0.25.1", moe_backend="", tensors=(TENSOR,))
ODD = msgspec.structs.replace(PLAIN, obstacles=(Obstacle("model.layers.3", "MLA"), Obstacle("quantization", "'fp8'")))


@pytest.mark.parametrize(
    ("device", "transfer", "table", "own", "ways", "obstacle"),
    [
        ("cuda", "auto", PLAIN, True, ("direct", "nccl", "stock"), ""),
        ("cuda", "in_place", PLAIN, True, ("direct", "nccl", "stock"), ""),
        ("cuda", "auto", PLAIN, False, ("direct", "nccl"), ""),
        ("cuda", "nccl", PLAIN, True, ("nccl", "stock"), ""),
        ("cuda", "stock", PLAIN, True, ("stock",), ""),
        ("cuda", "stock", PLAIN, False, (), "vllm 0.25.1 takes no push by its own calls from artd"),
        ("cuda", "auto", ODD, True, ("stock",), "model.layers.3: MLA (and 1 more)"),
        ("cuda", "auto", ODD, False, (), "model.layers.3: MLA (and 1 more)"),
        ("cpu", "auto", PLAIN, True, ("gloo",), ""),
    ],
)
def test_the_ways_of_an_engine(
    tmp_path: Path, device: Any, transfer: Any, table: EngineTable, own: bool, ways: tuple[str, ...], obstacle: str
) -> None:
    adapter: Any = SimpleNamespace(direct_table=lambda deadline: table)
    spec = RunSpec(model="/m", engine=EngineSpec(transfer=transfer))
    assert transfers_of(spec, table_of(adapter, spec, device, tmp_path), own) == (ways, obstacle)
    if device == "cpu":
        assert list(tmp_path.iterdir()) == []
    else:
        assert [path.name for path in tmp_path.iterdir()] == [TABLE]
        assert msgspec.msgpack.decode((tmp_path / TABLE).read_bytes(), type=EngineTable) == table


def test_a_harness_says_how_it_can_be_pushed_to(bench: Bench) -> None:
    bench.engine, bench.script = {"device": "cuda"}, {"version": "0.25.1", "table": msgspec.to_builtins(PLAIN)}
    with bench.start() as daemon:
        ready = daemon.expect(w.Ready)
        assert (ready.transfers, ready.obstacle) == (("direct", "nccl", "stock"), "")
        assert (Path(bench.config.dir) / TABLE).is_file()
        daemon.send(direct(bench, 0))
        assert daemon.expect(w.Live).fence == 1


def test_an_engine_that_gives_no_table_does_not_get_ready(bench: Bench) -> None:
    bench.engine, bench.script = {"device": "cuda"}, {"version": "0.25.1", "table": {"tensors": 3}}
    with bench.start() as daemon:
        assert "is not a table" in daemon.expect(w.Down).error
