"""A scripted stand-in for the vLLM server, run as `FAKE -m vllm.entrypoints.openai.api_server --uds PATH ...`.

The file named by FAKE_VLLM holds its script (JSON): {"calls": PATH, "faults": {ROUTE: FAULT}, "start": HOW, "term": HOW,
"version": V, "shape": [LAYERS, TOPK, EXPERTS], "bytes": LOADED, "table": `EngineTable`, "room": BOOL, "warm": FIGURES}. FAULT
is an integer status, "hang", or a path: wait until that file exists (tests/conformance/relay.py has the other faults). start: a
last log line before exit 1. term: "hang" ignores SIGTERM. Every call is appended to `calls`. A token of a completion takes 10
ms. A paused server ends no request, and one that keeps requests frees none of their blocks unless it is told to.

Updates pass the real fence of artd's extension, for the instance and spawn in its environment. A live update reads the tensors
from the trainer's side at the Unix socket `rendezvous` (`Wire`; for stock it replaces NCCL's id), one from disk reads them from
the checkpoint. Scores are a function of what was loaded last, so only the right weights give the right canary
(`folders.scores`).

Like the real server it has a child in its process group, its engine, and files in /dev/shm. When the engine is dead, /health
says so, and whatever needs the engine waits for ever.
"""

from __future__ import annotations

import base64
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
from urllib.parse import parse_qs, urlsplit

from artd_schema.manifest import ADAPTER_FILE

sys.path.insert(0, str(Path(__file__).parents[2]))
from artd_workers.engines import checkpoint
from artd_workers.engines.adapter import EngineError, Fence
from artd_workers.engines.gate import FenceError, Gate
from artd_workers.engines.vllm import guard
from tests.engine.folders import scores, seed_of_adapter, seed_of_table, sum64, tensors_of

SCRIPT = json.loads(Path(os.environ["FAKE_VLLM"]).read_text())
LOCK = threading.Lock()
GATE = Gate(os.environ["ARTD_INSTANCE"], int(os.environ["ARTD_SPAWN"]))
TOKEN_S = 0.01
ENGINELESS = ("/health", "/metrics", "/version", guard.IN_FLIGHT)
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


