"""`artd doctor`: says what is here, what is missing, and what to type.

`--json` prints {schema, ok, findings}. Exit codes: 0 nothing missing, 1 something missing, 2 artd.toml cannot be used.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from artd.cli.outcome import shared_options
from artd.config import Settings
from artd.runtimes import doctor
from artd.runtimes.own import Own
from artd_schema.run.engines import DEFAULT, ENGINES

from .start import load

SCHEMA = 1


def register(sub: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = sub.add_parser("doctor", help="what this machine has and lacks for artd", parents=[shared_options()])
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = load(args)
    findings = doctor.report(Path(settings.data_dir), _owns(settings))
    ok = all(finding.state != "missing" for finding in findings)
    if args.json:
        print(json.dumps({"schema": SCHEMA, "ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=1))
        return 0 if ok else 1
    for finding in findings:
        print(f"{finding.state:8} {finding.name}: {finding.value}")
        if finding.next:
            print(f"         next: {finding.next}")
    return 0 if ok else 1


def _owns(settings: Settings) -> list[Own]:
    """Return the interpreters that the settings name in place of a runtime. The engine's is checked for the default kind of
    engine."""
    owns = []
    for worker, runtime in (("trainer", "megatron"), ("engine", ENGINES[DEFAULT].runtime)):
        chosen = getattr(settings.runtimes, worker)
        if chosen.python:
            gpus = getattr(settings.gpus, worker)
            owns.append(Own(worker, runtime, chosen.python, chosen.pythonpath, gpus))
    return owns
