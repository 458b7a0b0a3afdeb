"""`artd runtime install|list|prune`: runtimes of trainer and engine.

Messages go to stderr, lists to stdout. Exit codes: 0 done, 1 failed, 130 interrupted, 143 terminated.
"""

import argparse
import json
import signal
import sys
from dataclasses import asdict
from types import FrameType

from artd.cli.outcome import shared_options
from artd.runtimes import install, lockfile, prune, registry
from artd_schema.run.engines import ENGINES

from .start import load

SCHEMA = 1


def register(sub: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = sub.add_parser("runtime", help="install, list and prune the trainer's and the engine's runtimes")
    verbs = parser.add_subparsers(dest="runtime_verb", required=True, metavar="VERB")
    engines = sorted({engine.runtime for engine in ENGINES.values()})
    add = verbs.add_parser("install", help="make a runtime from the lock that artd ships; an unchanged one is kept")
    add.add_argument("name", choices=["megatron", *engines], help="megatron for the trainer, another for the engine")
    device = add.add_mutually_exclusive_group()
    device.add_argument("--cpu", dest="device", action="store_const", const="cpu", default="cpu", help="(default)")
    device.add_argument(
        "--cuda", dest="device", action="store_const", const="cuda",
        help="this version ships no lock for it: docs/operations.md, `Training on a GPU`",
    )  # fmt: skip
    add.add_argument("--test-overlay", action="store_true", help="also what tests need beside torch (megatron only)")
    add.add_argument("--index", metavar="URL", help="a further package index")
    add.add_argument("--find-links", metavar="DIR", help="a folder or page with wheels")
    add.add_argument("--python", metavar="PATH", help="interpreter to build from (default: the one that runs artd)")
    add.add_argument("--force", action="store_true", help="make it again even if unchanged")
    add.set_defaults(run=run_install)
    show = verbs.add_parser("list", help="runtimes with their state and versions")
    show.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    show.set_defaults(run=run_list)
    old = verbs.add_parser(
        "prune", help="delete runtimes that nothing uses: of older locks, or incomplete", parents=[shared_options()]
    )
    old.add_argument("--all", action="store_true", dest="everything", help="also those of this artd (to uninstall it)")
    old.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    old.set_defaults(run=run_prune)


class _Terminated(BaseException):
    """SIGTERM as an exception, so that the install cleans up."""


def _on_term(_number: int, _frame: FrameType | None) -> None:
    raise _Terminated


def run_install(args: argparse.Namespace) -> int:
    if args.test_overlay and args.name != "megatron":
        print("error: --test-overlay belongs to megatron. Next: artd runtime install megatron --cpu --test-overlay",
              file=sys.stderr)  # fmt: skip
        return 1
    names = [args.name] + ([lockfile.OVERLAY] if args.test_overlay else [])
    options = install.Options(args.index, args.find_links, args.python, args.force)
    signal.signal(signal.SIGTERM, _on_term)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for name in names:
            runtime = install.install(name, args.device, options)
            shown = {k: v for k, v in runtime.versions.items() if k in _SHOWN}
            print(f"{name}: {runtime.python} ({', '.join(f'{k} {v}' for k, v in shown.items())})")
    except (install.InstallError, lockfile.LockError, registry.RuntimeMissing, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing incomplete is left. Next: run the same command again", file=sys.stderr)
        return 130
    except _Terminated:
        return 143
    return 0


_ENGINES = tuple(package for engine in ENGINES.values() for package in engine.packages)
_SHOWN = ("torch", "megatron-core", "transformers", *_ENGINES, "triton", "numpy", "peft", "pytest")


def run_prune(args: argparse.Namespace) -> int:
    chosen = load(args).runtimes
    rows = prune.prune(args.everything, args.dry_run, [chosen.trainer.python, chosen.engine.python])
    for row in rows:
        word = f"kept ({row.kept})" if row.kept else "would delete" if args.dry_run else "deleted"
        print(f"{word}  {row.path}  {row.size_bytes / 1e9:.2f} GB")
    if not rows:
        print("nothing to delete")
    return 0


def run_list(args: argparse.Namespace) -> int:
    # The overlay is for the project's own tests; a user without it lacks nothing.
    rows = [
        row for row in registry.list_runtimes() if row.state != "missing" or not row.name.startswith(lockfile.OVERLAY)
    ]
    if args.json:
        print(json.dumps({"schema": SCHEMA, "runtimes": [asdict(row) for row in rows]}, indent=1))
        return 0
    for row in rows:
        versions = ", ".join(f"{name} {row.versions[name]}" for name in _SHOWN if name in row.versions)
        size = f"{row.size_bytes / 1e9:.2f} GB" if row.size_bytes else "-"
        print(f"{row.state:9}  {row.name:46}  {size:>8}  {versions}")
        if row.next:
            print(f"           next: {row.next}")
    return 0
