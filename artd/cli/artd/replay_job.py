"""`artd replay-job ID`: does a committed job again in a scratch folder, and compares every part with the committed result.

The trainer does the work, in its own interpreter and environment. The data folder is only read, with the daemon up or down. The
scratch folder is deleted; with --keep its results become DIR. Exit codes: 0 equal, 1 different (or it could not be done), 3 no
daemon ever ran here, 5 no such job or a part of it is gone, 6 the job did not succeed, its base model changed, or DIR exists,
130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from artd.cli import daemon_probe, read, show
from artd.cli.outcome import CONFLICT, FAILED, OK, CliError, at_least, shared_options
from artd.cli.package_code import copy_code
from artd.cli.replay_job import inputs
from artd.cli.replay_job import report as replay_report
from artd_schema.codec import UNREADABLE
from artd_schema.packages import RunCode
from artd_schema.wire.replay_job import ReplayReport, ReplayRequest

TAIL_LINES = 20


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "replay-job", help="do a committed job again and compare the results", parents=[shared_options()]
    )
    parser.add_argument("id", type=at_least(1), metavar="JOB", help="its number in `artctl jobs`")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep checkpoint, report and log in this new folder")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data, keep = daemon_probe.data_dir(args), args.keep.absolute() if args.keep else None
    if keep is not None and keep.exists():
        raise CliError(CONFLICT, f"{keep} exists already", "give a folder that does not exist")
    database = read.Database(data)
    try:
        row = inputs.find(database, data, args.id)
        with _scratch(keep, row["bytes"]) as scratch:
            request = inputs.request(database, data, row, scratch / "out" / "checkpoint")
            print(f"replaying job {args.id} ({row['kind']}, step {row['step']} of {row['run']}) ...", file=sys.stderr)
            report = _replay(args, data, scratch, request)
            if report.error:
                inputs.find(
                    database, data, args.id
                )  # raises if a part was deleted while it ran, which explains the error
                raise CliError(
                    FAILED, f"job {args.id} cannot be replayed: {report.error}", "artctl jobs --state succeeded"
                )
    finally:
        database.close()
    if args.json:
        replay_report.document(data, row, report, keep)
    else:
        replay_report.tell(row, report, keep)
    return FAILED if replay_report.verdict(report) == "different" else OK


# ---- the trainer's interpreter --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _scratch(keep: Path | None, size: int) -> Iterator[Path]:
    """Make a folder with `out` and `tmp`, removed at the end, after SIGTERM too. With `keep`, `out` becomes that folder."""
    parent = keep.parent if keep else Path(tempfile.gettempdir())
    try:
        parent.mkdir(parents=True, exist_ok=True)
        found = os.statvfs(parent)
        if (free := found.f_bavail * found.f_frsize) < size:
            then = "free space, set TMPDIR, or give --keep DIR on another disk"
            raise CliError(FAILED, f"the result takes {show.size(size)}, but {parent} has {show.size(free)} free", then)
        folder = Path(tempfile.mkdtemp(prefix=".artd-replay-", dir=parent))
    except OSError as error:
        raise CliError(FAILED, f"cannot make a scratch folder in {parent}: {error}", "set TMPDIR") from None
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        (folder / "out").mkdir()
        (folder / "tmp").mkdir()
        yield folder
    finally:
        if keep is not None and any((folder / "out").iterdir()):
            (folder / "out").rename(keep)
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _replay(args: argparse.Namespace, data: Path, scratch: Path, request: ReplayRequest) -> ReplayReport:
    """Run the trainer's part, with its output in a log. Raises CliError when it gives no report."""
    from artd.supervise.postmortem import explain, read_tail

    used = RunCode(request.config.loss, request.config.family).used
    command, env = _command(args, data, scratch, [copy_code(data, code, scratch) for code in used])
    log, raw = scratch / "out" / "trainer.log", msgspec.json.encode(request)
    try:
        with log.open("wb") as words:
            # In "/", `-m` finds no stray module of the user's folder.
            done = subprocess.run(
                command, input=raw, stdout=subprocess.PIPE, stderr=words, env=env, cwd="/", check=False
            )
    except OSError as error:
        raise CliError(FAILED, f"{command[0]} cannot be started: {error}", "artd doctor") from None
    if done.returncode == 130:
        raise KeyboardInterrupt
    try:
        report = msgspec.json.decode(done.stdout, type=ReplayReport)
    except UNREADABLE:
        code, tail = done.returncode, read_tail(log, 0, TAIL_LINES)
        why = explain(128 - code if code < 0 else code, tail).text
        raise CliError(FAILED, f"the replay gave no answer: {why}\n{tail}", "artd doctor") from None
    (scratch / "out" / "report.json").write_bytes(done.stdout)
    return report


def _command(args: argparse.Namespace, data: Path, scratch: Path, more: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return command line and environment of the trainer's part. `more`: folders for PYTHONPATH. Raises CliError(FAILED)."""
    from artd.cli.in_trainer import interpreter
    from artd.supervise.code import CodeError, install_code
    from artd.supervise.environment import TRAINER_EXTRA, Tags, child_environment

    python, folders = interpreter(data, getattr(args, "config", None))
    try:
        code = install_code(scratch)
    except (CodeError, OSError) as error:
        raise CliError(FAILED, f"the trainer's code cannot be copied to {scratch}: {error}") from None
    # This name is no daemon's instance, so no daemon reaps this process as its own.
    tags = Tags(instance="replay-job", boot=0, spawn=0, worker="replay-job", build=code.name, socket="")
    env = child_environment(
        os.environ, tags, code=code, tmpdir=scratch / "tmp", site_paths=[*folders, *more], extra=TRAINER_EXTRA
    )
    return [python, "-m", "artd_workers.trainer.tools.replay_job"], env
