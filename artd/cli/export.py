"""`artctl export RUN[@STEP] DIR`: a committed checkpoint as a PEFT adapter folder, or merged as a Hugging Face folder.

Owner of: DIR, which appears complete or not at all. Exit codes: 0, 1 failed, 3 no daemon ever ran here, 5 no such run or
checkpoint, 6 DIR exists. Invariants: every file is hashed against the committed manifest; works with the daemon down.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from . import probe, read
from .outcome import CONFLICT, FAILED, NOT_FOUND, OK, USAGE, CliError, shared

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
MANIFEST, WEIGHTS = "manifest.json", "weights.json"


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("export", help="write a checkpoint as a PEFT or Hugging Face folder", parents=[shared()])
    parser.add_argument("checkpoint", metavar="RUN[@STEP]", help="without STEP: the newest")
    parser.add_argument("dir", metavar="DIR", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--format", choices=("peft", "merged"), default="peft", help="(default: peft)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = probe.data_dir(args)
    database = read.Database(data)
    try:
        row, spec = _find(database, args.checkpoint)
    finally:
        database.close()
    target: Path = args.dir.absolute()
    if target.exists():
        raise CliError(CONFLICT, f"{target} exists already", "give a folder that does not exist")
    source = data / row["dir"]
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    name = f"{row['run']}@{row['step']}"
    try:
        _export_adapter(source, row["sha"], partial, with_weights=args.format == "merged")
        if args.format == "merged":
            merged = partial.with_name(partial.name + "-merged")
            try:
                _merge(data, partial, merged, spec)
            except BaseException:
                shutil.rmtree(merged, ignore_errors=True)
                raise
            shutil.rmtree(partial)
            partial = merged
        partial.rename(target)
    except OSError as error:
        raise CliError(
            FAILED, f"{name} cannot be written to {target}: {error}", "free space, or another folder"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(target)
    return OK


def _find(database: read.Database, wanted: str) -> tuple[read.Row, dict[str, Any]]:
    """(checkpoint row, run spec) of RUN[@STEP], newest lineage first. Raises CliError."""
    name, at, number = wanted.partition("@")
    if at and not number.isdigit():
        raise CliError(USAGE, f"{wanted!r} is not RUN or RUN@STEP", "artctl checkpoints")
    database.checked_run(name)
    rows = database.rows(read.CHECKPOINTS, run=name, state="", limit=1_000_000)
    found = next((row for row in rows if not number or row["step"] == int(number)), None)
    kept = sorted({row["step"] for row in rows if row["state"] == "committed"})
    there = f"kept are {', '.join(f'@{step}' for step in kept)}" if kept else "the run has none yet"
    if found is None:
        raise CliError(NOT_FOUND, f"there is no checkpoint {wanted}; {there}", f"artctl checkpoints --run {name}")
    if found["state"] == "retired":
        raise CliError(NOT_FOUND, f"the files of {wanted} are deleted (keep_checkpoints); {there}", "export a kept one")
    spec = next(row["spec"] for row in database.rows(read.RUNS, limit=1_000_000) if row["name"] == name)
    return found, spec


def _export_adapter(source: Path, sha: str, out: Path, with_weights: bool) -> None:
    """Copy the adapter's files, each checked against the manifest, whose own sha is the committed one."""
    raw = _read(source / MANIFEST)
    if hashlib.sha256(raw).hexdigest() != sha:
        raise CliError(FAILED, f"{source / MANIFEST} is not the one that was committed", "export another step")
    listed = {entry["name"]: entry["sha256"] for entry in json.loads(raw)["files"]}
    out.mkdir(parents=True)
    for name in (*ADAPTER, *((WEIGHTS,) if with_weights else ())):
        if name not in listed:
            raise CliError(FAILED, f"{source} holds no {name}", "export another step")
        content = _read(source / name)
        if hashlib.sha256(content).hexdigest() != listed[name]:
            raise CliError(
                FAILED, f"{source / name} is damaged: its sha256 is not the committed one", "export another step"
            )
        (out / name).write_bytes(content)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CliError(FAILED, f"{path} is missing: the checkpoint is damaged", "export another step") from None


def _merge(data: Path, adapter: Path, out: Path, spec: dict[str, Any]) -> None:
    """Run the merge in the trainer's interpreter: torch is never in this one."""
    import subprocess

    from ..config import ConfigError, load
    from ..runtimes import registry
    from ..supervise.code import install_code

    try:
        own = load(data_dir=str(data)).runtimes.trainer
        runtime = None if own.python else registry.find("megatron")
    except (ConfigError, registry.RuntimeMissing) as error:
        raise CliError(FAILED, str(error)) from None
    python = str(runtime.python) if runtime else own.python
    folders = [str(install_code(data)), *(runtime.site_paths if runtime else ()), *own.pythonpath]
    dtype = spec.get("engine", {}).get("dtype", "float32")
    command = [python, "-m", "artd_workers.trainer.export", "--base", spec["model"], "--checkpoint", str(adapter)]
    done = subprocess.run(
        [*command, "--out", str(out), "--dtype", dtype],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        check=False,
    )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise CliError(FAILED, f"the merge ended with status {done.returncode}; its words are above", "artd doctor")
