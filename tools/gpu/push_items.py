"""What `tools.gpu.push` does to a trainer and an engine. Each item yields JSON-like lines.

Owner of: no state. Invariants: the adapter changes before every timed push, its checksums are made as they are when a
checkpoint is staged, and a push counts only when the engine's were equal.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from artd_schema.data.manifest import WeightTable
from artd_schema.wire.direct import EngineTable
from artd_workers.engines.vllm.adapter import rows
from artd_workers.models.codec import peft_names
from artd_workers.transfer.merge import merge

from .held import grown
from .held import held as held_now
from .push_gap import gap, streams
from .push_refusals import refusals
from .push_rig import Line, Rig, apart, over
from .push_sleep import sleep
from .push_trainer import SCALE
from .push_truth import truth


def opened(rig: Rig, _rounds: int) -> Iterator[Line]:
    """The engine's table, the plan, the mappings, the first checksums."""
    began = time.perf_counter()
    table = msgspec.convert(rig.engine.rpc("artd_direct_table"), EngineTable)
    asked = time.perf_counter() - began
    (rig.folder.parent / "artd-table.json").write_bytes(msgspec.json.encode(table))
    size = sum(torch.Size(t.shape).numel() for t in table.tensors) * 2
    yield {
        "tensors": len(table.tensors), "gb": size / 1e9, "moe_backend": table.moe_backend, "table_s": asked,
        "obstacles": [list(msgspec.structs.astuple(o)) for o in table.obstacles][:6],
    }  # fmt: skip
    yield {"what": "trainer", **rig.trainer.open(table, rig.port, rig.folder, **rig.buffers)}
    yield {"what": "engine", **rig.open(rig.trainer.offer)}
    first = rig.prepare()
    yield {"what": "checksums", "first_s": first, "again_s": rig.prepare()}
    vocab = rig.trainer.config["vocab_size"]
    rig.prompts = [[(7 * i + 13 * j) % (vocab - 10) + 5 for j in range(64)] for i in range(8)]


def table(rig: Rig, _rounds: int) -> Iterator[Line]:
    """The engine's table as a file, and a few merged tensors against the merge on the CPU, bit for bit."""
    source = rig.folder.parent / "artd-table.json"
    target = Path(os.environ.get("OUT", str(rig.folder))) / f"table-{rig.trainer.config['num_hidden_layers']}.json"
    shutil.move(source, target)  # the one lies in /tmp, the other may lie on another disk
    weights, live = rig.trainer.merged(), rig.trainer.live
    base = {
        part: tensor for row in rig.trainer.codec.rows if "layers.1." in row.parts[0] and (".0." in row.parts[0] or "attn" in row.parts[0])
        for part, tensor in zip(row.parts, rig.trainer.codec.split(row, rig.trainer.weights[row.megatron]), strict=True)
    }  # fmt: skip
    equal = {}
    for name, weight in base.items():
        a, b = (live.get(n) for n in peft_names(name))
        if a is not None and b is not None:
            found = merge(weight.cpu(), a.cpu(), b.cpu(), SCALE, rig.trainer.dtype)
            equal[name] = torch.equal(found, weights[name].cpu())
    yield {
        "what": "torch on the device against merge() on the CPU",
        "equal": all(equal.values()),
        "tensors": len(equal),
    }


def in_place(rig: Rig, _rounds: int) -> Iterator[Line]:
    """Push A, B, A: logprobs of A again, also after every tensor was NaN; addresses and graphs stay."""
    at = rig.engine.rpc("probe_addresses")
    rig.prepare(change=False)
    yield {"what": "first push", **rig.push()}
    before = rig.engine.logprobs(rig.prompts)
    again = rig.engine.logprobs(rig.prompts)
    rig.engine.rpc("probe_spoil")
    yield {"what": "push over NaN", **rig.push()}
    after = rig.engine.logprobs(rig.prompts)
    kept = rig.trainer.flat.clone()
    rig.trainer.flat.mul_(1.5)
    rig.prepare(change=False)
    rig.push()
    other = rig.engine.logprobs(rig.prompts)
    rig.trainer.flat.copy_(kept)
    rig.prepare(change=False)
    rig.push()
    back = rig.engine.logprobs(rig.prompts)
    yield {
        "what": "logprobs of 128 greedy tokens, largest difference", "same_weights_twice": apart(before, again),
        "after_nan": apart(before, after), "other_adapter": apart(before, other), "back": apart(before, back),
        "addresses_stay": at == rig.engine.rpc("probe_addresses"),
    }  # fmt: skip


def staged(rig: Rig, _rounds: int) -> Iterator[Line]:
    """Pull into spare memory, swap in."""
    for _ in range(3):
        rig.prepare()
        line = rig.push(staged=True)
        yield {"what": "staged", **line, "check": rig.engine.rpc("artd_direct_check")["summed"]}


def stock_road(rig: Rig, _rounds: int) -> Iterator[Line]:
    """Over NaN, vLLM's own loader fills the model from the exported checkpoint: its checksums must be the manifest's."""
    rig.prepare()
    began = time.perf_counter()
    folder = Path("/dev/shm/artd-export") if not rig.tiny else rig.folder / "export"
    rig.trainer.export(folder)
    written = time.perf_counter() - began
    rig.engine.rpc("probe_spoil")
    loaded = rig.engine.rpc("probe_load", str(folder))
    yield {"what": "stock load of the export", "export_s": written, **loaded, **rig.engine.rpc("artd_direct_check")}
    stock = rig.engine.logprobs(rig.prompts)
    if not rig.tiny:
        yield {"what": "artd's load of it, in place", **load(rig, folder), **rig.engine.rpc("artd_direct_check")}
    rig.engine.rpc("probe_spoil")
    rig.push()
    yield {
        "what": "logprobs, direct push against stock load",
        "largest_difference": apart(stock, rig.engine.logprobs(rig.prompts)),
    }


def load(rig: Rig, folder: Path) -> Line:
    """Over NaN, as a push from disk of a checkpoint that holds every weight; seconds."""
    rig.engine.rpc("probe_spoil")
    weights = msgspec.json.decode((rig.folder / "sums.json").read_bytes(), type=WeightTable)
    fence = rig.fence()
    rig.engine.rpc("artd_begin", fence)
    rig.engine.rpc("artd_load_merged", fence, None, str(folder), 1.0, "bfloat16", rows(weights.tensors))
    return rig.engine.rpc("artd_finish", fence)


def repeat(rig: Rig, rounds: int) -> Iterator[Line]:
    """Pushes with a new adapter each, in place and staged: medians, and what is held after push 5 and the last."""
    for way in (False, True):
        lines, held = [], {}
        for number in range(1, rounds + 1):
            rig.prepare()
            line = rig.push(staged=way)
            line["first_token"] = rig.first_token()
            lines.append(line)
            if number in (5, rounds):
                held[number] = {"engine": rig.engine.rpc("probe_held"), "trainer": held_now()}
        more = {side: grown([one[side] for one in held.values()]) for side in ("engine", "trainer")}
        yield {
            "what": "staged" if way else "in place", "rounds": rounds, "median": over(lines, statistics.median),
            "largest": over(lines, max), "smallest": over(lines, min), "held": held, "mapped_more": more,
        }  # fmt: skip


ITEMS: dict[str, Callable[[Rig, int], Iterator[Line]]] = {
    "open": opened, "table": table, "in_place": in_place, "staged": staged, "stock_road": stock_road, "refusals": refusals,
    "repeat": repeat, "streams": streams, "gap": gap, "truth": truth, "sleep": sleep,
}  # fmt: skip
