"""Checks that every method of `Adapter` does what its docstring says, one function per promise.

`MERGED` and `LORA` are the cases of an engine of that mode, `GLOO` those of that transfer; `answers.py` has the server that
answers wrongly. A case begins with an engine that serves step 0 and is not paused, and leaves it so. Calls go directly to the
server; only `again` asks the harness for a push.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import InFlight
from artd_schema.wire import worker as w
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Adapter, EngineError, Fence
from tests.awake import SOON_S
from tests.fake_daemon import INSTANCE

from .answers import GUARDED, METHODS
from .bench import Bench, fence_of
from .spawn import Spawn, manifest, owner_of, refused

Case = Callable[[Bench], None]
KEEPS: tuple[InFlight, ...] = ("keep", "recompute")
TRIES = 5


class Request(threading.Thread):
    """A completion in flight. ended: why it ended, or the error; looks: how often it was not seen to run yet."""

    def __init__(self, spawn: Spawn, model: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self._what = (spawn, model, tokens)
        self.ended, self.looks, self.seconds = "", 0, 0.0
        self.start()
        while self.is_alive() and not spawn.client.running():
            self.looks += 1
            time.sleep(0.005)

    def __str__(self) -> str:
        return f"{self.ended or 'no answer'} after {self.seconds:.1f} s and {self.looks} looks"

    def run(self) -> None:
        spawn, model, tokens = self._what
        began = time.monotonic()
        try:
            self.ended = spawn.complete(model, tokens)
        except EngineError as error:
            self.ended = str(error)
        self.seconds = time.monotonic() - began

    def end(self) -> str:
        self.join(2 * SOON_S)
        return self.ended


def under_way(spawn: Spawn, tokens: int, model: str = "") -> Request:
    """One that the engine works on; tried again when it was over before this process got to look."""
    over = []
    for _ in range(TRIES):
        if (request := Request(spawn, model or spawn.name(0), tokens)).is_alive():
            return request
        over.append(str(request))
    raise AssertionError(f"a request of {tokens} tokens is too short for this engine: {'; '.join(over)}")


def soon(bench: Bench) -> Deadline:
    return Deadline(bench.kind.patience_s)


def ready(bench: Bench) -> Spawn:
    """The engine as every case wants it: serving step 0."""
    spawn = bench.engine()
    if bench.served:
        again(bench)
    return spawn


def again(bench: Bench) -> None:
    """Step 0 once more, by way of the harness."""
    spawn = bench.engine()
    bench.live(spawn, bench.order(0))
    assert spawn.serves(0)


def paused(spawn: Spawn) -> bool:
    return spawn.client.paused()


# ---- any engine -------------------------------------------------------------------------------------------------------


def is_healthy(bench: Bench) -> None:
    adapter = ready(bench).adapter()
    assert adapter.healthy(soon(bench))


def pause_waits_for_requests(bench: Bench) -> None:
    spawn = ready(bench)
    adapter, request = spawn.adapter(), under_way(spawn, bench.kind.tokens // 2)
    assert adapter.pause(bench.kind.patience_s, soon(bench)) is False
    assert request.end() == "length"
    assert paused(spawn)
    adapter.resume(soon(bench))
    assert not paused(spawn)


def pause_aborts_what_does_not_end(bench: Bench) -> None:
    spawn = ready(bench)
    adapter, request = spawn.adapter(), under_way(spawn, bench.kind.tokens)
    assert adapter.pause(0.1, soon(bench)) is True
    assert request.end() == "abort"
    assert paused(spawn)
    adapter.resume(soon(bench))
    assert spawn.complete(spawn.name(0), 2) == "length", "it generates again"


def pause_without_drain_aborts_at_once(bench: Bench) -> None:
    spawn = ready(bench)
    adapter, request = spawn.adapter(), under_way(spawn, bench.kind.tokens)
    adapter.pause(0.0, soon(bench))
    assert request.end() == "abort"
    adapter.resume(soon(bench))


def pause_lets_requests_go_on(bench: Bench) -> None:
    """With the cache that they have or without; they end as if there had been no pause."""
    spawn = ready(bench)
    adapter = spawn.adapter()
    for in_flight in KEEPS:
        request = under_way(spawn, bench.kind.tokens)
        assert not adapter.pause(0.0, soon(bench), in_flight)
        assert paused(spawn) and request.is_alive()
        adapter.finish("toy@0", soon(bench))
        adapter.resume(soon(bench))
        assert request.end() == "length"
    again(bench)


def abort_all_ends_requests(bench: Bench) -> None:
    spawn = ready(bench)
    adapter, request = spawn.adapter(), under_way(spawn, bench.kind.tokens)
    adapter.abort_all(soon(bench))
    assert request.end() == ("abort" if adapter.capabilities.abort_route else "length")
    assert not paused(spawn)


def scores_are_the_trainers(bench: Bench) -> None:
    """In the order of the prompts, for each token but the first."""
    spawn, canary = ready(bench), manifest(bench.kind.checkpoint(0)).canary
    adapter = spawn.adapter()
    for order in (1, -1):
        found = adapter.score(spawn.name(0), canary.prompts[::order], soon(bench))
        for row, wanted in zip(found, canary.logprobs[::order], strict=True):
            assert [len(row), max(abs(a - b) for a, b in zip(row, wanted, strict=True)) <= canary.max_abs] == [
                len(wanted), True,
            ]  # fmt: skip
    with refused():
        adapter.score("nobody", canary.prompts, soon(bench))


# ---- merged -----------------------------------------------------------------------------------------------------------


def begin_refuses_other_fences(bench: Bench) -> None:
    """An earlier one, another spawn's, another instance's; and any while an update is open."""
    spawn = ready(bench)
    adapter, seen = spawn.adapter(), bench.take_fence(spawn)
    old = Fence(INSTANCE, spawn.number, 1, 1)
    for fence, why in (
        (old, "has seen fence"),
        (Fence(INSTANCE, spawn.number + 1, 10**6, 10**6), "belongs to"),
        (Fence("another", spawn.number, 10**6, 10**6), "belongs to"),
    ):
        with refused(why):
            adapter.begin(fence, soon(bench))
    with refused():
        adapter.load_merged(seen, bench.weights(0).tensors, bench.disk(0), soon(bench))
    again(bench)


def load_merged_brings_a_checkpoint(bench: Bench) -> None:
    """Served once it is finished, labelled where the engine can, and with no prefix of the old weights."""
    spawn = ready(bench)
    adapter, fence = spawn.adapter(), bench.take_fence(spawn)
    prompt = [3 + i * 7 % 1000 for i in range(300)] if bench.kind.workers else [3, 4, 5]
    spawn.complete(spawn.name(0), 2, prompt)
    hits = spawn.client.prefix_hits()
    spawn.complete(spawn.name(0), 2, prompt)
    assert spawn.client.prefix_hits() > hits, "prefixes are cached"
    adapter.pause(0.0, soon(bench))
    adapter.begin(fence, soon(bench))
    figures = adapter.load_merged(fence, bench.weights(2).tensors, bench.disk(2), soon(bench))
    assert figures["bytes"] > 0
    adapter.finish("toy@2", soon(bench))
    adapter.resume(soon(bench))
    hits = spawn.client.prefix_hits()
    spawn.complete(spawn.name(0), 2, prompt)
    assert spawn.client.prefix_hits() == hits, "a prefix of the old weights was found"
    assert spawn.serves(2) and not spawn.serves(0)
    if adapter.capabilities.weight_version:
        assert spawn.client.label() == "toy@2"
    again(bench)


def who_sampled_each_token_is_known(bench: Bench) -> None:
    """Of requests that went on over a change of label, with two choices; of one that waited for its end, and of one that had
    ended before. As the engine's own spans say where it has them; and whose the cache is."""
    if not bench.kind.workers:
        return
    spawn = ready(bench)
    adapter = spawn.adapter()
    for in_flight in KEEPS:
        old, new = f"toy@{in_flight}1", f"toy@{in_flight}2"
        _relabel(adapter, bench, old, "drain")
        client, model = spawn.client, spawn.name(0)
        client.generate(model, "early", 4)
        with ThreadPoolExecutor(2) as pool:
            kept = pool.submit(client.generate, model, "kept", bench.kind.tokens, n=2)
            while client.running() < 2:
                assert not kept.done(), "too short for this engine"
                time.sleep(0.02)
            time.sleep(0.2)
            adapter.pause(0.0, soon(bench), in_flight)
            late = pool.submit(client.generate, model, "late", 4)
            time.sleep(0.2)
            assert not kept.done() and not late.done()
            adapter.finish(new, soon(bench))
            adapter.resume(soon(bench))
            found = {"late#0": late.result()[0], "kept#0": kept.result()[0], "kept#1": kept.result()[1]}
        told = client.sampled("early#0", "never#0", *found)
        assert told.pop("early#0") == {"policy": [[0, old]], "cache": [[0, old]]}
        assert told.pop("late#0") == {"policy": [[0, new]], "cache": [[0, new]]}
        assert told.keys() == found.keys() - {"late#0"}
        for key, one in told.items():
            (first, _), (at, _) = one["policy"]
            assert one["policy"] == [[0, old], [at, new]] and first < at < bench.kind.tokens
            # The last token before the pause is the first input after it.
            assert one["cache"] == ([[0, old], [at - 1, new]] if in_flight == "keep" else [[0, new]])
            if adapter.capabilities.weight_version:
                assert one["policy"] == [[span["start"], span["version"]] for span in found[key]["weight_versions"]]
        assert client.sampled(*found) == {}
    again(bench)


