"""The adapter conformance suite against vLLM on a GPU: `python -m tools.gpu.conformance [--items ...] [--out DIR] [--tiny]`.

Purpose: every case of tests/conformance on a mixture of experts of 4 layers, trainer's side and engine on one GPU; one JSON
line for each case, appended to DIR/conformance.jsonl. `--tiny`: the same items with vLLM on a CPU, by the installed runtimes,
whose live way is gloo. Owner of: the toy and its checkpoints, in a temporary folder.
Needs vLLM 0.25.1 and this repository's packages on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from artd.supervise import procfs
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import EngineSpec, LoraSpec, Mode, RunSpec
from artd_schema.wire.direct import TABLE
from artd_schema.wire.worker import Push, Transfer
from tests.conformance import methods, pushes
from tests.conformance.bench import Bench
from tests.conformance.real import STEPS, Sender, Vllm, made_as
from tests.conformance.spawn import Flaw, Kind, rendezvous
from tests.conformance.vllm import SPEECH
from tests.engine.real import HERE, ROOT, serving_tool, tool
from tools.gpu import lines

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
PATH = [str(ROOT / part) for part in ("workers", "schema", "")] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
ENV = {"PYTHONPATH": os.pathsep.join(PATH), "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""CUDA's own number of connections, as an engine and a trainer of one process have it; `lines` says otherwise."""
END = time.monotonic() + 540.0
"""Of the script: what is left by then is said, not begun."""
CASES = list(filter(None, os.environ.get("CASES", "").split(",")))
"""Names of the only ones to try: what an earlier run had no time for."""
Cases = list[tuple[str, Callable[[], None]]]


class DirectFeed(Sender):
    """`conformance_trainer.py` on the same GPU."""

    transfer: Transfer = "direct"

    def __init__(self, folder: Path, toys: Path) -> None:
        self.rendezvous = str(rendezvous(folder / "e"))
        self._toys = toys
        words = ("tools.gpu.conformance_trainer", str(toys / "toy"), self.rendezvous, str(folder / "e" / TABLE))
        super().__init__(serving_tool("-m", *words, python=sys.executable, env=ENV))

    def send(self, push: Push, flaw: Flaw = "") -> None:
        order = {"checkpoint": str(self._toys / f"m{push.checkpoint.step}"), "fence": push.fence, "flaw": flaw,
                 "timeout_s": push.drain_s + push.deadline_s}  # fmt: skip
        self.take(order)


class VllmOnGpu:
    """See `spawn.Kind`. The toys are mixtures of experts; that of `lora` has a dense layer between sparse ones, and at step 3 an
    adapter of experts alone."""

    deadline_s = 12.0
    patience_s = 60.0
    tokens = 1500
    workers = True
    ahead = 2
    harness, versions, adapter = Vllm.harness, Vllm.versions, Vllm.adapter

    def __init__(self, folder: Path, way: str) -> None:
        """way: "in_place" or "staged" for live pushes, or "lora"."""
        mode: Mode = "lora" if way == "lora" else "merged"
        self.ways: tuple[str, ...] = () if mode == "lora" else (way,)
        self.routes: RouteShape | None = None
        self.python = self.server = sys.executable
        self.env = ENV
        self._toys, self._prefix = folder, mode[0]
        changes = SHAPE | {"moe_intermediate_size": 128} | ({"mlp_only_layers": [1]} if mode == "lora" else {})
        made = (str(folder / "toy"), "qwen3_moe", json.dumps(changes))
        tool(str(HERE / "make_toy.py"), *made, python=sys.executable, env=ENV)
        wanted = [f"{self.checkpoint(step)}:{made_as(mode, step)}:{step + 1}:{step}:gpu" for step in STEPS]
        tool(str(HERE / "make_checkpoint.py"), str(folder / "toy"), *wanted, python=sys.executable, env=ENV)
        direct = {} if mode == "lora" else {"transfer": way}
        engine = EngineSpec(
            device="cuda", dtype="bfloat16", max_model_len=4096, max_num_seqs=8, kv_cache_mib=512, **direct
        )
        self.spec = RunSpec(
            model=str(folder / "toy"), rollout_weights_mode=mode, lora=LoraSpec(rank=4, alpha=8), engine=engine
        )

    def checkpoint(self, step: int) -> Path:
        return self._toys / f"{self._prefix}{step}"

    def feed(self, folder: Path, way: str) -> DirectFeed:
        return DirectFeed(folder, self._toys)


def kind(folder: Path, way: str, tiny: bool) -> Kind:
    if tiny:
        return Vllm(folder, "lora" if way == "lora" else "merged")
    return VllmOnGpu(folder, way)


def tried(way: str, tiny: bool, cases: Callable[[Bench], Cases]) -> Iterator[dict[str, Any]]:
    """Each case with one bench: how it went. Raises at the end when one was not as it should be."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="artd-k-") as folder:
        began = time.monotonic()
        bench = Bench(kind(Path(folder), way, tiny))
        left = [case for case in cases(bench) if not CASES or case[0] in CASES]
        try:
            spare(bench, len(left))
            bench.engine()
            yield {"case": "a spawn that serves step 0", "seconds": round(time.monotonic() - began, 2)}
            while left:
                name, run = left.pop(0)
                spare(bench, len(left))
                began = time.monotonic()
                if began > END:
                    yield {"case": name, "left_out": "the script's time was over"}
                    continue
                try:
                    run()
                    found = {}
                except Exception as error:
                    bench.drop()
                    wrong += 1
                    found = {"error": f"{type(error).__name__}: {error}"[:3000]}
                yield {"case": name, "ok": not found, "seconds": round(time.monotonic() - began, 2), **found}
        except BaseException:
            strike_all()
            raise
        finally:
            bench.close()
    if wrong:
        raise AssertionError(f"{wrong} cases failed")


def strike_all() -> None:
    """The script's time is up, and `Bench.close` waits for engines that start: end all processes below this one."""
    procfs.strike(procfs.descendants([os.getpid()], procfs.all_stats()), signal.SIGKILL)


def spare(bench: Bench, left: int) -> None:
    """So many cases come: no more engines are started ahead of them."""
    bench.kind.ahead = min(bench.kind.ahead, left)


def of_methods(way: str, cases: tuple[methods.Case, ...]) -> lines.Item:
    return lambda tiny: tried(way, tiny, lambda bench: [(case.__name__, lambda c=case: c(bench)) for case in cases])


def of_pushes(way: str) -> lines.Item:
    """First that a live one is served, then failures that need the engine itself, then those that the relay makes."""

    def item(tiny: bool) -> Iterator[dict[str, Any]]:
        live = "in_place" if way == "disk" else way
        failures = list(pushes.failures(SPEECH, "gloo" if tiny and way in ("in_place", "staged") else way))
        failures.sort(key=pushes.deep, reverse=True)

        def cases(bench: Bench) -> Cases:
            served: Cases = [("live_pushes_are_served", lambda: methods.live_pushes_are_served(bench))]
            failed: Cases = [(str(one), lambda f=one: pushes.fails(bench, f)) for one in failures]
            return (served if way == live and bench.kind.ways else []) + failed

        return tried(live, tiny, cases)

    return item


ITEMS: dict[str, lines.Item] = {
    "methods": of_methods("in_place", methods.MERGED),
    "in_place": of_pushes("in_place"),
    "staged": of_pushes("staged"),
    "disk": of_pushes("disk"),
    "lora_methods": of_methods("lora", methods.LORA),
    "lora": of_pushes("lora"),
}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engines are ended on the way out
    sys.exit(lines.main("conformance", ITEMS))
