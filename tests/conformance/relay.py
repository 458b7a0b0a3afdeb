"""A relay between a harness and its engine's server: `relay.py PYTHON -m MODULE ... --uds SOCKET ...`.

So every engine can fail in the same ways at the same calls. This process becomes the server, on another socket (`upstream`).
Its child takes SOCKET, records each call and passes it on, or does what the folder $ARTD_RELAY says. That folder has `faults`,
JSON {ROUTE: FAULT} ("*": any route), read at each call; `calls`, one JSON line each; and `server`, the server's pid. A route is
the path, or the `method` of a body that names one. Routes of $ARTD_RELAY_QUIET are not recorded, and "*" does not mean them.

Of these faults the server hears nothing: a status; "hang"; "close"; "garbage" (no JSON); "odd" (JSON of another form); "drip"
(an answer byte by byte); {"say": ANSWER}. These are passed on: {"hold": PATH}, once the file exists; {"shift": NATS, "key": KEY},
which changes every number under this key of the answer by so much.

It uses only the standard library, because it runs with any engine's interpreter, and it dies with the server.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FOLDER = Path(os.environ["ARTD_RELAY"])
PR_SET_PDEATHSIG = 1
QUIET = os.environ["ARTD_RELAY_QUIET"].split(",")
_LOCK = threading.Lock()


class Upstream(http.client.HTTPConnection):
    """A connection to the server behind the relay."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(FOLDER / "upstream"))


class Handler(BaseHTTPRequestHandler):
    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _serve(self, body: bytes) -> None:
        url = urlsplit(self.path)
        content = json.loads(body) if body else {}
        route = content.get("method", url.path)
        if route not in QUIET:
            note({"route": route, "query": url.query, "body": content})
        match fault_of(route):
            case int(status):
                self._reply(status, b'{"error": {"message": "scripted failure"}}')
            case "hang":
                time.sleep(600)
            case "close":
                self.connection.shutdown(socket.SHUT_RDWR)
            case "garbage":
                self._reply(200, b'{"results": [{"bytes":')
            case "odd":
                self._reply(200, b'["odd"]')
            case "drip":
                self._drip()
            case {"say": answer}:
                self._reply(200, json.dumps(answer).encode())
            case {"hold": path}:
                while not Path(path).exists():
                    time.sleep(0.01)
                self._pass(body)
            case {"shift": nats, "key": key}:
                self._pass(body, nats, key)
            case _:
                self._pass(body)

    def _pass(self, body: bytes, shift: float = 0.0, key: str = "") -> None:
        upstream = Upstream("localhost")
        try:
            upstream.request(self.command, self.path, body or None, dict(self.headers))
            answer = upstream.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException):
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        finally:
            upstream.close()
        self._reply(answer.status, json.dumps(shifted(json.loads(text), shift, key)).encode() if shift else text)

    def _reply(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _drip(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        for _ in range(400):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.05)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            return  # the other side has hung up


class Relay(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


def fault_of(route: str) -> Any:
    """What the folder says of a route now (None: nothing)."""
    faults = json.loads((FOLDER / "faults").read_text())
    return faults.get(route, None if route in QUIET else faults.get("*"))


def note(call: dict[str, Any]) -> None:
    with _LOCK, open(FOLDER / "calls", "a") as calls:
        calls.write(json.dumps(call) + "\n")


def shifted(value: Any, nats: float, key: str, under: bool = False) -> Any:
    """An answer with every number under this key off by so much."""
    if isinstance(value, dict):
        return {name: shifted(one, nats, key, under or name == key) for name, one in value.items()}
    if isinstance(value, list):
        return [shifted(one, nats, key, under) for one in value]
    return value + nats if under and isinstance(value, float) else value


def main() -> None:
    argv = sys.argv[1:]
    place = argv.index("--uds") + 1
    path, argv[place] = argv[place], str(FOLDER / "upstream")
    server = os.getpid()
    (FOLDER / "server").write_text(str(server))
    relay = Relay(path, Handler)
    if os.fork():
        relay.socket.close()
        os.execv(argv[0], argv)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == server:
        relay.serve_forever()


if __name__ == "__main__":
    main()