def _relabel(adapter: Adapter, bench: Bench, name: str, in_flight: InFlight) -> None:
    adapter.pause(0.0, soon(bench), in_flight)
    adapter.finish(name, soon(bench))
    adapter.resume(soon(bench))


def live_pushes_are_served(bench: Bench) -> None:
    """By each way, one after the other from the same trainer's side, and again after a push from disk."""
    spawn = ready(bench)
    for way in bench.kind.ways:
        feed = bench.kind.feed(spawn.root, way)
        try:
            for before, step in ((0, 1), (1, 2), (2, 0), (0, 1)):
                push = bench.order(step, feed if step else None)
                if step:
                    feed.send(push)
                bench.live(spawn, push)
                assert spawn.serves(step) and not spawn.serves(before, spawn.name(step))
        finally:
            feed.close()
    again(bench)


def an_update_that_failed_keeps_the_gate_shut(bench: Bench) -> None:
    """Other bytes than the table's: refused, and nothing opens an update any more but a new spawn."""
    spawn = ready(bench)
    adapter, fence = spawn.adapter(), bench.take_fence(spawn)
    first, *others = bench.weights(2).tensors
    known = {"sha256": "0" * 64} if first.sum64 is None else {"sum64": first.sum64 ^ 1}
    odd = msgspec.structs.replace(first, **known)
    adapter.pause(0.0, soon(bench))
    adapter.begin(fence, soon(bench))
    with refused("other bytes"):
        adapter.load_merged(fence, (odd, *others), bench.disk(2), soon(bench))
    with refused("restart the engine"):
        adapter.begin(bench.take_fence(spawn), soon(bench))
    bench.replace(0)


