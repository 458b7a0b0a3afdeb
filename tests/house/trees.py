"""Run a tree of artd, old or new, as its user does: its commands, its interpreter with `artd_client`, a daemon on a folder.

This process imports nothing of a tree. Every command runs without settings of artd and without PYTHONPATH, so that a tree runs its own
code with the machine's runtimes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 600
WHERE = "import artd, artd_client, artd_schema, artd_workers as w; print(artd.__file__, artd_client.__file__, artd_schema.__path__[0], w.__path__[0])"


class Broken(Exception):
    """A command of a tree failed; the text has its words."""


@dataclass(frozen=True)
class Tree:
    """name: old or new; root: its checkout, which has a .venv."""

    name: str
    root: Path

    def tool(self, name: str) -> Path:
        return self.root / ".venv" / "bin" / name

    def answer(self, *command: str | Path, codes: tuple[int, ...] = (0,)) -> str:
        """Return the stdout of a command. Raises Broken when its exit status is not in `codes`, or it fails without an answer."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(("ARTD_", "PYTHON"))}
        words = " ".join(map(str, command))
        try:
            # "/": so that no stray module of a checkout is found.
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd="/", env=env
            )
        except subprocess.TimeoutExpired:
            raise Broken(f"{self.name} tree: {words} did not end within {LIMIT_S} s") from None
        if done.returncode not in codes or (done.returncode and not done.stdout):
            said = done.stdout[-4000:] + done.stderr[-4000:]
            raise Broken(f"{self.name} tree: {words} ended with {done.returncode}:\n{said}")
        return done.stdout

    def document(self, name: str, *words: str | Path, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """Return the document that a command of artd prints with --json."""
        return dict(json.loads(self.answer(self.tool(name), *words, "--json", codes=codes)))

    def require_own_code(self) -> None:
        """Check whose packages the interpreter imports. Raises Broken when they are another tree's packages: a tree would be compared with itself."""
        found = self.answer(self.tool("python"), "-I", "-c", WHERE).split()
        if strangers := [path for path in found if not Path(path).resolve().is_relative_to(self.root.resolve())]:
            raise Broken(
                f"{self.name} tree {self.root}: its .venv imports {strangers[0]}. Next: make venv in {self.root}"
            )

    @contextlib.contextmanager
    def daemon(self, data: Path) -> Iterator[None]:
        """Run a daemon on `data` with the real trainer and the scripted engine of this tree's tests: rollouts come by value."""
        where = ("--data-dir", data, "--config", self._config(data))
        self.answer(self.tool("artd"), "start", "--detach", *where)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Broken):
                self.answer(self.tool("artd"), "stop", "--drain", "0", *where)
            raise
        self.answer(self.tool("artd"), "stop", *where)

    def _config(self, data: Path) -> Path:
        """Write an artd.toml beside `data`, and the stand-in for the engine's interpreter that it names."""
        wrapper, config = data.with_name(f"{data.name}-engine"), data.with_name(f"{data.name}.toml")
        fake = self.root / "tests" / "fakes" / "engine.py"
        script = f'ARTD_FAKE_SCRIPT="{data}-script.json" exec "{self.tool("python")}" "{fake}"'
        wrapper.write_text(f"#!/bin/sh\n{script}\n")
        wrapper.chmod(0o755)
        config.write_text(f'[runtimes.engine]\npython = "{wrapper}"\npythonpath = ["{self.root}"]\n')
        return config

    def feed(self, act: str, case: str, data: Path, model: Path) -> list[dict[str, Any]]:
        """Start a daemon, let feed.py act as its client, and stop the daemon. Returns what feed.py prints."""
        with self.daemon(data):
            return list(json.loads(self.answer(self.tool("python"), "-I", HERE / "feed.py", act, case, data, model)))


def checkout(commit: str, target: Path) -> Tree:
    """Clone this repository at a commit and make its .venv; reuse a clone that is there. Raises Broken."""
    sha = _run("git", "-C", ROOT, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    if not target.exists():
        _run("git", "clone", "-q", "--shared", "--no-checkout", ROOT, target)
    _run("git", "-C", target, "checkout", "-q", "--detach", sha)
    _run("make", "-C", target, "venv", f"PYTHON={ROOT / '.venv/bin/python'}")
    return Tree("old", target)


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Broken(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def make_model(new: Tree, family: str, target: Path) -> Path:
    """Make a small random model of tests/toys.py with the trainer's interpreter, once for both trees. Raises Broken."""
    if not target.exists():
        found = new.document("artd", "runtime", "list")["runtimes"]
        python = next(
            (
                Path(r["path"]) / "bin/python"
                for r in found
                if r["state"] == "ready" and r["name"].startswith("megatron-cpu-")
            ),
            None,
        )
        if python is None:
            raise Broken("there is no megatron runtime for the CPU. Next: make runtimes")
        new.answer(python, ROOT / "tests" / "toys.py", target, "--family", family, "--seed", "3")
    return target
