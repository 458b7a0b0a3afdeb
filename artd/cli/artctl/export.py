"""`artctl export RUN[@STEP] DIR`: writes a committed checkpoint as a PEFT adapter folder, or merged as a Hugging Face folder.

A run that trains every weight has no adapter, so its checkpoints are exported in full. DIR appears complete or not at all.
Every file is hashed against the committed manifest. The daemon may be down. Exit codes: 0, 1 failed, 3 no daemon ever ran here,
5 no such run or checkpoint, 6 DIR exists, or there is no adapter.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from artd.cli import daemon_probe, read
from artd.cli.outcome import CONFLICT, FAILED, NOT_FOUND, OK, USAGE, CliError, shared_options
from artd_schema.codec import digest
from artd_schema.data.manifest import ADAPTER_CONFIG_FILE, ADAPTER_FILE, MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE
from artd_schema.run.spec_defaults import spec_value

ADAPTER = (ADAPTER_CONFIG_FILE, ADAPTER_FILE)
TRAINED = {"lora": ADAPTER, "full": (MODEL_FILE,)}
"""The manifest's `parameters` -> the files of a checkpoint that hold trained weights."""
PEFT_NOTE = (
    "note: this adapter has experts, which peft 0.21 with transformers 5 loads right; other versions may leave some out. Next, for "
    "those: --format merged"
)
_CHUNK = 1 << 20


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "export", help="write a checkpoint as a PEFT or Hugging Face folder", parents=[shared_options()]
    )
    parser.add_argument(
        "checkpoint", metavar="[RUN][@STEP]", help="without STEP: the newest; without RUN: the run that is not finished"
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="a folder that does not exist yet")
    parser.add_argument(
        "--format", choices=("peft", "merged"), help="(default: peft; a run that trains every weight has merged only)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    database = read.Database(data)
    try:
        row, spec = find(database, args.checkpoint)
    finally:
        database.close()
    target: Path = args.dir.absolute()
    if target.exists():
        raise CliError(CONFLICT, f"{target} exists already", "give a folder that does not exist")
    source = data / row["dir"]
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    name = f"{row['run']}@{row['step']}"
    try:
        manifest = _manifest(source, row["sha"])
        whole = _wants_all_weights(name, manifest.get("parameters", "lora"), args.format)
        _copy_trained(source, manifest, partial, with_weights=whole)
        if not whole and _has_experts(partial / ADAPTER_FILE):
            print(PEFT_NOTE, file=sys.stderr)
        if whole:
            merged = partial.with_name(partial.name + "-merged")
            try:
                _merge(data, getattr(args, "config", None), partial, merged, spec)
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


def find(database: read.Database, wanted: str) -> tuple[read.Row, dict[str, Any]]:
    """Return (checkpoint row, run spec) of RUN[@STEP]. Raises CliError.

    It is the step of the run's present chain, else the newest one of that number that a rollback left; without STEP the newest
    step of the chain.
    """
    name, at, number = wanted.partition("@")
    if at and not number.isdigit():
        raise CliError(USAGE, f"{wanted!r} is not RUN or RUN@STEP", "artctl checkpoints")
    name = database.find_run(name)
    rows = database.page("checkpoints", run=name, limit=1_000_000)
    rows.sort(key=lambda row: row["abandoned"])  # stable: each part stays newest first
    found = next((row for row in rows if not number or row["step"] == int(number)), None)
    kept = sorted({row["step"] for row in rows if row["state"] == "committed"})
    there = f"kept are {', '.join(f'@{step}' for step in kept)}" if kept else "the run has none yet"
    if found is None:
        raise CliError(NOT_FOUND, f"there is no checkpoint {wanted}; {there}", f"artctl checkpoints --run {name}")
    if found["state"] == "retired":
        raise CliError(NOT_FOUND, f"the files of {wanted} are deleted (keep_checkpoints); {there}", "export a kept one")
    return found, database.rows(read.SPEC, run=name)[0]["spec"]


def _manifest(source: Path, sha: str) -> dict[str, Any]:
    """Read a checkpoint's manifest, whose sha256 must be the committed one. Raises CliError."""
    path = source / MANIFEST_FILE
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise _missing(path) from None
    if digest(raw) != sha:
        raise CliError(FAILED, f"{path} is not the one that was committed", "export another step")
    manifest: dict[str, Any] = json.loads(raw)
    return manifest


def _has_experts(adapter: Path) -> bool:
    """Return whether a safetensors file names tensors of experts. Raises OSError."""
    with adapter.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        return b".experts." in file.read(min(header, adapter.stat().st_size))


def _wants_all_weights(name: str, parameters: str, wanted: str | None) -> bool:
    """Return whether to export every weight. Raises CliError when an adapter is wanted and there is none."""
    if parameters == "full" and wanted == "peft":
        raise CliError(CONFLICT, f"{name} has no adapter: its run trains every weight", "leave --format out")
    return wanted == "merged" or parameters == "full"


def _copy_trained(source: Path, manifest: dict[str, Any], out: Path, with_weights: bool) -> None:
    """Copy the files of trained weights, each checked against the manifest. Raises CliError."""
    listed = {entry["name"]: entry["sha256"] for entry in manifest["files"]}
    out.mkdir(parents=True)
    for name in (*TRAINED[manifest.get("parameters", "lora")], *((WEIGHTS_FILE,) if with_weights else ())):
        if name not in listed:
            raise CliError(FAILED, f"{source} holds no {name}", "export another step")
        if _copy(source / name, out / name) != listed[name]:
            raise CliError(
                FAILED, f"{source / name} is damaged: its sha256 is not the committed one", "export another step"
            )


def _copy(source: Path, target: Path) -> str:
    """Copy a file of any size. Returns the sha256 of what was copied. Raises CliError when it is missing."""
    sha = hashlib.sha256()
    try:
        with source.open("rb") as from_file, target.open("wb") as to_file:
            while block := from_file.read(_CHUNK):
                sha.update(block)
                to_file.write(block)
    except FileNotFoundError:
        raise _missing(source) from None
    return sha.hexdigest()


def _missing(path: Path) -> CliError:
    return CliError(FAILED, f"{path} is missing: the checkpoint is damaged", "export another step")


def _merge(data: Path, config: str | None, trained: Path, out: Path, spec: dict[str, Any]) -> None:
    """Make the Hugging Face folder in the trainer's interpreter. Raises CliError."""
    from artd.cli import in_trainer

    dtype = spec_value(spec, "engine", "dtype")
    arguments = ["--base", spec["model"], "--checkpoint", str(trained), "--out", str(out), "--dtype", dtype]
    in_trainer.call(data, config, "artd_workers.trainer.tools.export", arguments, "export")
