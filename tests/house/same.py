"""Compare this tree with the tree of COMMIT: `python -m tests.house.same COMMIT [--fresh] [--json] [--scratch DIR]`.

The comparison proves that a move of modules changed no behaviour and no durable format. Two small models (a dense one with an adapter and
groups that wait; a mixture of experts with expert replay) get two steps from the old tree. Each tree trains the third step on a copy of
those folders. The new tree also checks and replays what the old one made, and trains the first two from an empty folder.
Until the first release the schema is edited in place, and a tree does not read the folders of another draft: with `--fresh` each tree
only trains two steps from an empty folder, and the lines that differ are read by eye.
The scratch folder stays when something differs. Exit status: 0 the same, 1 something differs, 2 there is no old tree.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.house.compare import CLOCK_METRICS, MAY_DIFFER, compared, differences, step_of
from tests.house.trees import ROOT, Broken, Tree, checkout, make_model

CASES = {"dense": "llama", "moe": "qwen3_moe"}
EVALS = {"eval-1": "open", "eval-2": "open"}
WAITING = {"dense": {"3-0": "sealed", "3-1": "open"} | EVALS, "moe": EVALS}
"""Groups that the old tree leaves untrained; the next step completes those of step 3."""
JOBS = 3
"""Number of jobs of two committed steps: init and two train jobs."""


@dataclass(frozen=True)
class Result:
    """One comparison. `found` holds a line for each difference; `of` says how much the comparison covers."""

    case: str
    what: str
    of: str
    found: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not self.found


class Case:
    """The folders of one model: `base` (old tree, two steps), its copies `old` and `new` (three), `fresh` (new tree alone, two)."""

    def __init__(self, name: str, old: Tree, new: Tree, scratch: Path, fresh: bool = False) -> None:
        self.name, self.old, self.new, self.fresh = name, old, new, fresh
        self.root = scratch / name
        self.model = scratch / f"model-{name}"
        self.told: dict[str, list[dict[str, Any]]] = {}

    def data(self, name: str) -> Path:
        return self.root / name / "data"

    def results(self) -> list[Result]:
        """Return the comparisons up to the first command that fails, which is a difference too."""
        found: list[Result] = []
        try:
            self._compare(found)
        except Broken as error:
            found.append(Result(self.name, "commands", "none may fail", (str(error),)))
        return found

    def _compare(self, found: list[Result]) -> None:
        """Append each comparison to `found`. Raises Broken."""
        make_model(self.new, CASES[self.name], self.model)
        self._train("base", self.old, "make")
        if (waiting := self.told["base"][-1]["waiting"]) != WAITING[self.name]:
            raise Broken(f"{self.name}: {waiting} wait after two steps, not {WAITING[self.name]}")
        if not self.fresh:
            self._go_on(found)
        self._train("fresh", self.new, "make")
        found += [self._checked("fresh"), self._compared("two steps from an empty folder", "base", "fresh")]

    def _go_on(self, found: list[Result]) -> None:
        """Let both trees go on from what the old one made, and append the comparisons. Raises Broken."""
        self._copy("old")
        self._copy("new")
        found += [self._checked("base"), *self._replayed()]
        self._train("old", self.old, "next")
        self._train("new", self.new, "next")
        found += [self._checked("old"), self._checked("new"), self._compared("next step on a copy", "old", "new")]

    def _train(self, name: str, tree: Tree, act: str) -> None:
        say(f"{self.name}: {tree.name} tree, {act} in {self.data(name)}")
        self.data(name).parent.mkdir(parents=True, exist_ok=True)
        self.told[name] = tree.feed(act, self.name, self.data(name), self.model)

    def _copy(self, name: str) -> None:
        """Copy the whole folder, with the old tree's code in it."""
        shutil.copytree(self.data("base"), self.data(name), symlinks=True)

    def _checked(self, name: str) -> Result:
        """Run `artd check --deep` of the new tree."""
        report = self.new.document("artd", "check", "--deep", "--data-dir", self.data(name), codes=(0, 1))
        broken = [f"{c['name']}: {v['what']}: {v['text']}" for c in report["checks"] for v in c["violations"]]
        if report["clean"] != (not broken) or not report["checks"] or not report["deep"]:
            broken.append(f"the document contradicts itself: clean is {report['clean']}")
        return Result(self.name, f"check --deep of {name}", f"{len(report['checks'])} checks", tuple(broken))

    def _replayed(self) -> list[Result]:
        """Run `artd replay-job` of the new tree on each job that the old tree committed."""
        data = self.data("base")
        jobs = self.new.document("artctl", "jobs", "--data-dir", data)["jobs"]
        done = sorted(job["id"] for job in jobs if job["state"] == "succeeded")
        counted = () if len(done) == JOBS else (f"the old tree committed the jobs {done}; {JOBS} were expected",)
        return [
            Result(self.name, "jobs to replay", f"{len(done)} jobs", counted),
            *(self._replay(data, job) for job in done),
        ]

    def _replay(self, data: Path, job: int) -> Result:
        say(f"{self.name}: new tree, replay-job {job}")
        report = self.new.document("artd", "replay-job", str(job), "--data-dir", data, codes=(0, 1))
        rows = report["rows"]
        found = [f"{r['part']}: {r['name']}: {r['committed']} -> {r['replayed']}" for r in rows if r["equal"] is False]
        if report["verdict"] != "equal" or not rows:
            found.append(f"the verdict on {len(rows)} rows is {report['verdict']}")
        return Result(self.name, f"replay-job {job}", f"{len(rows)} rows", tuple(found))

    def _compared(self, what: str, theirs: str, ours: str) -> Result:
        """Compare two folders, and what the daemons told their clients."""
        found = list(differences(self.data(theirs), self.data(ours)))
        old, new = (json.dumps([self._plain(name, step) for step in self.told[name]]) for name in (theirs, ours))
        if old != new:
            found.append(f"the client was told {old}, then {new}")
        files = compared(self.data(ours))
        return Result(self.name, what, f"{files} files, rows, what the client was told", tuple(found))

    def _plain(self, name: str, told: dict[str, Any]) -> dict[str, Any]:
        """Drop the speed, and put a checkpoint's name in place of its sha."""
        if "metrics" not in told:
            return told
        metrics = {key: value for key, value in told["metrics"].items() if key not in CLOCK_METRICS}
        return told | {"metrics": metrics, "checkpoint": step_of(self.data(name), told["checkpoint"])}


