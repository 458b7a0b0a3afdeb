"""The soak with real workers: Megatron-Core trains a toy, vLLM serves it, and the result is compared with an undisturbed run.

Every checkpoint is kept. Files on disk are compared; rows only say which files a job was given.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from artd.cli import read
from artd.cli.replay_job import inputs
from artd.runtimes import registry
from artd_schema.wire.replay_job import ReplayRequest
from tests.daemon.rig import FOLDERS, Rig
from tests.e2e.rig import make_toy

from .driver import Plan
from .history import Violation
from .journal import Replied
from .undisturbed import Answer, Probe, Request

CONFIG = "drain_s = 5.0\n[limits]\nmin_free_mib = 1\n"
SPEC: dict[str, Any] = {
    "group_size": 3,
    "groups_per_step": 1,
    "row_length": 256,
    "threads": 1,
    "optimizer": {"lr": 1e-3},
    "engine": {"max_model_len": 128, "kv_cache_mib": 64, "max_num_seqs": 8},
    "push_drain_s": 5.0,
    "keep_checkpoints": 100_000,
}
COSTS = {"daemon": 4.0, "engine": 6.0, "trainer": 2.0}
"""How much longer a hit of this process takes than one of the gateway: it is drawn so much more rarely."""


def prepare(rig: Rig) -> None:
    """Installed runtimes in place of the fakes, and a model that can be trained."""
    rig.config.write_text(CONFIG)
    rig.model = str(make_toy(rig.root / "toy", "qwen3"))


def plan(seed: int, seconds: float, kills: int, mode: str) -> Plan:
    return Plan(
        seed=seed, seconds=seconds, kills=kills, lease_s=2.0, workers="real", clients=2, vocab=1024, gap_s=1.0,
        take_s=30.0, ready_s=240.0, patient=True, spec=SPEC | {"rollout_weights_mode": mode},
    )  # fmt: skip


def compare(rig: Rig, replies: Sequence[Replied]) -> list[Violation]:
    """Train the same manifests again in one process that nobody disturbs; what came out otherwise, and replies of other
    weights than they name."""
    folder = Path(tempfile.mkdtemp(dir=rig.root, prefix="undisturbed."))
    probes = tuple(
        Probe(step=int(reply.model.rpartition("@")[2]), name=reply.response, prompt=reply.prompt, tokens=reply.tokens,
              logprobs=reply.logprobs)
        for reply in replies
    )  # fmt: skip
    request = Request(jobs=tuple(jobs(rig, folder)), probes=probes)
    (folder / "request.json").write_bytes(msgspec.json.encode(request))
    env = os.environ | {
        "PYTHONPATH": ":".join(map(str, FOLDERS)),
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [str(registry.find("megatron").python), "-m", "tests.soak.undisturbed", str(folder)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        return [Violation("other weights", f"the undisturbed training failed; see {folder}")]
    answer = msgspec.json.decode(done.stdout, type=Answer)
    print(
        f"trained again undisturbed: {len(request.jobs)} steps, {answer.files} files and {answer.replies} replies compared, "
        f"replies at most {answer.apart:.1e} nats apart",
        file=sys.stderr,
    )
    return [Violation(kind, what) for kind, what in answer.violations]


def jobs(rig: Rig, folder: Path) -> list[ReplayRequest]:
    """Every job that made a step, in the order of steps."""
    database = read.Database(rig.data)
    try:
        rows = sorted(database.rows(read.REPLAYABLE, id=0, limit=100_000), key=lambda row: row["step"])
        return [inputs.request(database, rig.data, row, folder / str(row["step"])) for row in rows]
    finally:
        database.close()
