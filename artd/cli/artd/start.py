"""`artd start [--detach]`: becomes the daemon, or starts one that outlives this terminal.

It writes DATA/logs/daemon.log. Exit codes: 0, 1 could not start (another daemon runs, the folder is not artd's, or the daemon
died, in which case the log's end is shown), 2 artd.toml cannot be used, 6 `--restart` while a daemon or its keeper runs, 7 not
ready in time, 130 interrupted or forced.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from artd import config
from artd.cli import daemon_probe
from artd.cli.keep import find_keeper, keep
from artd.cli.outcome import CONFLICT, FAILED, OK, TIMED_OUT, USAGE, CliError, seconds, shared_options
from artd.datadir import folder
from artd.store import fs
from artd.supervise.guardian import read_stat
from artd_schema.paths import LOGS, read_daemon_file

READY_S = 90.0
TAIL = 20


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "start", help="run the daemon in the foreground, or in the background", parents=[shared_options()]
    )
    parser.add_argument("--detach", action="store_true", help="run in the background; return when it is ready")
    parser.add_argument(
        "--restart", action="store_true", help="start the daemon again when it dies, with pauses and a limit"
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="(default: info)")
    parser.add_argument(
        "--timeout", type=seconds, default=READY_S, metavar="S",
        help="with --detach: wait so many seconds until it is ready (default: %(default)g)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = load(args)
    if args.detach:
        return _start_detached(args, settings)
    if args.restart:
        return _run_kept(args, settings)
    return _foreground(settings)


def load(args: argparse.Namespace) -> config.Settings:
    """Load settings from flags, environment and file. Raises CliError(USAGE)."""
    try:
        return config.load(
            getattr(args, "config", None), getattr(args, "data_dir", None), getattr(args, "log_level", None)
        )
    except config.ConfigError as error:
        raise CliError(USAGE, str(error)) from None


def _run_kept(args: argparse.Namespace, settings: config.Settings) -> int:
    """Run the daemon under a keeper. Raises CliError(CONFLICT) when a daemon or another keeper runs."""
    data = Path(settings.data_dir)
    owner, kept = daemon_probe.find_daemon(data), find_keeper(data)
    if owner.running or kept:
        raise CliError(
            CONFLICT, f"a daemon, or its keeper, runs on {data}", f"artctl status{daemon_probe.data_dir_option(data)}"
        )
    _log_file(data)
    return keep(_command(args, settings), data)


def _foreground(settings: config.Settings) -> int:
    log = _log_file(Path(settings.data_dir))
    _log_to(log, settings.log_level)
    from artd import daemon

    return daemon.main(settings)


def _log_file(data: Path) -> Path:
    """Return DATA/logs/daemon.log and make its folder. Raises CliError(FAILED)."""
    os.umask(0o077)
    try:
        folder.take(data)
        fs.make_dir(data / LOGS)
    except folder.Refused as error:
        raise CliError(FAILED, str(error), error.next) from None
    except OSError as error:
        raise CliError(
            FAILED, f"the data folder {data} cannot be made: {error.strerror}", "choose another with --data-dir"
        ) from None
    return data / LOGS / "daemon.log"


def _log_to(path: Path, level: str) -> None:
    """Log to stderr and to `path`, or to stderr alone when both are the same file, as in a detached daemon."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if not (path.exists() and os.path.samestat(os.fstat(2), path.stat())):
        handlers.append(logging.FileHandler(path, delay=True))
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=level.upper(), handlers=handlers, datefmt="%Y-%m-%dT%H:%M:%S",
        format="%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s",
    )  # fmt: skip


def _command(args: argparse.Namespace, settings: config.Settings, *more: str) -> list[str]:
    """Return the command line of a daemon in the foreground of its own process."""
    command = [sys.executable, "-m", "artd.cli.main", "start", *more, "--data-dir", settings.data_dir]
    for option, value in (("--config", getattr(args, "config", None)), ("--log-level", args.log_level)):
        command += [option, str(Path(value).absolute()) if option == "--config" else value] if value else []
    return command


def _start_detached(args: argparse.Namespace, settings: config.Settings) -> int:
    data = Path(settings.data_dir)
    owner, kept = daemon_probe.find_daemon(data), find_keeper(data)
    if owner.state == "draining":
        pid = owner.file.pid if owner.file else "unknown"
        raise CliError(
            CONFLICT,
            f"the daemon on {data} (pid {pid}) is stopping",
            f"artctl status{daemon_probe.data_dir_option(data)}",
        )
    if owner.running or kept:  # a daemon is there, or its keeper is about to start one
        return _await_ready(args, data, data / LOGS / "daemon.log", None, 0)
    log = _log_file(data)
    with log.open("ab") as out:
        start = out.tell()
        child = subprocess.Popen(
            _command(args, settings, *(["--restart"] if args.restart else [])),
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/",
        )  # fmt: skip
    return _await_ready(args, data, log, child, start)


def _await_ready(
    args: argparse.Namespace, data: Path, log: Path, child: subprocess.Popen[bytes] | None, start: int
) -> int:
    """Wait until the daemon is ready. `child`: the daemon or keeper that was just started, None when one was running."""
    end = time.monotonic() + args.timeout
    while time.monotonic() < end:
        told = read_daemon_file(data)
        if (
            told is not None
            and told.state == "ready"
            and (told.alive() if child is None else _is_started_by(child, told.pid))
        ):
            runs = "runs" if child else "runs already"
            print(f"artd {runs} on {data}: pid {told.pid}, gateway {told.url}, log {log}")
            return OK
        if child is not None and (code := child.poll()) is not None:
            print(_tail(log, start), file=sys.stderr)
            raise CliError(FAILED, f"artd ended at start with status {code}; its last lines are above", f"less {log}")
        time.sleep(0.02)
    raise CliError(
        TIMED_OUT, f"artd (pid {child.pid if child else 'unknown'}) runs but is not ready after {args.timeout:g} s",
        f"artctl logs daemon{daemon_probe.data_dir_option(data)}, or artd stop{daemon_probe.data_dir_option(data)}",
    )  # fmt: skip


def _is_started_by(child: subprocess.Popen[bytes], pid: int) -> bool:
    """Return whether the daemon `pid` is `child`, or was started by it as a keeper."""
    return pid == child.pid or ((stat := read_stat(pid)) is not None and stat.ppid == child.pid)


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-TAIL:])