def join_happens_once_for_each_file(bench: Bench) -> None:
    """And again after it failed."""
    spawn = ready(bench)
    adapter, feed = spawn.adapter(), bench.kind.feed(spawn.root, "gloo")
    seen, (met,) = len(spawn.calls()), bench.kind.speech.methods["join"]
    try:
        for step in (1, 2):
            push = bench.order(step, feed)
            fence = fence_of(spawn, push)
            adapter.pause(0.0, soon(bench))
            adapter.begin(fence, soon(bench))
            feed.send(push)
            if step == 1:
                with spawn.faults({met: 500}), refused():
                    adapter.join(feed.rendezvous, soon(bench))
            adapter.join(feed.rendezvous, soon(bench))
            figures = adapter.receive(fence, bench.weights(step).tensors, soon(bench))
            assert figures["bytes"] > 0
            adapter.finish(f"toy@{step}", soon(bench))
            adapter.resume(soon(bench))
            assert spawn.serves(step) and not spawn.serves(3 - step)
    finally:
        feed.close()
    joined = [call for call in spawn.calls()[seen:] if call["route"] == met]
    assert len(joined) == 2, "one that failed, and one for both updates"
    again(bench)


def the_servers_own_routes_obey_their_owner(bench: Bench) -> None:
    """A harness of another spawn or instance, or somebody who says nothing of it, neither pauses nor resumes this engine, nor
    touches its labels, caches, transfers, adapters and requests."""
    spawn = ready(bench)
    request = under_way(spawn, bench.kind.tokens)
    for owner in (owner_of(INSTANCE, spawn.number - 1), owner_of("another", spawn.number), "nobody"):
        other, why = spawn.adapter(owner=owner), "belongs to"
        for name in GUARDED if other.capabilities.abort_route else GUARDED[:-1]:
            with refused(why):
                METHODS[name](other, bench, soon(bench))
        with refused(why):
            spawn.client.relabel(owner)
        assert not paused(spawn)
    assert request.end() == "length"
    assert spawn.serves(0)


