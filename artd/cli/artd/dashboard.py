"""`artd dashboard`: serves a web page over a data folder, beside its daemon or without one. It writes nothing there.

Exit codes: 0, 1 the address cannot be used, 3 no daemon ever ran there, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from pathlib import Path

from artd.cli import daemon_probe, read
from artd.cli.outcome import FAILED, OK, USAGE, CliError, at_least, shared_options

TOKEN = "ARTD_DASHBOARD_TOKEN"
SHORTEST = 16
PORT = 8420


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "dashboard",
        help="serve a web page over a data folder: curves, steps, trajectories, /metrics",
        parents=[shared_options()],
    )
    parser.add_argument(
        "folder", metavar="DATA", nargs="?", help="a data folder or a copy of one (default: --data-dir)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    parser.add_argument("--port", type=at_least(0), default=PORT, help=f"port (default {PORT}; 0: any free one)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = Path(args.folder).absolute() if args.folder else daemon_probe.data_dir(args)
    read.Database(data).close()  # an error for a folder without one
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    if len(token) < SHORTEST or not token.isascii():
        raise CliError(USAGE, f"${TOKEN} is shorter than {SHORTEST} ASCII characters", f"unset {TOKEN}: artd draws one")
    listener = _listen(args.host, args.port)
    print(f"dashboard of {data}: {_address(listener)}/?token={token}", flush=True)

    import uvicorn

    from artd.cli.dashboard.app import make_app

    config = uvicorn.Config(make_app(data, token), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])
    return OK


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises CliError(FAILED)."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise CliError(FAILED, f"cannot listen at {host}:{port}: {error}", "artd dashboard --port 0") from None


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
