"""`artd doctor`: what is here, what is missing, what to type.

Owner: runtimes. Exit codes: 0 nothing missing, 1 something missing. `--json` prints {schema, ok, findings}.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from artd.runtimes import doctor
from artd_schema.paths import data_dir

SCHEMA = 1


def register(sub: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = sub.add_parser("doctor", help="what this machine has and lacks for artd")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=None,
        help="the daemon's folder (default: $ARTD_DATA_DIR, else $XDG_DATA_HOME/artd/data)",
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = doctor.report(data_dir(args.data_dir))
    ok = all(finding.state != "missing" for finding in findings)
    if args.json:
        print(json.dumps({"schema": SCHEMA, "ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=1))
        return 0 if ok else 1
    for finding in findings:
        print(f"{finding.state:8} {finding.name}: {finding.value}")
        if finding.next:
            print(f"         next: {finding.next}")
    return 0 if ok else 1
