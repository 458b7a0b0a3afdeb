"""LoRA training on one GPU: `python -m tests.bench.train [--json] [--items speed48,sharing,replay] [--out DIR]`.

Runs `tools.gpu.trainer`: 48 layers of Qwen3-30B-A3B's shape in rows of 8,192 tokens; the same trajectories as trees and each with its
own prompt; the same steps with experts live and replayed. Needs one GPU with nothing else on the machine, and Megatron-Core
and Transformer Engine on PYTHONPATH (see `tools/gpu/README.md`); `--tiny` tries it on a CPU, without goals.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench import gpu_script
from tests.bench.report import Report, parser

TOKENS_PER_S = 20_000
SAVED, FILL = 0.8, 0.97
REPLAY_PERCENT = 0.5
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""48 layers leave too little for fragments; nothing here shares its memory."""


def speed(report: Report, line: Mapping[str, Any], goals: bool) -> None:
    what = f"{line['layers']} layers, {line['rows']}"
    goal = TOKENS_PER_S if goals and line["rows"] == "groups of 8" else None
    report.add(f"{what}: physical tokens", line["tokens_per_s"], "tokens/s", goal)
    report.add(f"{what}: model FLOP utilisation", line["mfu"], "")


def sharing(report: Report, line: Mapping[str, Any], goals: bool) -> None:
    what = f"groups of {line['members']}, trees against single sequences"
    report.add(f"{what}: trajectories/s of trees", line["trees_trajectories_per_s"], "1/s")
    report.add(f"{what}: logical ÷ physical tokens", line["logical_by_physical"], "")
    report.add(f"{what}: speed-up", line["speedup"], "")
    report.add(f"{what}: speed-up, share of what is saved", line["share_of_saved"], "", SAVED if goals else None)
    report.add(f"{what}: fill, the lower", min(line["trees_fill"], line["single_fill"]), "", FILL if goals else None)


def replay(report: Report, line: Mapping[str, Any], goals: bool) -> None:
    what, cost = line["what"], line["wall"]
    report.add(f"{what}: rounds", line["rounds"], "")
    report.add(f"{what}: mean", cost["percent"], "%")
    report.add(f"{what}: mean, upper end of 95 %", cost["interval"][1], "%")
    report.add(f"{what}: shift", cost["shift_percent"], "%")
    report.add(
        f"{what}: shift, upper end of 95 %", cost["shift_interval"][1], "%", REPLAY_PERCENT if goals else None, "<="
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--items", default="speed48,sharing,replay", help="names with commas between them")
    options.add_argument("--out", type=Path, default=None, help="keep the script's lines here")
    options.add_argument("--tiny", action="store_true", help="the same on a CPU, in small, to try it")
    args = options.parse_args()
    report = Report("LoRA training on one GPU")
    with tempfile.TemporaryDirectory(prefix="artd-bench-") as scratch:
        words, out = ["--items", args.items, *["--tiny"] * args.tiny], args.out or Path(os.environ.get("OUT", scratch))
        found = gpu_script.lines("trainer", words, out, ALLOCATOR | os.environ)
    for key, add in {"mfu": speed, "share_of_saved": sharing, "wall": replay}.items():
        for line in found:
            if key in line:
                add(report, line, not args.tiny)
    return gpu_script.finish(report, found, args.json, failure="error")


if __name__ == "__main__":
    sys.exit(main())
