"""A relay between a harness and its engine's server: `relay.py PYTHON -m MODULE ... --uds SOCKET ...`.

So every engine can fail in the same ways at the same calls. This process becomes the server, on another socket (`upstream`).
Its child takes SOCKET, records each call and passes it on, or does what the folder $ARTD_RELAY says. That folder has `faults`,
JSON {ROUTE: FAULT} ("*": any route), read at each call; `calls`, one JSON line each; and `server`, the server's pid. A route is
the path, or the method of a /collective_rpc.

Of these faults the server hears nothing: a status; "hang"; "close"; "garbage" (no JSON); "odd" (JSON of another form); "drip"
(an answer byte by byte); "fine" and "false" (success and failure); {"say": ANSWER}. These are passed on: {"hold": PATH}, once
the file exists; {"shift": NATS}, which changes every prompt logprob of the answer by so much.

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
QUIET = ("/health", "/metrics")
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
        route = content["method"] if url.path == "/collective_rpc" else url.path
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
            case "fine":
                self._reply(200, b'{"results": [{}]}')
            case "false":
                self._reply(200, b'{"success": false}')
            case {"say": answer}:
                self._reply(200, json.dumps(answer).encode())
            case {"hold": path}:
                while not Path(path).exists():
                    time.sleep(0.01)
                self._pass(body)
            case {"shift": nats}:
                self._pass(body, nats)
            case _:
                self._pass(body)

    def _pass(self, body: bytes, shift: float = 0.0) -> None:
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
        self._reply(answer.status, shifted(text, shift) if shift else text)

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


def shifted(text: bytes, nats: float) -> bytes:
    """An answer with every prompt logprob off by so much."""
    reply = json.loads(text)
    for choice in reply["choices"]:
        for row in choice["prompt_logprobs"][1:]:
            for score in row.values():
                score["logprob"] += nats
    return json.dumps(reply).encode()


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
