"""A real daemon process on a folder of its own, with fake workers, and what a test can see of it from outside.

It leaves no process. /proc says what is alive, and the database file says what is true.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from artd.check.run import check
from artd.store.readonly import open_readonly
from artd_client import Client
from artd_client.run import Run
from artd_schema import crashpoint
from artd_schema.data.trajectory import Turn
from artd_schema.paths import read_daemon_file, runtime_dir
from tests.awake import LOOK_S, SOON_S, Awake
from tests.fakes.script import VARIABLE, Script

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT, ROOT / "schema", ROOT / "client", ROOT / "workers")  # this checkout's, wherever artd is installed from
VOCAB = 256
CONFIG = """
drain_s = 5.0
[limits]
min_free_mib = 1
[runtimes.trainer]
python = "{wrapper}"
pythonpath = ["{root}"]
[runtimes.engine]
python = "{wrapper}"
pythonpath = ["{root}"]
"""
WRAPPER = """#!/bin/sh
# Stands in for the interpreter of a runtime: `-m artd_workers.NAME` runs the fake of that name.
case "$2" in
    artd_workers.trainer) exec "{python}" "{fakes}/trainer.py" ;;
    artd_workers.engines) exec "{python}" "{fakes}/engine.py" ;;
esac
echo "no fake for $2" >&2
exit 64
"""
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": VOCAB, "num_hidden_layers": 2, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
SPEC: dict[str, Any] = {
    "group_size": 2,
    "groups_per_step": 1,
    "row_length": 64,
    "drop_longer": True,
    "push_drain_s": 1.0,
}


class Rig:
    """data: the data folder; script: what the fake workers are told; process: the daemon, if it was started."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "data"
        self.script = Script(root / "script.json")
        self.model = str(root / "model")
        self.process: subprocess.Popen[bytes] | None = None
        self.config = root / "artd.toml"
        self.points = root / "points"  # of crashes: the folder is there once one was armed
        self.strangers: set[int] = set()  # processes of the test's own that carry this folder in their command line
        wrapper = root / "python"
        wrapper.write_text(WRAPPER.format(python=sys.executable, fakes=ROOT / "tests" / "fakes"))
        wrapper.chmod(0o755)
        self.config.write_text(CONFIG.format(wrapper=wrapper, root=ROOT))
        Path(self.model).mkdir()
        self.configure({"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB})
        (Path(self.model) / "model.safetensors").write_bytes(b"no weights")

    def configure(self, config: dict[str, Any]) -> None:
        """Make the base model another one."""
        (Path(self.model) / "config.json").write_text(json.dumps(config))

    def environment(self) -> dict[str, str]:
        """Of a daemon, or of a client in a process of its own."""
        env = os.environ | {VARIABLE: str(self.script.path), "PYTHONPATH": ":".join(map(str, FOLDERS))}
        return env | {crashpoint.VARIABLE: str(self.points)} if self.points.exists() else env

    # ---- crash points -------------------------------------------------------------------------------------------------

    def arm(self, *points: str, action: str = "kill") -> None:
        """Let `action` happen at the next arrival at each point, in processes of daemons started from the first call on."""
        self.points.mkdir(exist_ok=True)
        for point in points:
            (self.points / f".{point}").write_text(action)
            (self.points / f".{point}").rename(self.points / point)  # whoever comes by sees all of it or nothing

    def taken(self, point: str) -> int:
        """Process id of whoever took the newest action of this point, 0 while nobody has."""
        found = sorted(self.points.glob(f"{point}.taken-*"), key=lambda path: path.stat().st_ctime_ns)
        return int(found[-1].name.rpartition("-")[2]) if found else 0

    # ---- the process ----------------------------------------------------------------------------------------------------

    def start(self, wait: bool = True, under: Sequence[str] = ()) -> None:
        """Start a daemon. under: a command that runs it, such as strace."""
        code = ["-m", "artd.cli.main", "start", "--data-dir", str(self.data), "--config", str(self.config)]
        command = [*under, sys.executable, *code]
        env = self.environment()
        with (self.root / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        if wait:
            self.until(lambda: self.state() in ("ready", "") or self.process.poll() is not None, "the daemon's start")
            self.until(lambda: self.state() == "ready", "the daemon to be ready")

    def state(self) -> str:
        found = read_daemon_file(self.data)
        return found.state if found is not None and self.pid else "none"

    @property
    def pid(self) -> int:
        """Process id of the daemon that `start` started, which is a child where it runs under something; 0 = none."""
        found = read_daemon_file(self.data)
        mine = found is not None and self.process is not None and self.process.pid in (found.pid, parent(found.pid))
        return found.pid if found is not None and mine else 0

    def kill(self) -> None:
        """kill -9, and proof that nothing of it lives two seconds later."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.assert_nothing_lives()

    def died(self, within_s: float = SOON_S) -> int:
        """Wait for the daemon to end by itself; its exit status."""
        assert self.process is not None
        return self.process.wait(within_s)

    def terminate(self) -> None:
        """SIGTERM, if it lives."""
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.pid or self.process.pid, signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.terminate()
        assert self.process is not None
        code = self.process.wait(SOON_S)
        self.assert_nothing_lives()
        return code

    def move(self, data: Path) -> None:
        """Work on another data folder from now on."""
        assert self.process is None or self.process.poll() is not None
        shutil.rmtree(runtime_dir(self.data, create=False), ignore_errors=True)
        self.data = data

    def restart(self) -> None:
        self.kill()
        self.start()

    def assert_nothing_lives(self, within_s: float = 2.0) -> None:
        with Awake() as passed:
            while left := self.living():
                assert passed.seconds < within_s, f"still alive {within_s} s later: {left}"
                time.sleep(LOOK_S)
        if (self.data / "artd.db").exists():
            self.assert_whole()  # before any recovery

    def assert_whole(self) -> None:
        """Every invariant holds, whatever was running or has just died."""
        report = check(self.data, deep=True, live=True)
        assert report.clean, report.broken

    def living(self) -> list[str]:
        """Processes with this rig's folder in their environment or command line: daemon, packer, workers."""
        needle, found = os.fsencode(self.root), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in (os.getpid(), *self.strangers):
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                command = (entry / "cmdline").read_bytes()
                if command and needle in command + (entry / "environ").read_bytes():
                    found.append(f"{entry.name}: {command.replace(bytes(1), b' ').decode(errors='replace')[:100]}")
        return found

    def worker_pid(self, name: str) -> int:
        """Process id of the fake itself (its guardian is in the row). name: a worker's, or its kind."""
        (guardian,) = self.rows("SELECT pid FROM process WHERE ? IN (kind, name) AND pid IS NOT NULL", name)[0]
        children = Path(f"/proc/{guardian}/task/{guardian}/children").read_text().split()
        return int(children[0])

    def until(self, condition: Any, what: str, within_s: float = SOON_S) -> Any:
        with Awake() as passed:
            while not (found := condition()):
                if passed.seconds > within_s:
                    raise AssertionError(f"no sign of {what} within {within_s} s; the daemon's log:\n{self.log()}")
                time.sleep(0.01)
        return found

    def reached(self, mark: str, within_s: float = SOON_S) -> None:
        """Wait for a mark of the fakes, such as `train:1 1` (step 1, fence 1)."""
        self.until(lambda: mark in self.script.marks(), f"{mark!r} among {self.script.marks()}", within_s)

    def log(self) -> str:
        path = self.root / "daemon.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-30:]) if path.exists() else "(none)"

    # ---- what is true -----------------------------------------------------------------------------------------------------

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        if not (self.data / "artd.db").exists():
            return []
        connection = sqlite3.connect(f"file:{self.data / 'artd.db'}?mode=ro", uri=True, timeout=5)
        try:
            return connection.execute(sql, parameters).fetchall()
        finally:
            connection.close()

    def one(self, sql: str, *parameters: Any) -> Any:
        ((value,),) = self.rows(sql, *parameters)
        return value

    def check(self, submitted: int) -> None:
        """What must hold of every database at every time: nothing lost, nothing trained twice, steps contiguous."""
        assert self.one("SELECT count(*) FROM trajectory") == submitted
        (step,) = self.rows("SELECT step FROM run")[0]
        with contextlib.closing(open_readonly(self.data / "artd.db")) as c:
            assert not list(history(c))
        parents = self.rows(
            "SELECT k.step, p.step FROM checkpoint k JOIN checkpoint p ON p.id = k.parent_id ORDER BY 1"
        )
        assert parents == [(number, number - 1) for number in range(1, step + 1)]
        for shas in self.rows("SELECT tensors, manifest, replay, replay_manifest FROM batch"):
            for sha in filter(None, shas):
                data = (self.data / "blobs" / sha[:2] / sha).read_bytes()
                assert hashlib.sha256(data).hexdigest() == sha
        for (folder,) in self.rows("SELECT dir FROM checkpoint WHERE state = 'committed'"):
            assert (self.data / folder / "manifest.json").is_file(), folder
        assert self.rows("PRAGMA integrity_check") == [("ok",)] and self.rows("PRAGMA foreign_key_check") == []
        self.assert_whole()
        committed = self.rows("SELECT kind, ref FROM event WHERE kind = 'step.committed' ORDER BY id")
        assert [ref for _, ref in committed] == [str(number) for number in range(step + 1)]

    # ---- a client -----------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def run(self, **changes: Any) -> AsyncIterator[tuple[Client, Run]]:
        """A client of its own connection, and the run `r`."""
        async with Client(self.data, timeout=30.0) as client:
            yield client, await client.run("r", model=self.model, **(SPEC | changes))


def history(c: sqlite3.Connection) -> Iterator[str]:
    """What is wrong where steps are not contiguous or a trajectory is not trained once. c: of a data folder or a disk image."""
    for run, name, step in c.execute("SELECT id, name, step FROM run").fetchall():
        steps = [row[0] for row in c.execute("SELECT step FROM checkpoint WHERE run_id = ? ORDER BY step", (run,))]
        if steps != list(range(step + 1)):
            yield f"run {name} is at step {step} with checkpoints {steps}"
        trained = c.execute("SELECT step FROM batch WHERE run_id = ? AND state = 'trained' ORDER BY step", (run,))
        if (found := [row[0] for row in trained]) != list(range(1, step + 1)):
            yield f"run {name} is at step {step} with trained batches {found}"
    for row in c.execute(
        "SELECT t.id FROM trajectory t LEFT JOIN batch b ON b.id = t.batch_id"
        " WHERE (t.state = 'trained') <> (b.state IS NOT NULL AND b.state = 'trained')"
    ):
        yield f"trajectory {row[0]} and its batch disagree on whether it was trained"


def parent(pid: int) -> int:
    """Process id of a process's parent; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


@contextlib.contextmanager
def rig() -> Any:
    """A rig in a new folder; afterwards no process and no folder of it is left."""
    root = Path(tempfile.mkdtemp(prefix="artd-d."))
    made = Rig(root)
    try:
        yield made
    finally:
        if made.process is not None and made.process.poll() is None:
            os.kill(made.pid or made.process.pid, signal.SIGKILL)
            made.process.wait()
        with Awake() as passed:
            while made.living() and passed.seconds < 2.0:
                time.sleep(LOOK_S)
        left = made.living()
        shutil.rmtree(runtime_dir(made.data, create=False), ignore_errors=True)
        shutil.rmtree(root)
        assert not left, f"still alive: {left}"


def turn(seed: int, routes: bytes = b"") -> Turn:
    """A turn of three sampled tokens; other seeds, other tokens."""
    ids = array("i", [seed % VOCAB, 1, 2]).tobytes()
    return Turn(
        prompt_ids=array("i", [5, 6, 7]).tobytes(), token_ids=ids, logprobs=array("f", [-1, -2, -0.5]).tobytes(),
        routes=routes,
    )  # fmt: skip


async def fill(run: Run, step: int, groups: int = 1, routes: bytes = b"") -> int:
    """Submit the groups of one step; how many trajectories."""
    for group in range(groups):
        for number in range(2):
            key = f"s{step}-g{group}-{number}"
            await run.submit(f"s{step}-g{group}", float(number), turns=[turn(step * 10 + number, routes)], key=key)
    return 2 * groups
