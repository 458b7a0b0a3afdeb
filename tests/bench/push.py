"""The direct push of 61 GB between two GPUs: `python -m tests.bench.push [--json] [--rounds 50] [--out DIR]`.

Runs `tools.gpu.push` with the 48 layers of Qwen3-30B-A3B's shape, rank-16 adapters on attention and every expert merged on
the way, CUDA graphs on; medians from sending /pause to the reply of /resume, checksums equal every time. Needs two GPUs of
one host and vLLM 0.25.1 on PYTHONPATH (see `tools/gpu/push.py`); `--layers 4 --gpus 1` is the small one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench import gpu_script
from tests.bench.report import Report, parser

GOALS = {"in place": 0.20, "staged": 0.07, "in place, 32 streams, KV kept": 0.25, "staged, 32 streams, KV kept": 0.10}
PHASES = ("pause", "update", "copied", "summed", "compared", "resume", "first_token", "staged")
GAP_S = 0.40
"""With the KV cache kept; computed again: and the prefill of the same tokens."""
HELD_MIB = 2.0


def lines(layers: int, gpus: int, rounds: int, out: Path, scratch: Path) -> list[gpu_script.Line]:
    """What the script says. Kernels that Triton compiled in an earlier run are not ready in this one."""
    words = ["--layers", layers, "--gpus", gpus, "--rounds", rounds, "--items", "repeat,streams,gap"]
    share = ["--share", 0.5 if layers > 8 else 0.4]
    env = os.environ | {"TRITON_CACHE_DIR": str(scratch / "triton")}
    return gpu_script.lines("push", [*words, *share], out, env)


def add(report: Report, line: dict[str, Any], goals: bool) -> None:
    what, median = line["what"], line["median"]
    report.add(f"{what}: pause to resumed", median["total"], "s", GOALS.get(what) if goals else None, "<=")
    for phase in PHASES:
        if phase in median:
            report.add(f"{what}: {phase}", median[phase], "s")
    if "prefill_s" in line:
        report.add(f"{what}: prefill of the same tokens", line["prefill_s"], "s")
    if "gap_largest" in line:
        goal = GAP_S + line.get("prefill_s", 0.0)
        report.add(f"{what}: longest gap of a stream", line["gap_largest"], "s", goal if goals else None, "<=")
    for side in ("engine", "trainer") if "held" in line else ():
        first, last = (held[side] for held in line["held"].values())
        grown = (last["gpu_bytes"] - first["gpu_bytes"]) / 2**20
        report.add(f"{what}: GPU memory grown in the {side}, from push 5 on", grown, "MiB", HELD_MIB, "<=")
        for name in ("descriptors", "mappings"):
            report.add(f"{what}: {name} more in the {side}", last[name] - first[name], "", 0, "<=")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=48)
    options.add_argument("--gpus", type=int, default=2)
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--out", type=Path, default=None, help="keep the script's lines and the server's log here")
    args = options.parse_args()
    report = Report(f"Direct push, {args.layers} layers, {args.gpus} GPU(s)")
    with tempfile.TemporaryDirectory(prefix="artd-bench-") as scratch:
        out = args.out or Path(os.environ.get("OUT", scratch))
        found = lines(args.layers, args.gpus, args.rounds, out, Path(scratch))
    for line in found:
        if "median" in line:
            add(report, line, goals=args.layers == 48 and not line.get("cold"))
        for name, value in line.get("warm", {}).items():
            report.add(f"{line['what']}: {name}", value, "s" if name == "seconds" else "")
    return gpu_script.finish(report, found, args.json)


if __name__ == "__main__":
    sys.exit(main())
