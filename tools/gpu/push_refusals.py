"""Wrong pushes, each of which the engine must refuse. Owner of: no state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import torch
from msgspec.structs import replace

from artd_schema.wire.direct import Offer, Run, Unit

from .push_rig import TIMEOUT_S, Line, Rig

EXCHANGED = {
    True: (
        ("two experts", "{a}.mlp.experts.2.down", "{a}.mlp.experts.5.down"),
        ("gate and up", "{a}.mlp.experts.3.gate", "{a}.mlp.experts.3.up"),
    ),
    False: (("two layers' o", "{a}.self_attn.o", "{b}.self_attn.o"), ("gate and up", "{a}.mlp.gate", "{a}.mlp.up")),
}
"""With experts, and without; a and b: layers in which no buffer's end cuts them."""


def refusals(rig: Rig, _rounds: int) -> Iterator[Line]:
    """Each wrong push is refused; then a right one is taken."""
    offer = rig.trainer.offer
    rig.prepare()
    weight = rig.trainer.weights["decoder.layers.1.self_attention.linear_proj.weight"].view(-1).view(torch.uint8)
    weight[4321] ^= 1
    stale = rig.folder / "sums.json"
    fence = rig.fence()
    feed = rig.feed(fence["fence"])
    line: Line = {"what": "one flipped bit behind the staging", "refused": False}
    try:
        rig.engine.rpc("artd_direct_expect", str(stale))
        rig.engine.pause()
        rig.engine.rpc("artd_direct_pull", fence, TIMEOUT_S)
    except Exception as error:
        line |= {"refused": True, "error": str(error)[-400:]}
    feed.join()
    rig.engine.resume()
    weight[4321] ^= 1
    yield line
    yield {"what": "the next push after it", **error_of(lambda: rig.engine.rpc("artd_direct_pull", rig.fence(), 1.0))}
    rig.engine.rpc("probe_forgive")
    for what, first, second in EXCHANGED["num_experts" in rig.trainer.config]:
        yield refused(rig, f"{what} exchanged", exchanged(offer, *whole(offer, first, second)))
    gone = next(run for run in runs_of(offer) if run.first)
    yield {
        "what": "one range left out",
        **error_of(lambda: rig.open(changed(offer, lambda r: None if r == gone else r))),
    }
    yield {"what": "a fence of before", **error_of(lambda: (rig.open(offer), rig.engine.rpc("artd_direct_pull", rig.fence() | {"fence": 1}, 1.0)))}  # fmt: skip
    rig.prepare()
    yield {"what": "a right push", **rig.push()}


def refused(rig: Rig, what: str, offer: Offer) -> Line:
    """A push that must fail; how it did."""
    line: Line = {"what": what, "refused": False}
    feed = None
    try:
        rig.open(offer)
        rig.prepare(change=False)
        fence = rig.fence()
        feed = rig.feed(fence["fence"])
        rig.engine.pause()
        rig.engine.rpc("artd_direct_pull", fence, TIMEOUT_S)
    except Exception as error:
        line |= {"refused": True, "error": str(error)[-400:]}
    finally:
        if feed is not None:
            feed.join()
        rig.engine.rpc("probe_forgive")
        rig.engine.resume()
    return line


def runs_of(offer: Offer) -> Iterator[Run]:
    return (run for feed in offer.feeds for unit in feed.units for run in unit.runs)


def changed(offer: Offer, edit: Callable[[Run], Run | None]) -> Offer:
    def through(unit: Unit) -> Unit:
        return replace(unit, runs=tuple(new for run in unit.runs if (new := edit(run)) is not None))

    feeds = (replace(feed, units=tuple(map(through, feed.units))) for feed in offer.feeds)
    return replace(offer, feeds=tuple(feeds))


def whole(offer: Offer, *names: str) -> list[str]:
    """These two parts in the first layers in which each has one run."""
    runs = Counter(run.part for run in runs_of(offer))
    alone = {offer.parts[part] for part, count in runs.items() if count == 1}
    for a, b in permutations(range(1, 1 + max(int(part.split(".")[2]) for part in alone if ".layers." in part)), 2):
        found = [f"model.layers.{name.format(a=a, b=b)}_proj.weight" for name in names]
        if alone >= set(found):
            return found
    raise LookupError(f"buffers cut {names} in every layer")


def exchanged(offer: Offer, first: str, second: str) -> Offer:
    """Each of two parts of equal size comes from where the other lies (both have one run each)."""
    i, j = offer.parts.index(first), offer.parts.index(second)
    runs = [run for run in runs_of(offer) if run.part in (i, j)]
    place = {run.part: run for run in runs}
    assert len(runs) == len(place) == 2
    other = {i: j, j: i}

    def edit(run: Run) -> Run:
        if run.part not in other:
            return run
        to = place[other[run.part]]
        return replace(run, tensor=to.tensor, at=to.at, part=to.part)

    return changed(offer, edit)


def error_of(call: Callable[[], Any]) -> Line:
    """Whether a call was refused, and with which words."""
    try:
        call()
    except Exception as error:
        return {"refused": True, "error": str(error)[-400:]}
    return {"refused": False}