class Handler(BaseHTTPRequestHandler):
    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self._serve(json.loads(self.rfile.read(size) or b"{}"))

    def _serve(self, body: dict[str, Any]) -> None:
        url = urlsplit(self.path)
        route = url.path if url.path != "/collective_rpc" else body["method"]
        if route not in ("/health", "/metrics", guard.IN_FLIGHT):
            with LOCK, open(SCRIPT["calls"], "a") as calls:
                calls.write(json.dumps({"route": route, "query": url.query, "body": body}) + "\n")
        fault = SCRIPT.get("faults", {}).get(route)
        if fault == "hang":
            time.sleep(600)
        while isinstance(fault, str) and fault.startswith("/") and not Path(fault).exists():
            time.sleep(0.01)
        if isinstance(fault, int):
            return self._reply(fault, {"error": {"message": f"scripted failure of {route}"}})
        if dead() and route == "/health":
            return self._reply(503, "")
        if dead() and route not in ENGINELESS:
            time.sleep(600)
        if why := guard.refusal(url.path, self.headers.get(guard.HEADER, "")):
            return self._reply(guard.CONFLICT, {"error": {"message": why}})
        try:
            pass_fence(route, body)
            status, reply = self._answer(route, parse_qs(url.query), body)
        except (FenceError, Unfit, EngineError) as error:
            return self._reply(500, {"error": {"message": str(error)}})
        return self._reply(status, reply)

    def _answer(self, route: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        match route:
            case "/version":
                return 200, {"version": SCRIPT.get("version", "0.32.0")}
            case "/pause":
                if query["mode"] == ["wait"]:
                    for request in list(STATE.running):
                        request.wait()
                if query["mode"] != ["keep"]:
                    abort()
                STATE.paused = True
                if query["clear_cache"] == ["true"]:
                    STATE.cached.clear()
                    STATE.holding = False
            case "/resume":
                STATE.paused = False
                STATE.holding = True
            case "/is_paused":
                return 200, {"is_paused": STATE.paused}
            case "/abort_requests":
                abort()
            case "artd_begin":
                return 200, {"results": [{}]}
            case "artd_capture_routes":
                if (shape := list(body["kwargs"].values())) != SCRIPT.get("shape", shape):
                    raise Unfit(f"the model's shape is {SCRIPT['shape']}, not {shape}")
                return 200, {"results": [{}]}
            case "artd_warm":
                return 200, {"results": [SCRIPT.get("warm", WARM)]}
            case "/init_weight_transfer_engine":
                info = body["init_info"]
                unique_id = base64.b64decode(info.get("nccl_unique_id_b64", ""))
                told = info.get("rendezvous") or unique_id.rstrip(b"\0").decode(errors="replace")
                STATE.wire = Wire(told or "nowhere: it comes over NCCL")
            case "/update_weights":
                info = body["update_info"]
                table = info.get("table", STATE.expected)
                if "names" in info and not Path(STATE.wire.path).exists():  # as if it had come over NCCL
                    load(table, (row[3] for row in table))
                    return 200, {}
                load(table, STATE.wire.read(table, info.get("timeout_s", 600.0)))
            case "artd_expect":
                STATE.expected = body["kwargs"]["table"]
                return 200, {"results": [{}]}
            case "artd_load_merged":
                kwargs = body["kwargs"]
                file = Path(kwargs["checkpoint"]) / ADAPTER_FILE
                stored = dict(checkpoint.tensor_hashes(file))
                load(kwargs["table"], (stored.get(row[0], "") for row in kwargs["table"]))
                return 200, {"results": [{}]}
            case "artd_finish":
                STATE.weights = STATE.staged
                return 200, {"results": [{"bytes": SCRIPT.get("bytes", 64), "transfer": 0.01, "load": 0.001}]}
            case _ if route.startswith("artd_direct_"):
                return 200, {"results": [direct(route, body["kwargs"])]}
            case "/update_weight_version":
                STATE.label = body["new_version"]
            case "/weight_info":
                return 200, {"weight_version": STATE.label}
            case "/reset_prefix_cache":
                if STATE.running and STATE.holding:
                    return 200, {"success": False}
                STATE.cached.clear()
                return 200, {"success": True}
            case "artd_label":
                if body["kwargs"]["owner"] != guard.own():
                    raise FenceError(f"this engine belongs to {guard.own()}")
                assert STATE.paused
                return 200, {"results": [{}]}
            case "artd_check_adapter":
                check_adapter(**body["kwargs"])
                return 200, {"results": [{"tensors": len(body["kwargs"]["table"]), "bytes": 64}]}
            case "/v1/load_lora_adapter":
                STATE.adapters[body["lora_name"]] = seed_of_adapter(Path(body["lora_path"]))
                return 200, "Success"
            case "/v1/unload_lora_adapter":
                if STATE.adapters.pop(body["lora_name"], None) is None:
                    return 404, {"error": {"message": f"no adapter {body['lora_name']}"}}
            case "/v1/completions":
                return complete(body)
            case guard.IN_FLIGHT:
                return 200, {"requests": len(STATE.running)}
            case "/metrics":
                return 200, metrics()
        return 200, {}

    def _reply(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def dead() -> bool:
    """Whether the engine has died, and this API server has not."""
    return STATE.engine is not None and STATE.engine.poll() is not None


def pass_fence(route: str, body: dict[str, Any]) -> None:
    """What artd's extension asks of every call that leads to new weights. Raises FenceError."""
    match route:
        case "artd_begin":
            GATE.begin(Fence(**body["kwargs"]["fence"]))
        case "artd_load_merged" | "artd_expect":
            GATE.check(Fence(**body["kwargs"]["fence"]))
        case "/init_weight_transfer_engine" | "/start_weight_update" | "/finish_weight_update":
            GATE.require_open()
        case "/update_weights" if "names" in body["update_info"]:
            GATE.require_open()
        case "/update_weights":
            GATE.check(Fence(**body["update_info"]["fence"]))
        case "artd_finish":
            GATE.check(Fence(**body["kwargs"]["fence"]))
            GATE.finish()


def direct(route: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The calls of a direct push: a pull or a swap brings the weights that `expect` named, and where the trainer's side has a
    `wire` beside its offer, they come from there. Raises FenceError, Unfit."""
    match route.removeprefix("artd_direct_"):
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


def complete(body: dict[str, Any]) -> tuple[int, Any]:
    """Score the prompts and, when more than one token is asked for, take the time of making them."""
    model = body["model"]
    if model not in (SERVED, *STATE.adapters):
        return 404, {"error": {"message": f"The model {model} does not exist."}}
    assert not STATE.paused, "a paused engine answers no canary"
    seed = STATE.adapters.get(model, STATE.weights)
    reason = "length" if body["max_tokens"] == 1 else busy(body["max_tokens"] * TOKEN_S, model)
    choices = []
    for index, prompt in enumerate(body["prompt"]):
        STATE.hits += tuple(prompt) in STATE.cached
        STATE.cached.add(tuple(prompt))
        rows = [{str(t): {"logprob": s}} for t, s in zip(prompt[1:], scores(seed, prompt), strict=True)]
        choices.append({"index": index, "finish_reason": reason, "prompt_logprobs": [None, *rows]})
    return 200, {"choices": choices[::-1]}


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


def metrics() -> str:
    names = ",".join(sorted(set(STATE.running.values())))
    old = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="gone@9",waiting_lora_adapters=""} 1.0\n'
    now = f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{names}",waiting_lora_adapters=""}} {time.time()}\n'
    running = f'vllm:num_requests_running{{engine="0"}} {float(len(STATE.running))}\n'
    running += f'vllm:generation_tokens_total{{engine="0"}} {float(STATE.tokens)}\n'
    return old + now + running + f'vllm:prefix_cache_hits_total{{engine="0"}} {float(STATE.hits)}\n'


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def main() -> None:
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
    server = Server(arguments[arguments.index("--uds") + 1], Handler)
    Path(SCRIPT["calls"] + ".env").write_text(json.dumps({"argv": arguments, "env": dict(os.environ)}))
    server.serve_forever()
    os.close(scratch)


if __name__ == "__main__":
    main()
