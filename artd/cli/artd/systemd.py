"""`artd systemd`: prints a unit file that starts this very installation on this data folder. It writes and enables nothing."""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path

from artd.cli.outcome import OK, shared_options

from .start import load

UNIT = """\
# {command}
[Unit]
Description=artd on {data}
After=network-online.target
StartLimitIntervalSec=600
StartLimitBurst=10

[Service]
Type=notify
NotifyAccess=main{user}
ExecStart={start}
Restart=on-failure
RestartSec=2
# A refused start (usage, settings) is the same at the next one.
RestartPreventExitStatus=2
TimeoutStartSec=15min
WatchdogSec=30
# SIGTERM is the daemon's alone: it ends its workers itself, within drain_s.
KillMode=mixed
TimeoutStopSec={stop:.0f}
LimitNOFILE=524288
# A trainer that the kernel kills for want of memory is the daemon's business.
OOMPolicy=continue
UMask=0077

[Install]
WantedBy={target}
"""


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("systemd", help="print a unit file for systemd", parents=[shared_options()])
    parser.add_argument(
        "--system",
        action="store_true",
        help="for the machine's manager, running as you; without it: for your own (--user)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = load(args)
    words = [sys.executable, "-m", "artd.cli.main", "start", "--data-dir", settings.data_dir]
    if config := getattr(args, "config", None):
        words += ["--config", str(Path(config).absolute())]
    print(
        UNIT.format(
            command="artd systemd --system" if args.system else "artd systemd",
            data=settings.data_dir,
            user=f"\nUser={getpass.getuser()}" if args.system else "",
            start=" ".join(map(_quote, words)),
            stop=settings.drain_s + 30.0,
            target="multi-user.target" if args.system else "default.target",
        ),
        end="",
    )
    return OK


def _quote(word: str) -> str:
    """Quote a word for systemd, where `%` begins a specifier and `$` a variable."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{plain}"' if plain != word or any(letter.isspace() for letter in word) else word
