"""Checks interpreters of the user's own: runs each once and reports what a worker would find there.

The daemon's side imports none of their packages: `artd_workers.probe` runs in their processes, with the PYTHONPATH and the GPUs
of the worker. No process outlives `findings`.
"""

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artd.supervise.code import install_code
from artd.supervise.environment import filter_environment
from artd_schema.run.engines import ENGINES, EngineKind

from . import pip
from .finding import Finding

DEADLINE_S = 60.0
OLDEST = (3, 11)
GUIDE = "docs/operations.md, Training on a GPU, has versions that were seen running"
_PACKAGES = {
    "megatron.core": "megatron-core",
    "zmq": "pyzmq",
    "transformer_engine.pytorch": "transformer-engine[core-cu13,pytorch]",
}
_NVIDIA = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Own:
    """An interpreter that artd.toml names. `worker`: trainer or engine; `runtime`: which runtime it replaces; `gpus`: those of
    artd.toml."""

    worker: str
    runtime: str
    python: str
    pythonpath: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The result of a probe. `said` is its JSON, None if there is none; then `error` says why. `late` says that the
    probe was still running."""

    said: dict[str, Any] | None
    error: str = ""
    late: bool = False


def findings(owns: Sequence[Own], deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Return one finding for each interpreter, in their order. The probes run at the same time."""
    there = [own for own in owns if shutil.which(own.python)]
    answers = dict(zip(there, _ask(there, deadline_s), strict=True)) if there else {}
    return [_finding(own, answers[own]) if own in answers else _no_program(own) for own in owns]


# ---- asking -------------------------------------------------------------------------------------------------------------


def _ask(owns: Sequence[Own], deadline_s: float) -> list[Answer]:
    with tempfile.TemporaryDirectory(prefix="artd-doctor-") as folder:
        # A copy: their interpreters must not find the daemon's packages, which are beside the original.
        code, outs = install_code(Path(folder)), [Path(folder) / own.worker for own in owns]
        children = [_start(own, code, out) for own, out in zip(owns, outs, strict=True)]
        try:
            end = time.monotonic() + deadline_s
            return [_answer(child, out, end) for child, out in zip(children, outs, strict=True)]
        finally:
            for child in children:
                if not isinstance(child, OSError):
                    pip.end_group(child)


def _start(own: Own, code: Path, out: Path) -> "subprocess.Popen[bytes] | OSError":
    env = filter_environment(os.environ) | {"PYTHONPATH": os.pathsep.join([str(code), *own.pythonpath])}
    if own.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, own.gpus))
    kind = [_engine(own).name] if own.worker == "engine" else []
    try:
        with open(f"{out}.json", "wb") as said, open(f"{out}.err", "wb") as words:
            return subprocess.Popen(
                [own.python, "-m", "artd_workers.probe", own.worker, *kind], stdin=subprocess.DEVNULL, stdout=said,
                stderr=words, env=env, cwd=code, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        return error


def _answer(child: "subprocess.Popen[bytes] | OSError", out: Path, end: float) -> Answer:
    if isinstance(child, OSError):
        return Answer(None, str(child))
    try:
        code = child.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Answer(None, "it was still importing when artd doctor gave up", late=True)
    try:
        return Answer(json.loads(Path(f"{out}.json").read_text()))
    except ValueError:
        last = Path(f"{out}.err").read_text(errors="replace").strip().splitlines()[-1:]
        return Answer(None, ": ".join([f"it ended with status {code}", *last]))


# ---- judging ------------------------------------------------------------------------------------------------------------


def _no_program(own: Own) -> Finding:
    return Finding(
        own.runtime, "missing", f"your own, {own.python}, is not a program", "name another in artd.toml (runtimes)"
    )


def _finding(own: Own, answer: Answer) -> Finding:
    said = answer.said
    if said is None:
        value, state = f"your own: {own.python}: {answer.error}", "warning" if answer.late else "missing"
        return Finding(own.runtime, state, value, f"{_by_hand(own)} shows more; when it works there, artd doctor again")
    value = f"your own: {own.python} (Python {said['python']})"
    if tuple(map(int, said["python"].split(".")[:2])) < OLDEST:
        return Finding(own.runtime, "missing", value, "artd's workers need 3.11 or newer: name another in artd.toml")
    found = ", ".join(f"{name} {version}".strip() for name, version in said["versions"].items())
    if failed := said["failed"]:
        value += " cannot import " + "; ".join(f"{name} ({error})" for name, error in failed.items())
        return Finding(own.runtime, "missing", f"{value}. It has {found or 'nothing of it'}", _mend(own, failed))
    value += f": {found}; torch sees {said['gpus'] or 'no'} GPU{'s' if said['gpus'] > 1 else ''}"
    if said["refused"]:
        return Finding(own.runtime, "missing", f"{value}; {said['refused']}", f"install one of these there; {GUIDE}")
    if lacks := _lacking_gpus(own, said):
        return Finding(own.runtime, "warning", value, lacks)
    return Finding(own.runtime, "ok", value)


def _mend(own: Own, failed: dict[str, str]) -> str:
    absent = [name for name, error in failed.items() if error.startswith("ModuleNotFoundError")]
    if absent != list(failed):
        return f"{_by_hand(own)} shows all of it: versions that do not fit each other, most often; {GUIDE}"
    packages = " ".join(shlex.quote(_PACKAGES.get(name, name)) for name in absent)
    return f"{own.python} -m pip install {packages}; {GUIDE}"


def _by_hand(own: Own) -> str:
    module = _engine(own).module if own.worker == "engine" else "megatron.core"
    folders = f"PYTHONPATH={shlex.quote(os.pathsep.join(own.pythonpath))} " if own.pythonpath else ""
    return f"{folders}{own.python} -c 'import torch, {module}'"


def _engine(own: Own) -> EngineKind:
    return next(engine for engine in ENGINES.values() if engine.runtime == own.runtime)


def _lacking_gpus(own: Own, said: dict[str, Any]) -> str:
    """Return what to do when torch sees fewer GPUs than it should. A machine without a GPU lacks nothing."""
    wanted = f"gpus.{own.worker} = {list(own.gpus)} in artd.toml" if own.gpus else "this machine has a GPU"
    if said["gpus"] >= len(own.gpus) and (said["gpus"] or not _NVIDIA.exists()):
        return ""
    why = "nvidia-smi lists those that there are" if said["cuda"] else "its torch is a CPU build: install one for CUDA"
    return f"{wanted}, and torch sees {said['gpus'] or 'none'}: {why}"
