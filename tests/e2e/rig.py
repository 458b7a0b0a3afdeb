"""A real `artd start` on a folder of its own, and what a test can see of it from outside: what is alive comes from /proc, what
is trained from checkpoint folders, what is served from replies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from artd.runtimes import registry
from artd.supervise.guardian import all_stats, descendants
from artd_schema.paths import read_daemon_file
from tests.awake import LOOK_S, SOON_S, Awake
from tests.process.helpers import dead

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


class Rig:
    """data: the data folder; config: text of its artd.toml."""

    def __init__(self, data: Path, config: str = "") -> None:
        self.data = data
        self.config = data.with_suffix(".toml")
        self.config.write_text(config)

    def start(self) -> None:
        command = [BIN / "artd", "start", "--detach", "--data-dir", self.data, "--config", self.config]
        subprocess.run(command, check=True, timeout=2 * SOON_S)

    @property
    def pid(self) -> int:
        found = read_daemon_file(self.data)
        assert found is not None
        return found.pid

    @property
    def harness(self) -> int:
        """Process id of the engine harness: the child of its guardian, which artctl names."""
        (engine,) = (worker for worker in self.status()["workers"] if worker["name"] == "engine")
        guardian = engine["pid"]
        return int(Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()[0])

    def kill(self) -> None:
        """kill -9 of the daemon, and proof that nothing of it lives two seconds later, whatever it calls itself by then."""
        pid = self.pid
        below = descendants([pid], all_stats())
        os.kill(pid, signal.SIGKILL)
        dead(below, 2.0)
        self.assert_nothing_lives(0.1)

    def stop(self) -> None:
        command = [BIN / "artd", "stop", "--drain", "0", "--data-dir", self.data]
        subprocess.run(command, check=False, timeout=2 * SOON_S)
        self.assert_nothing_lives()

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            [BIN / "artctl", "status", "--json", "--data-dir", self.data],
            capture_output=True,
            check=False,
            timeout=SOON_S,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def assert_nothing_lives(self, within_s: float = 2.0) -> None:
        with Awake() as passed:
            while left := self.processes():
                assert passed.seconds < within_s, f"still alive {within_s} s later: {left}"
                time.sleep(LOOK_S)

    def processes(self) -> list[str]:
        """Command lines of every live process that carries this data folder in its environment or command line."""
        needle, found = os.fsencode(self.data), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                if command and needle in command + (entry / "environ").read_bytes():
                    found.append(f"{entry.name}: {command.replace(bytes(1), b' ').decode(errors='replace')[:120]}")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def checkpoint(self, run: str, step: int) -> Path:
        """Folder of the checkpoint of a step, as it lies on disk."""
        (folder,) = (self.data / "checkpoints" / run).glob(f"l0-s{step:06d}-*")
        return folder


def make_toy(target: Path, family: str, seed: int = 0) -> Path:
    """A small random Hugging Face checkpoint, made by the megatron runtime."""
    python = registry.find("megatron").python
    command = [python, ROOT / "tests" / "toys.py", target, "--family", family, "--seed", str(seed)]
    subprocess.run(command, check=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return target
