"""The shared parts of the tests of `artd replay-job`: a data folder with finished jobs, a stand-in for the trainer's
interpreter, and answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec

from artd.models.base_model import pin
from artd_schema.codec import digest
from artd_schema.run.spec import RunSpec
from artd_schema.wire.replay_job import EnvironmentRow, ReplayReport, ReplayRequest, ReplayRow
from tests.cli.rows import Made

INTERPRETER = """#!/bin/sh
cat >"{here}/request.json"
echo "$@" >"{here}/arguments"
pwd >"{here}/cwd"
env >"{here}/environment"
ls "${{PYTHONPATH%%:*}}" >"{here}/code"
echo "words of the trainer" >&2
[ -e "{here}/first" ] && . "{here}/first"
cat "{here}/report.json"
exit 0
"""
SAME = (
    ReplayRow(part="batch", name="tokens", committed="a" * 64, replayed="a" * 64, equal=True, close=True),
    ReplayRow(part="metrics", name="loss", committed=-0.125, replayed=-0.125, equal=True, close=True, difference=0.0),
    ReplayRow(
        part="metrics", name="tokens_per_s", committed=10.5, replayed=9.0, equal=None, close=True, difference=1.5
    ),
    ReplayRow(part="manifest", name="step", committed=2, replayed=2, equal=True, close=True),
    ReplayRow(
        part="adapter_model.safetensors", name="x.lora_A.weight", committed="c" * 64, replayed="c" * 64, equal=True,
        close=True, difference=0.0,
    ),
    ReplayRow(
        part="files", name="adapter_model.safetensors", committed="d" * 64, replayed="d" * 64, equal=True, close=True
    ),
)  # fmt: skip
OTHERWISE = (
    ReplayRow(part="metrics", name="loss", committed=-0.125, replayed=-0.25, equal=False, close=False, difference=0.125),
    ReplayRow(
        part="adapter_model.safetensors", name="x.lora_A.weight", committed="c" * 64, replayed="e" * 64, equal=False,
        close=False, difference=0.5,
    ),
)  # fmt: skip
NEARLY = tuple(msgspec.structs.replace(row, close=True) for row in OTHERWISE)
CORES = EnvironmentRow(name="cpu", committed="AVX512", replayed="AVX2")


class Past(Made):
    """Run `toy` with jobs 1 (init), 2 and 3 done, 4 running; steps 0, 1 and 2 are there, with their batches' files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "data")
        self.root, self.model = root, root / "model"
        self.model.mkdir()
        config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 16}
        (self.model / "config.json").write_text(json.dumps(config))
        (self.model / "model.safetensors").write_bytes(b"no weights")
        spec = msgspec.to_builtins(RunSpec(model=str(self.model), seed=7))
        base = msgspec.json.encode(pin(str(self.model)))
        self.row("meta", key="instance", value="the-instance")
        self.run_id = self.run(spec=spec, base_manifest=base, base_digest="b" * 64)
        self.blobs: dict[str, Path] = {}
        batches = [self.packed(step, replay=step == 2) for step in (1, 2, 3)]
        jobs = [self.job(self.run_id, "init", 0, "succeeded", epoch=0)]
        made = [self.checkpoint(self.run_id, 0, jobs[0])]
        for step, state in ((1, "succeeded"), (2, "succeeded"), (3, "running")):
            parent = {"parent_id": made[-1], "batch_id": batches[step - 1], "epoch": step + 4}
            jobs.append(self.job(self.run_id, "train", step, state, fence=step, **parent))
            if state == "succeeded":
                made.append(self.checkpoint(self.run_id, step, jobs[-1], parent_id=made[-1], epoch=step + 4))

    def packed(self, step: int, replay: bool) -> int:
        shas = {}
        for column in ("tensors", "manifest", *(("replay", "replay_manifest") if replay else ())):
            content = f"{column} of {step}".encode()
            sha = digest(content)
            path = self.data / "blobs" / sha[:2] / sha
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            shas[column], self.blobs[f"{column}-{step}"] = self.blob(sha), path
        sizes = {"trajectories": 8, "tokens": 100, "fill": 0.98, "created": 1, "covered": 92 if replay else None}
        return self.row("batch", run_id=self.run_id, step=step, state="trained", **shas, **sizes)

    def folder(self, step: int) -> Path:
        [folder] = (self.data / "checkpoints/toy").glob(f"l0-s{step:06d}-*")
        return folder

    def retire(self, step: int) -> None:
        self.connection.execute("UPDATE checkpoint SET state = 'retired' WHERE step = ?", (step,))
        shutil.rmtree(self.folder(step))

    def content(self) -> dict[str, bytes]:
        """Every file of the data folder but those that any reader of a WAL database may make."""
        files = (path for path in self.data.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files if not path.name.endswith(("-wal", "-shm"))}


class Interpreter:
    """The stand-in and what it was given. first: shell text that it runs before it answers."""

    def __init__(self, root: Path) -> None:
        self.here, self.config = root / "interpreter", root / "artd.toml"
        self.here.mkdir()
        python = self.here / "python"
        python.write_text(INTERPRETER.format(here=self.here))
        python.chmod(0o755)
        self.config.write_text(f'[runtimes.trainer]\npython = "{python}"\npythonpath = ["/further"]\n')
        self.answers(ReplayReport(rows=SAME, threads=2, seconds=1.5))

    def answers(self, report: ReplayReport) -> None:
        (self.here / "report.json").write_bytes(msgspec.json.encode(report) + b"\n")

    def first(self, text: str) -> None:
        (self.here / "first").write_text(text)

    @property
    def request(self) -> ReplayRequest:
        return msgspec.json.decode((self.here / "request.json").read_bytes(), type=ReplayRequest)

    def told(self, name: str) -> str:
        return (self.here / name).read_text()
