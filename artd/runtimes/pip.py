"""Runs pip in a new environment, shows its progress and ends it cleanly when interrupted.

pip has a process group of its own, which is gone when `run` returns or raises. Its output goes to a log. The user's
configuration of pip (PIP_*, pip.conf) applies; artd only adds to it.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_FETCHED = re.compile(r"^\s*(?:Downloading|Using cached|Processing|Saved) \S+?\.(?:whl|tar\.gz)(?=[ \s]|$)")
_SOURCES = ("find-links", "extra-index-url", "index-url", "no-index")
_PUBLIC = ("https://pypi.org/simple", "https://pypi.org/simple/")


class PipFailed(Exception):
    """Raised when pip ends with an error; `log` is the path of its output."""

    def __init__(self, log: Path) -> None:
        super().__init__(f"pip failed, see {log}")
        self.log = log


def has_own_sources(config_list: str) -> bool:
    """Return whether the output of `pip config list` names a package source other than the public registry."""
    for line in config_list.splitlines():
        key, _, value = line.partition("=")
        if key.rpartition(".")[2] in _SOURCES and value.strip("'\" ") not in _PUBLIC:
            return True
    return False


def config_list(python: Path) -> str:
    done = subprocess.run([str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    return done.stdout


class Progress:
    """Shows `label: verb k of n packages, seconds`: one changing line on a terminal, else a line every ten seconds."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.started = label, total, time.monotonic()
        self.tty = sys.stderr.isatty()
        self.last = self.started if not self.tty else 0.0

    def show(self, verb: str, count: int, final: bool = False) -> None:
        now = time.monotonic()
        if not final and now - self.last < (0.2 if self.tty else 10.0):
            return
        self.last = now
        count = min(count, self.total)
        text = f"{self.label}: {verb} {count} of {self.total} packages, {now - self.started:.0f} s"
        sys.stderr.write(f"\r\x1b[K{text}" if self.tty else text + "\n")
        if self.tty and final:
            sys.stderr.write("\n")
        sys.stderr.flush()


def run(arguments: list[str], log: Path, temporary: Path, poll: Callable[[int], None]) -> None:
    """Run a command with its output in `log`, and call `poll(fetched)` five times a second. Raises PipFailed.

    A killed pip leaves its unpacked files behind; `temporary` keeps them out of /tmp, and the caller deletes it.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_PROGRESS_BAR": "off", "TMPDIR": str(temporary)}
    environment.pop("PYTHONPATH", None)
    with open(log, "ab") as out, open(log, errors="replace") as lines:
        lines.seek(0, os.SEEK_END)
        child = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        try:
            fetched = 0
            while child.poll() is None:
                time.sleep(0.2)
                fetched += sum(1 for line in lines if _FETCHED.match(line))
                poll(fetched)
        finally:
            end_group(child)
    if child.returncode != 0:
        raise PipFailed(log)


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM to pip's process group, and SIGKILL if it still runs two seconds later."""
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGTERM)
        try:
            child.wait(2.0)
        except subprocess.TimeoutExpired:
            pass
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def _die_with_parent() -> None:
    """Make the kernel kill this child when artd dies, so that pip does not go on writing into the folder."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
