"""A scripted engine without a model: what a fake server of any engine does behind its words (`fake_vllm`, `tests.conformance.abacus.serve`).

The file named by FAKE_VLLM holds its script (JSON): {"calls": PATH, "faults": {ROUTE: FAULT}, "start": HOW, "term": HOW,
"version": V, "shape": [LAYERS, TOPK, EXPERTS], "bytes": LOADED, "table": `EngineTable`, "room": BOOL, "warm": FIGURES}. FAULT is
an integer status, "hang", or a path: wait until that file exists (tests/conformance/relay.py has the other faults). start: a last log
line before exit 1. term: "hang" ignores SIGTERM. Every call is appended to `calls`. A token of a completion takes 10 ms. A paused server
ends no request, and one that keeps requests frees none of their blocks unless it is told to.

Updates pass the real fence of artd's extension, for the instance and spawn in its environment. A live update reads the tensors from the
trainer's side at a Unix socket (`Wire`), one from disk reads them from the checkpoint. Scores are a function of what was loaded last, so
only the right weights give the right canary (`folders.scores`).

Like a real server it has a child in its process group, its engine, and files in /dev/shm. When the engine is dead, its health says so,
and whatever needs the engine waits for ever.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from artd_schema.data.manifest import ADAPTER_FILE

sys.path.insert(0, str(Path(__file__).parents[2]))
from artd_workers.engines import checkpoint
from artd_workers.engines.adapter import Fence
from artd_workers.engines.gate import Gate
from tests.engine.folders import scores, seed_of_adapter, seed_of_table, sum64, tensors_of

SCRIPT = json.loads(Path(os.environ["FAKE_VLLM"]).read_text())
LOCK = threading.Lock()
GATE = Gate(os.environ["ARTD_INSTANCE"], int(os.environ["ARTD_SPAWN"]))
TOKEN_S = 0.01
WARM = {"forms": 28, "run": 27, "kernels": 41, "seconds": 1.5}
SERVED = sys.argv[sys.argv.index("--served-model-name") + 1] if "--served-model-name" in sys.argv else "toy"


class Unfit(Exception):
    """What arrived is not what the weight table says."""


@dataclass
class Wire:
    """The engine's end of a live push without torch: a stream of the tensors' bytes from a socket of the trainer's side."""

    path: str
    stream: socket.socket | None = None

    def read(self, table: list[list[Any]], timeout_s: float) -> Iterator[bytes]:
        """The bytes of each tensor of the table, in its order. Raises Unfit."""
        try:
            if self.stream is None:
                self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.stream.connect(self.path)
            self.stream.settimeout(timeout_s)
            for _, _, (size,), _ in table:
                raw = self.stream.recv(4 * size, socket.MSG_WAITALL)
                if len(raw) < 4 * size:
                    raise Unfit("the trainer's side has hung up")
                yield raw
        except OSError as error:
            raise Unfit(f"the trainer's side does not send: {error}") from None


@dataclass
class ServerState:
    engine: subprocess.Popen[bytes] | None = None
    weights: str = ""
    staged: str = ""
    pulled: list[bytes] | None = None
    label: str = ""
    wire: Wire = field(default_factory=lambda: Wire(""))
    expected: list[list[Any]] = field(default_factory=list)
    pull_s: float = 0.0
    polls: int = 0
    adapters: dict[str, str] = field(default_factory=dict)
    paused: bool = False
    holding: bool = True
    running: dict[threading.Event, str] = field(default_factory=dict)
    cached: set[tuple[int, ...]] = field(default_factory=set)
    hits: int = 0
    tokens: int = 0


STATE = ServerState()


