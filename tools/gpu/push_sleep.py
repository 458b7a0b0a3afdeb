"""Pushes into weights that lie in the pool of vLLM's sleep mode; the server is started with it when this item is asked for.

Owner of: no state. Invariants: the spare memory is given back before the engine sleeps (it is no part of the pool); nothing is
pushed while it sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from .push_rig import Line, Rig, apart


def sleep(rig: Rig, _rounds: int) -> Iterator[Line]:
    """No obstacle, equal checksums, the same logprobs; after level 1 the weights are those of before, after level 2 a push makes
    them so."""
    at = rig.engine.rpc("probe_addresses")
    obstacles = rig.engine.rpc("artd_direct_table")["obstacles"]
    yield {"what": "tensors by pool", "pool": rig.engine.rpc("probe_pool"), "obstacles": obstacles}
    rig.prepare(change=False)
    rig.push()
    first = rig.engine.logprobs(rig.prompts)
    for level in (1, 2):
        yield {"what": "pushes over NaN", "before_level": level, **_pushes(rig, first)}
        rig.engine.rpc("artd_direct_drop_spare")
        line = {"what": "asleep", "level": level, "awake_bytes": _used(rig)}
        began = time.perf_counter()
        rig.engine.sleep(level)
        line |= {"sleep_s": time.perf_counter() - began, "asleep_bytes": _used(rig)}
        began = time.perf_counter()
        rig.engine.wake()
        line |= {"wake_s": time.perf_counter() - began, "again_bytes": _used(rig)}
        if level == 1:
            rig.engine.rpc("artd_direct_check")
            line["logprobs"] = apart(first, rig.engine.logprobs(rig.prompts))
        yield line
    yield {"what": "pushes over NaN", "after_level": 2, **_pushes(rig, first)}
    yield {"what": "addresses", "stay": at == rig.engine.rpc("probe_addresses")}


def _pushes(rig: Rig, first: list[float]) -> Line:
    """In place and staged, each over NaN: seconds of both, and how far logprobs are from the first push's."""
    line: Line = {}
    for name, staged in (("in_place", False), ("staged", True)):
        rig.prepare(change=False)
        rig.engine.rpc("probe_spoil")
        line |= {f"{name}_s": rig.push(staged=staged)["total"]}
        line |= {f"{name}_logprobs": apart(first, rig.engine.logprobs(rig.prompts))}
    return line


def _used(rig: Rig) -> int:
    return rig.engine.rpc("probe_held").get("gpu_bytes", 0)
