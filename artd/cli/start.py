"""`artd start [--detach]`: become the daemon, or start one that outlives this terminal.

Owner of: DATA/logs/daemon.log. Exit codes: 0, 1 could not start (another daemon, a death at start: the log's end is
shown), 2 an artd.toml that cannot be used, 7 not ready in time, 130 interrupted or forced.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from artd_schema.paths import LOGS, read_daemon_file

from .. import config
from ..store import fs
from . import probe
from .outcome import FAILED, OK, TIMED_OUT, USAGE, CliError, shared

READY_S = 90.0
TAIL = 20


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("start", help="run the daemon in the foreground, or in the background", parents=[shared()])
    parser.add_argument("--detach", action="store_true", help="in the background; returns when it is ready")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="(default: info)")
    parser.add_argument(
        "--timeout", type=float, default=READY_S, metavar="S",
        help="with --detach: wait so many seconds until it is ready (default: %(default)g)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = load(args)
    return _detached(args, settings) if args.detach else _foreground(settings)


def load(args: argparse.Namespace) -> config.Settings:
    """Settings from flags, environment and file. Raises CliError(USAGE)."""
    try:
        return config.load(
            getattr(args, "config", None), getattr(args, "data_dir", None), getattr(args, "log_level", None)
        )
    except config.ConfigError as error:
        raise CliError(USAGE, str(error)) from None


def _foreground(settings: config.Settings) -> int:
    log = _log_file(Path(settings.data_dir))
    _log_to(log, settings.log_level)
    from .. import daemon

    return daemon.main(settings)


def _log_file(data: Path) -> Path:
    """DATA/logs/daemon.log, its folder made. Raises CliError(FAILED)."""
    os.umask(0o077)
    try:
        fs.make_dir(data / LOGS)
    except OSError as error:
        raise CliError(
            FAILED, f"the data folder {data} cannot be made: {error.strerror}", "choose another with --data-dir"
        ) from None
    return data / LOGS / "daemon.log"


def _log_to(path: Path, level: str) -> None:
    """Log to stderr and to `path`; to stderr alone where that is the same file (a detached daemon)."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if not (path.exists() and os.path.samestat(os.fstat(2), path.stat())):
        handlers.append(logging.FileHandler(path, delay=True))
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=level.upper(), handlers=handlers, datefmt="%Y-%m-%dT%H:%M:%S",
        format="%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s",
    )  # fmt: skip


def _detached(args: argparse.Namespace, settings: config.Settings) -> int:
    data = Path(settings.data_dir)
    owner = probe.daemon(data)
    if owner.running:
        pid = owner.file.pid if owner.file else "unknown"
        raise CliError(FAILED, f"a daemon already runs on {data} (pid {pid})", f"artctl status{probe.option(data)}")
    log = _log_file(data)
    command = [sys.executable, "-m", "artd.cli.main", "start", "--data-dir", str(data)]
    for option, value in (("--config", getattr(args, "config", None)), ("--log-level", args.log_level)):
        command += [option, str(Path(value).absolute()) if option == "--config" else value] if value else []
    with log.open("ab") as out:
        start = out.tell()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
        )
    end = time.monotonic() + args.timeout
    while time.monotonic() < end:
        told = read_daemon_file(data)
        if told is not None and told.pid == child.pid and told.state == "ready":
            print(f"artd runs on {data}: pid {child.pid}, gateway {told.url}, log {log}")
            return OK
        if (code := child.poll()) is not None:
            print(_tail(log, start), file=sys.stderr)
            raise CliError(FAILED, f"artd ended at start with status {code}; its last lines are above", f"less {log}")
        time.sleep(0.02)
    raise CliError(
        TIMED_OUT, f"artd (pid {child.pid}) runs but is not ready after {args.timeout:g} s",
        f"artctl logs daemon{probe.option(data)}, or artd stop{probe.option(data)}",
    )  # fmt: skip


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-TAIL:])
