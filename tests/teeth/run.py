"""`python -m tests.teeth.run [NAME ...] [--json]`: plants bugs one by one and asks the tests that guard against them.

Each bug is a change of one place in a copy of the tree; the named test must be green without it, and red with it for the reason that the
bug names. Owner of:
the copy, a temporary folder. Invariants: the checkout itself is never changed; a place that is not found exactly once is an
error, so that a bug cannot stop being planted unnoticed. Exit status: 0 when every bug was caught.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from artd.runtimes import lockfile, registry
from tests.teeth.bugs.all_bugs import BUGS
from tests.teeth.bugs.bug import Bug

ROOT = Path(__file__).parents[2]
TREE = ("artd", "schema", "client", "workers", "tests", "tools", "examples", "docs", "pyproject.toml", "Makefile")
LIMIT_S = 200
RUN = "import os, sys, pytest; sys.argv[0] = 'pytest'; code = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(code)"
"""pytest that does not wait for the threads which a red test left behind."""


Verdict = Literal["caught", "missed", "otherwise", "unusable"]


@dataclass(frozen=True)
class Result:
    """verdict: caught; missed (the test stayed green); otherwise (red, and not for the reason that the bug names); or unusable (the
    test is red without the bug, or did not run)."""

    bug: str
    test: str
    verdict: Verdict
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs of tests/teeth/bugs; none = all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if unknown := set(args.names) - {bug.name for bug in BUGS}:
        parser.error(f"there is no bug {', '.join(sorted(unknown))}; there are {', '.join(bug.name for bug in BUGS)}")
    chosen = [bug for bug in BUGS if not args.names or bug.name in args.names]
    with tempfile.TemporaryDirectory(prefix="artd-teeth.") as folder:
        results = [tried(bug, Path(folder)) for bug in chosen]
    caught = sum(result.verdict == "caught" for result in results)
    if args.json:
        print(json.dumps({"caught": caught, "bugs": [asdict(result) for result in results]}, indent=2))
    else:
        print(f"{caught} of {len(results)} planted bugs were caught")
    return 0 if caught == len(results) else 1


def tried(bug: Bug, folder: Path) -> Result:
    """Ask the bug's test without it, then with it."""
    started, tree = time.monotonic(), folder / bug.name
    copy(tree)
    verdict: Verdict = "unusable"
    if ask(tree, bug)[0] == 0:
        plant(tree, bug)
        status, said = ask(tree, bug)
        why = errors(said)
        verdict = "missed" if status != 1 else "caught" if re.search(bug.says, why) else "otherwise"
        if verdict == "otherwise":
            print(why, file=sys.stderr)
    shutil.rmtree(tree)
    result = Result(bug.name, bug.test, verdict, round(time.monotonic() - started, 1))
    print(f"{verdict:<9} {bug.name:<28} {result.seconds:>6.1f} s  {bug.test}", file=sys.stderr, flush=True)
    return result


def copy(tree: Path) -> None:
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            tree.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tree)


def plant(tree: Path, bug: Bug) -> None:
    path = tree / bug.file
    text = path.read_text()
    if (count := text.count(bug.good)) != 1:
        raise SystemExit(
            f"bug {bug.name}: its place is {count} times in {bug.file}, not once: mend it in tests/teeth/bugs"
        )
    path.write_text(text.replace(bug.good, bug.bad))


def ask(tree: Path, bug: Bug) -> tuple[int, str]:
    """pytest's exit status, 0 green, 1 red, anything else no answer; and what it printed."""
    python, path = interpreter(bug)
    env = os.environ | {
        "PYTHONPATH": ":".join([*(str(tree / name) for name in ("", "schema", "client", "workers")), *path])
    }
    env |= {"ARTD_TEETH": "1", "PYTHONDONTWRITEBYTECODE": ""}
    command = [python, "-c", RUN, "-x", "-q", "-p", "no:cacheprovider", *bug.test.split()]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"{bug.test} did not end within {LIMIT_S} s", file=sys.stderr)
        return -1, ""
    if done.returncode not in (0, 1):
        print(done.stdout[-2000:] + done.stderr[-2000:], file=sys.stderr)
    return done.returncode, done.stdout


def errors(said: str) -> str:
    """The lines of a red test in which pytest says why."""
    return "\n".join(line for line in said.splitlines() if line.startswith(("E  ", "FAILED", "ERROR")))


def interpreter(bug: Bug) -> tuple[str, list[str]]:
    """(python, further PYTHONPATH): the trainer's tests need its runtime and the test overlay."""
    if not bug.torch:
        return sys.executable, []
    overlay = registry.find(lockfile.OVERLAY)
    return str(overlay.python), overlay.site_paths


if __name__ == "__main__":
    sys.exit(main())