class Speaker(BaseHTTPRequestHandler):
    """JSON in, JSON out. A subclass answers in the words of its engine."""

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self.serve({})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.serve(json.loads(self.rfile.read(size) or b"{}"))

    def serve(self, body: dict[str, Any]) -> None:
        raise NotImplementedError

    def reply(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def dead() -> bool:
    """Whether the engine has died, and this API server has not."""
    return STATE.engine is not None and STATE.engine.poll() is not None


def pause(mode: str, clear: bool) -> None:
    """mode: `wait` for requests, `abort` them, or `keep` them. clear: give up the cache, theirs included."""
    if mode == "wait":
        for request in list(STATE.running):
            request.wait()
    if mode != "keep":
        abort()
    STATE.paused = True
    if clear:
        STATE.cached.clear()
        STATE.holding = False


def resume() -> None:
    STATE.paused = False
    STATE.holding = True


def sweep() -> bool:
    """Drop every cached prefix, unless requests hold some."""
    if STATE.running and STATE.holding:
        return False
    STATE.cached.clear()
    return True


def require_shape(shape: list[int]) -> None:
    """Raises Unfit for routes of another shape than the script's model."""
    if shape != SCRIPT.get("shape", shape):
        raise Unfit(f"the model's shape is {SCRIPT['shape']}, not {shape}")


def load_from_disk(table: list[list[Any]], folder: str) -> None:
    stored = dict(checkpoint.tensor_hashes(Path(folder) / ADAPTER_FILE))
    load(table, (stored.get(row[0], "") for row in table))


def finish() -> dict[str, float]:
    """Take what was loaded; its figures."""
    STATE.weights = STATE.staged
    return {"bytes": SCRIPT.get("bytes", 64), "transfer": 0.01, "load": 0.001}


def direct(verb: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call of a direct push: a pull or a swap brings the weights that `expect` named, and where the trainer's side has a
    `wire` beside its offer, they come from there. Raises FenceError, Unfit."""
    match verb:
        case "table":
            return SCRIPT["table"]
        case "room":
            return {"room": SCRIPT.get("room", True)}
        case "open":
            if Path(kwargs["offer"]).read_text() == "short":
                raise Unfit("our layers.0.b: elements 0 to 7 are in no piece")
            STATE.wire = Wire(str(Path(kwargs["offer"]).with_name("wire")))
        case "expect":
            weights = json.loads(Path(kwargs["weights"]).read_text())
            STATE.expected = [[row["name"], row["dtype"], row["shape"], row["sha256"]] for row in weights["tensors"]]
        case "stage":
            GATE.admit(Fence(**kwargs["fence"]))
            STATE.polls = 0
            STATE.pull_s = kwargs["timeout_s"]
        case "staged":
            STATE.polls += 1
            if STATE.polls == 1:
                return {}
            STATE.pulled = pulled(STATE.pull_s)
            return {"copied": 0.01}
        case "pull" | "swap" as call:
            assert STATE.paused
            GATE.begin(Fence(**kwargs["fence"]), "direct")
            if call == "pull":
                STATE.pulled = pulled(kwargs["timeout_s"])
            if STATE.pulled is not None:
                verify(STATE.expected, iter(STATE.pulled))
            STATE.weights = seed_of_table(STATE.expected)
            GATE.finish("direct")
            return {"summed": 0.01}
    return {}


def pulled(timeout_s: float) -> list[bytes] | None:
    """The expected tensors, from the trainer's side where there is one. What they sum to is known when they are swapped in."""
    return list(STATE.wire.read(STATE.expected, timeout_s)) if Path(STATE.wire.path).exists() else None


def check_adapter(folder: str, table: list[list[Any]]) -> None:
    """Raises Unfit when the adapter of this folder, which must be one that is served, is not the table's."""
    file = Path(folder) / ADAPTER_FILE
    if seed_of_adapter(Path(folder)) not in STATE.adapters.values():
        raise Unfit(f"no adapter was read from {folder}")
    found = {name: sum64(sha) for name, sha in checkpoint.tensor_hashes(file)}
    if found != {row[0]: row[3] for row in table}:
        raise Unfit("tensors of the adapter are not those committed")


def load(table: list[list[Any]], source: Iterator[bytes] | Iterator[str]) -> None:
    """Take tensors for the next weights, see `verify`."""
    assert STATE.paused
    verify(table, source)
    STATE.staged = seed_of_table(table)


def verify(table: list[list[Any]], source: Iterator[bytes] | Iterator[str]) -> None:
    """source: of each tensor its bytes, or what they hash to. Raises Unfit when they are not the table's, or not all."""
    for (name, _, _, sha), found in zip(table, source, strict=True):
        if (hashlib.sha256(found).hexdigest() if isinstance(found, bytes) else found) != sha:
            raise Unfit(f"{name} arrived with other bytes than committed")
    if missing := sorted(tensors_of("merged", 0).keys() - {row[0] for row in table}):
        raise Unfit(f"{len(missing)} parameters of the model got no weights, the first is {missing[0]}")


def complete(model: str, prompts: list[list[int]], tokens: int) -> tuple[str, list[list[float]]] | None:
    """Score the prompts and, when more than one token is asked for, take the time of making them: (why it ended, scores of each prompt's
    tokens but the first). None for a model that it does not serve."""
    if model not in (SERVED, *STATE.adapters):
        return None
    assert not STATE.paused, "a paused engine answers no canary"
    seed = STATE.adapters.get(model, STATE.weights)
    reason = "length" if tokens == 1 else busy(tokens * TOKEN_S, model)
    for prompt in prompts:
        STATE.hits += tuple(prompt) in STATE.cached
        STATE.cached.add(tuple(prompt))
    return reason, [scores(seed, prompt) for prompt in prompts]


def busy(seconds: float, model: str) -> str:
    """Run for some seconds; why it ended."""
    done = threading.Event()
    STATE.running[done] = model
    aborted = done.wait(seconds)
    while (STATE.paused or stopped()) and not (aborted := done.is_set()):
        time.sleep(TOKEN_S / 10)
    del STATE.running[done]
    done.set()
    return "abort" if aborted else "length"


def abort() -> None:
    for request in list(STATE.running):
        request.set()


def stopped() -> bool:
    """Whether the engine is (SIGSTOP): then nobody computes."""
    assert STATE.engine is not None
    try:
        return Path(f"/proc/{STATE.engine.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


def compute() -> None:
    """Body of a thread: a token for each request that runs, as long as the engine does."""
    while True:
        time.sleep(TOKEN_S)
        if STATE.running and not stopped() and not STATE.paused:
            STATE.tokens += len(STATE.running)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def main(speaker: type[Speaker]) -> None:
    arguments = sys.argv[3:]
    print(f"fake server {os.getpid()}", flush=True)
    if start := SCRIPT.get("start"):
        print("\n".join(f"line {i}" for i in range(100)), flush=True)
        print(start, flush=True)
        sys.exit(1)
    if SCRIPT.get("term") == "hang":
        signal.signal(signal.SIGTERM, lambda *_: None)
    STATE.engine = subprocess.Popen(["sleep", "3600"])
    threading.Thread(target=compute, daemon=True).start()
    scratch = os.open(SCRIPT["shm"], os.O_CREAT | os.O_RDWR)
    server = Server(arguments[arguments.index("--uds") + 1], speaker)
    Path(SCRIPT["calls"] + ".env").write_text(json.dumps({"argv": arguments, "env": dict(os.environ)}))
    server.serve_forever()
    os.close(scratch)
