"""`python -m tests.soak [--minutes M] [--kills K] [--real] [--replicas R] [--seed N] [--hits FILE] [--json]`: runs a soak and prints its table
and verdict.

It ends after M minutes (default 10) or K kills, whichever comes first. Exit status 1 when a promise was broken. The hits of
earlier runs in the same file count: their cells are filled already.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import get_args

from artd_schema.run.spec import Mode
from tests.daemon.rig import SPEC, rig

from . import driver, real, table
from .cells import Draw

LEASE_S = 2.0
FAKE_SPEC = SPEC | {"group_size": 3, "groups_per_step": 1, "row_length": 128}


def main() -> int:
    args = parse()
    seed = args.seed if args.seed is not None else random.randrange(1 << 30)
    before = table.read([args.hits]) if args.hits.exists() else []
    draw = Draw(random.Random(seed), table.counts(before), real.COSTS if args.real else None)
    print(f"soak: seed {seed}, hits in {args.hits}", file=sys.stderr, flush=True)
    with args.hits.open("a") as hits, rig() as made:
        if args.real:
            real.prepare(made)
            soak = driver.Soak(made, real.plan(seed, 60 * args.minutes, args.kills, args.mode), draw, hits)
            verdict = soak.run(real.compare)
        else:
            driver.fresh(made, LEASE_S)
            spec = FAKE_SPEC | {"rollout_weights_mode": args.mode, "engine": {"replicas": args.replicas}}
            plan = driver.Plan(seed=seed, seconds=60 * args.minutes, kills=args.kills, lease_s=LEASE_S, spec=spec)
            verdict = driver.Soak(made, plan, draw, hits).run()
        if verdict.found:
            keep(made.root)
    lines = table.read([args.hits])
    print(json.dumps(table.document(lines), indent=2) if args.json else table.text(lines))
    return 1 if verdict.found else 0


def keep(root: Path) -> None:
    """A broken promise is looked into later."""
    kept = Path(tempfile.mkdtemp(prefix="artd-soak-kept."))
    shutil.copytree(root, kept, dirs_exist_ok=True)
    print(f"soak: broken; what is left lies in {kept}", file=sys.stderr)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--mode", choices=get_args(Mode), default="merged", help="how the weights go into the engine")
    parser.add_argument("--replicas", type=int, default=1, help="engines of the run, with fake workers (default 1)")
    parser.add_argument("--real", action="store_true", help="Megatron-Core trains and vLLM serves")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--hits", type=Path, default=Path(tempfile.gettempdir()) / "artd-soak.jsonl")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.minutes and not args.kills:
        args.minutes = 10.0
    return args


if __name__ == "__main__":
    sys.exit(main())
