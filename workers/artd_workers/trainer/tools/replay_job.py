"""`python -m artd_workers.trainer.tools.replay_job`: does a committed job again in a scratch folder, and compares.

It is the part of `artd replay-job` that needs torch. Request: one `ReplayRequest` as JSON on stdin. Answer: one `ReplayReport`
as a JSON line on stdout, exit 0, or 1 when its `error` is set; nothing else is written to stdout. The work is `Trainer.run` and
nothing else, with the threads of the committed run. Inputs and result are used only after their sha256 was found to be the
committed one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from artd_schema.codec import digest
from artd_schema.data.manifest import MANIFEST_FILE, BatchManifest, CheckpointManifest, ReplayManifest, TensorInfo
from artd_schema.wire.replay_job import ReplayReport, ReplayRequest, ReplayRow
from artd_schema.wire.worker import CheckpointRef, Run
from artd_workers.trainer.__main__ import versions


class Damaged(ValueError):
    """A committed file is gone or not what was committed, so there is nothing to replay from or to compare with."""


def replay(request: ReplayRequest) -> ReplayReport:
    """Do the job again in `run.dir` and compare. Raises Damaged, and what `Trainer.run` raises."""
    from . import compare

    started = time.perf_counter()
    committed = check_checkpoint(request.committed)
    # A restored folder is another instance than the one that did the job, and the manifest names the instance.
    request = msgspec.structs.replace(request, run=msgspec.structs.replace(request.run, instance=committed.instance))
    rows = list(check_batch(request.run))
    threads = _train(request, committed.environment)
    ours, theirs = Path(request.committed.dir), Path(request.run.dir)
    rows.extend(compare.compare(ours, theirs))
    return ReplayReport(
        rows=tuple(rows), environment=compare.environment(committed.environment, compare.read_manifest(theirs).environment),
        threads=threads, seconds=time.perf_counter() - started,
    )  # fmt: skip


def _train(request: ReplayRequest, environment: dict[str, Any]) -> int:
    """Run the job. Returns the number of threads."""
    import torch

    from artd_workers.trainer.placement import prepare

    prepare(request.config.spec)
    from artd_workers.trainer.trainer import Trainer

    trainer = Trainer(request.config, versions())
    recorded = environment.get("threads")
    if isinstance(recorded, int) and recorded > 0:
        # `threads: 0` means all cores of the machine that trained, which need not be this one.
        trainer.threads = recorded
        torch.set_num_threads(recorded)
    trainer.run(request.run)
    return int(trainer.threads)


# ---- what was committed ---------------------------------------------------------------------------------------------


def check_checkpoint(ref: CheckpointRef) -> CheckpointManifest:
    """Return the manifest of a committed folder, after checking every file. Raises Damaged."""
    folder = Path(ref.dir)
    raw = _read(folder / MANIFEST_FILE)
    if digest(raw) != ref.sha:
        raise Damaged(_describe_damage(folder / MANIFEST_FILE, digest(raw), ref.sha))
    manifest = msgspec.json.decode(raw, type=CheckpointManifest)
    for entry in manifest.files:
        if (found := _hash(folder / entry.name)) != entry.sha256:
            raise Damaged(_describe_damage(folder / entry.name, found, entry.sha256))
    return manifest


def check_batch(run: Run) -> Iterator[ReplayRow]:
    """Yield one row for each tensor of the batch and of its replay bundle; none for init. Raises Damaged, which names file and
    tensor."""
    if not run.batch:
        return
    batch = _decode(Path(run.manifest), run.batch_sha, BatchManifest)
    yield from _tensors("batch", Path(run.batch), batch.tensors)
    if batch.replay:
        if not run.replay_manifest:
            raise Damaged(f"batch {run.batch_sha[:16]} was trained with expert replay, but the job names no bundle")
        bundle = _decode(Path(run.replay_manifest), batch.replay, ReplayManifest)
        yield from _tensors("replay", Path(run.replay), bundle.tensors)


def _decode(path: Path, sha: str, kind: Any) -> Any:
    raw = _read(path)
    if digest(raw) != sha:
        raise Damaged(_describe_damage(path, digest(raw), sha))
    return msgspec.json.decode(raw, type=kind)


def _tensors(part: str, path: Path, described: dict[str, TensorInfo]) -> Iterator[ReplayRow]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            if lost := sorted(described.keys() - set(file.keys())):
                raise Damaged(f"{path} lacks the tensor {lost[0]} of its manifest")
            found = {name: digest(file.get_tensor(name).tobytes()) for name in described}
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except SafetensorError as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    for name, info in described.items():
        if found[name] != info.sha256:
            raise Damaged(f"tensor {name}: {_describe_damage(path, found[name], info.sha256)}")
        yield ReplayRow(part=part, name=name, committed=info.sha256, replayed=found[name], equal=True, close=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None


def _describe_damage(path: Path, found: str, wanted: str) -> str:
    return f"{path} is damaged: its sha256 is {found[:16]}, committed was {wanted[:16]}"


# ---- the process ----------------------------------------------------------------------------------------------------


def answer(raw: bytes) -> ReplayReport:
    """Return the report for a request in JSON. It contains every error."""
    try:
        return replay(msgspec.json.decode(raw, type=ReplayRequest))
    except Exception as error:
        traceback.print_exc()
        # A refusal of Trainer.run explains itself. Any other error is a bug, which its type helps to find.
        said = isinstance(error, ValueError | ArithmeticError | OSError)
        return ReplayReport(error=str(error) if said and str(error) else f"{type(error).__name__}: {error}")


def main() -> int:
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what libraries print goes to the log, not into the answer
        report = answer(sys.stdin.buffer.read())
        out.write(msgspec.json.encode(report) + b"\n")
    return 1 if report.error else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