def versions_that_are_unknown_are_refused(bench: Bench) -> None:
    """By the adapter as soon as it is made, whatever the server can do; one that is known gets the calls of its row."""
    spawn, speech = ready(bench), bench.kind.speech
    for version in ("9.9.9", "0.1.0+cpu", "0.3", "unknown", ""):
        told = {speech.version: {"say": speech.release(version)}}
        with spawn.faults(told), refused("is not in artd's capability table"):
            spawn.adapter()
    answer, why = speech.stranger
    with spawn.faults({speech.version: {"say": answer}}), refused(why):
        spawn.adapter()
    for row in bench.kind.versions:
        with spawn.faults({speech.version: {"say": speech.release(f"{row.series}.7+odd")}}):
            adapter = spawn.adapter()
        assert adapter.capabilities is row
        seen = len(spawn.calls())
        with spawn.faults({"*": {"say": speech.fine}}):
            adapter.finish("toy@0", soon(bench))
            adapter.abort_all(soon(bench))
        made = [call["route"] for call in spawn.calls()[seen:]]
        for capability, route in speech.optional.items():
            assert (route in made) == getattr(row, capability)


def an_unknown_version_never_gets_ready(bench: Bench) -> None:
    speech = bench.kind.speech
    spawn = bench.spawn(1000, {speech.version: {"say": speech.release("9.9.9")}})
    down = spawn.daemon.received[-1]
    assert isinstance(down, w.Down) and "9.9.9" in down.error
    assert spawn.daemon.wait() == 1
    assert spawn.living() == []


def routes_of_another_shape_are_refused(bench: Bench) -> None:
    """Once an engine captures, it does so in the shape of its model."""
    if (shape := bench.kind.routes) is None:
        return
    adapter = ready(bench).adapter()
    if adapter.capabilities.routes == "hooks":
        odd = RouteShape(layers=shape.layers, topk=shape.topk, experts=shape.experts + 1)
        with refused():
            adapter.capture_routes(odd, soon(bench))


# ---- lora -------------------------------------------------------------------------------------------------------------


def adapters_come_and_go(bench: Bench) -> None:
    """Beside running requests, which go on to their end under a name that is gone."""
    spawn = ready(bench)
    adapter, folder = spawn.adapter(), bench.kind.checkpoint(3)
    adapter.load_adapter("other", folder, soon(bench))
    assert spawn.serves(3, "other") and spawn.serves(0)
    assert not adapter.in_flight("other", soon(bench))
    request = under_way(spawn, bench.kind.tokens, "other")
    assert adapter.in_flight("other", soon(bench))
    assert not adapter.in_flight("nobody", soon(bench))
    adapter.unload_adapter("other", soon(bench))
    assert request.end() == "length"
    with refused("404"):
        spawn.complete("other", 1)
    end = time.monotonic() + SOON_S
    while adapter.in_flight("other", soon(bench)):
        assert time.monotonic() < end
        time.sleep(0.05)
    with refused():
        adapter.unload_adapter("other", soon(bench))


def adapters_are_held_as_committed(bench: Bench) -> None:
    """Of the kinds that there are, the one of step 3 included; and another one's sums are refused."""
    spawn = ready(bench)
    for step in (1, 3, 0):
        bench.live(spawn, bench.order(step))
        assert spawn.serves(step)
    adapter, folder, held = spawn.adapter(), bench.kind.checkpoint(2), bench.weights(2).held
    with refused():
        adapter.check_adapter(folder, held, soon(bench))
    adapter.load_adapter("other", folder, soon(bench))
    assert adapter.check_adapter(folder, held, soon(bench))["tensors"] == len(held) > 0
    with refused():
        adapter.check_adapter(folder, bench.weights(1).held, soon(bench))
    adapter.unload_adapter("other", soon(bench))
    bench.drop()  # it holds every step, and a push that is to fail needs one that it never had


COMMON: tuple[Case, ...] = (
    is_healthy, scores_are_the_trainers, pause_waits_for_requests, pause_aborts_what_does_not_end,
    pause_without_drain_aborts_at_once, abort_all_ends_requests, routes_of_another_shape_are_refused,
    versions_that_are_unknown_are_refused, the_servers_own_routes_obey_their_owner,
)  # fmt: skip
MERGED: tuple[Case, ...] = (
    *COMMON, pause_lets_requests_go_on, who_sampled_each_token_is_known, live_pushes_are_served, begin_refuses_other_fences, load_merged_brings_a_checkpoint,
    an_unknown_version_never_gets_ready, an_update_that_failed_keeps_the_gate_shut,
)  # fmt: skip
GLOO: tuple[Case, ...] = (join_happens_once_for_each_file,)
LORA: tuple[Case, ...] = (*COMMON, adapters_come_and_go, adapters_are_held_as_committed)
