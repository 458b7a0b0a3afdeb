"""`artd stop [--drain S]`: ends the daemon and waits until it is gone. A second call while it drains forces it.

It signals only the process that holds the lock, and only if its start time is the recorded one. Exit codes: 0 it is gone, or
there was none, 3 the folder is not artd's, 7 it still runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from artd.cli import daemon_probe
from artd.cli.keep import find_keeper
from artd.cli.outcome import FAILED, NOT_RUNNING, OK, TIMED_OUT, CliError, shared_options
from artd.datadir import folder
from artd_schema.paths import DaemonFile, process_ticks

FORCE_S = 20.0
_SLACK_S = 20.0
_SEEN_S = 5.0


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("stop", help="end the daemon; a second call forces it", parents=[shared_options()])
    parser.add_argument(
        "--drain",
        type=float,
        metavar="S",
        help="give workers S seconds to end, then force (default: drain_s of artd.toml)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    found, kept = daemon_probe.find_daemon(data), find_keeper(data)
    if not found.running:
        return _stop_keeper(data, kept)
    told = found.file
    if told is None:
        raise CliError(FAILED, f"a daemon holds {data}, but its lock file cannot be read", f"fuser {data}/artd.lock")
    forced = found.state == "draining"
    target = kept or told  # a keeper passes the signal on, and does not start the daemon again
    _signal(target)
    if forced:
        gone = _await_end(told, FORCE_S)
    elif args.drain is None:
        gone = _await_end(told, told.drain_s + _SLACK_S)
    else:
        _await_draining(told, data)
        gone = _await_end(told, args.drain)
        if not gone:
            forced = True
            _signal(target)
            gone = _await_end(told, FORCE_S)
    if gone and (kept is None or _await_end(kept, _SLACK_S)):
        print(f"artd (pid {told.pid}) has ended", file=sys.stderr)
        return OK
    if gone and kept is not None:
        raise _keeper_runs(data, kept)
    then = f"kill -9 {told.pid}" if forced else f"artd stop{daemon_probe.data_dir_option(data)}   (forces it)"
    raise CliError(TIMED_OUT, f"the daemon (pid {told.pid}) still runs", then)


def _stop_keeper(data: Path, kept: DaemonFile | None) -> int:
    """Handle a folder without a daemon: end a keeper that is about to start one."""
    if kept is not None:
        _signal(kept)
        if not _await_end(kept, _SLACK_S):
            raise _keeper_runs(data, kept)
    elif not folder.is_free(data):
        try:
            folder.require_database(data)
        except folder.Refused as error:
            raise CliError(NOT_RUNNING, f"no daemon runs on {data}: {error}", "artd stop --data-dir DATA") from None
    print(f"no daemon runs on {data}", file=sys.stderr)
    return OK


def _keeper_runs(data: Path, kept: DaemonFile) -> CliError:
    return CliError(TIMED_OUT, f"the keeper (pid {kept.pid}) of {data} still runs", f"kill -9 {kept.pid}")


def _signal(told: DaemonFile) -> None:
    """Send SIGTERM to exactly that process. After its start time was read through the pidfd, the pidfd cannot mean another
    process."""
    try:
        handle = os.pidfd_open(told.pid)
    except ProcessLookupError:
        return
    try:
        if process_ticks(told.pid) == told.ticks:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def _await_draining(told: DaemonFile, data: Path) -> None:
    """Wait until the daemon has seen the first signal; the kernel would merge an earlier second signal with it."""
    end = time.monotonic() + _SEEN_S
    while (
        process_ticks(told.pid) == told.ticks
        and daemon_probe.find_daemon(data).state != "draining"
        and time.monotonic() < end
    ):
        time.sleep(0.02)


def _await_end(told: DaemonFile, patience_s: float) -> bool:
    """Wait for the process to end. Returns whether it did in time."""
    end = time.monotonic() + patience_s
    while process_ticks(told.pid) == told.ticks:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
