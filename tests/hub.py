"""A server that speaks as much of the Hugging Face Hub as huggingface_hub needs to fetch a model. It computes digests from the
files' bytes, without artd's code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "4" + "a1" * 19 + "f"


class Hub:
    """One model, ORG/toy, with a branch `main` at COMMIT. files: name -> content; large: those stored as LFS; sent: what is
    sent in place of a file."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.large = {name for name in files if name.endswith(".safetensors")}
        self.sent: dict[str, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = urlsplit(request.path).path
        self.asked.append(f"{request.command} {path}")
        if path in ("/api/models/ORG/toy", *(f"/api/models/ORG/toy/revision/{name}" for name in ("main", COMMIT))):
            self._send(request, json.dumps(self._info()).encode(), {"Content-Type": "application/json"}, body)
            return
        prefix = f"/ORG/toy/resolve/{COMMIT}/"
        name = path.removeprefix(prefix)
        if not path.startswith(prefix) or name not in self.files:
            error = "RevisionNotFound" if "/api/models/ORG/toy/" in path else "RepoNotFound"
            request.send_response(404)
            request.send_header("X-Error-Code", error)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        content = self.files[name]
        digest = hashlib.sha256(content).hexdigest() if name in self.large else self._blob(content)
        if body:
            self.gate.wait(60)
        self._send(request, self.sent.get(name, content), {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}, body)

    def _send(self, request: BaseHTTPRequestHandler, content: bytes, headers: dict[str, str], body: bool) -> None:
        request.send_response(200)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            with contextlib.suppress(ConnectionError):  # who asked may be dead by now
                request.wfile.write(content)

    def _info(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": self._blob(content)}
            if name in self.large:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(entry)
        return {
            "id": "ORG/toy",
            "modelId": "ORG/toy",
            "sha": COMMIT,
            "siblings": siblings,
            "tags": [],
            "private": False,
        }

    @staticmethod
    def _blob(content: bytes) -> str:
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