def compare(commit: str, scratch: Path, fresh: bool) -> list[Result]:
    """Run every case, all at once: a trainer has one thread. Raises Broken when there is no old tree."""
    say(f"checkout of {commit} in {scratch / 'tree'}")
    old, new = checkout(commit, scratch / "tree"), Tree("new", ROOT)
    old.require_own_code()
    new.require_own_code()
    cases = [Case(name, old, new, scratch, fresh) for name in CASES]
    for case in cases:
        shutil.rmtree(case.root, ignore_errors=True)
    with ThreadPoolExecutor(len(cases)) as pool:
        return [result for found in pool.map(Case.results, cases) for result in found]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def document(commit: str, results: list[Result], seconds: float) -> dict[str, Any]:
    rows = [asdict(result) | {"same": result.same} for result in results]
    same = all(result.same for result in results)
    return {"commit": commit, "same": same, "seconds": round(seconds, 1), "results": rows, "may_differ": MAY_DIFFER}


def tell(results: list[Result], seconds: float) -> None:
    for result in results:
        print(f"{'same' if result.same else 'DIFFERS':8} {result.case:6} {result.what:32} {result.of}")
        for line in result.found[:20]:
            print(f"         {line[:600]}")
        if len(result.found) > 20:
            print(f"         ... {len(result.found)} in all (--json has them)")
    wrong = sum(not result.same for result in results)
    print(f"{len(results)} comparisons in {seconds:.0f} s: {f'{wrong} DIFFER' if wrong else 'all the same'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the old tree")
    parser.add_argument("--fresh", action="store_true", help="compare only what each tree makes from an empty folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="keep checkout and folders there; the checkout is used again"
    )
    args = parser.parse_args()
    scratch = args.scratch.absolute() if args.scratch else Path(tempfile.mkdtemp(prefix="artd-same."))
    scratch.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        results = compare(args.commit, scratch, args.fresh)
    except Broken as error:
        print(f"error: {error}\nnext: look into {scratch}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - started
    if args.json:
        print(json.dumps(document(args.commit, results, seconds), indent=2))
    else:
        tell(results, seconds)
    if not all(result.same for result in results):
        say(f"the folders are kept in {scratch}")
        return 1
    if not args.scratch:
        shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
