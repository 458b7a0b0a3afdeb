"""A scripted stand-in for the vLLM server, run as `FAKE -m vllm.entrypoints.openai.api_server --uds PATH ...`.

The file named by FAKE_VLLM holds its script (JSON): {"calls": PATH, "faults": {ROUTE: FAULT}, "start": HOW, "term": HOW}.
FAULT: an integer status, "hang", "die", "wrong" (scores off by 1e-3), "false", or a path: wait until that file is there. start: a last log line before
exit 1. term: "hang" ignores SIGTERM. Every call is appended to `calls`. `running` requests are those to /busy (seconds).
Updates pass the real fence of artd's extension, for the instance and spawn in its environment. Its scores are a function of what was loaded last, so that only the right weights give the right canary (`folders.scores`).
Like the real one it has a child in its process group and files in /dev/shm.
"""

from __future__ import annotations

import json
import os
import signal
import socketserver
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

sys.path.insert(0, str(Path(__file__).parent))
from folders import scores, seed_of_adapter, seed_of_table

from artd_workers.engines.base import Fence
from artd_workers.engines.fence import FenceError, Gate

SCRIPT = json.loads(Path(os.environ["FAKE_VLLM"]).read_text())
LOCK = threading.Lock()
GATE = Gate(os.environ["ARTD_INSTANCE"], int(os.environ["ARTD_SPAWN"]))


@dataclass
class ServerState:
    weights: str = ""
    staged: str = ""
    adapters: dict[str, str] = field(default_factory=dict)
    paused: bool = False
    running: list[threading.Event] = field(default_factory=list)
    lora_running: set[str] = field(default_factory=set)


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
        if route not in ("/health", "/metrics"):
            with LOCK, open(SCRIPT["calls"], "a") as calls:
                calls.write(json.dumps({"route": route, "query": url.query, "body": body}) + "\n")
        fault = SCRIPT.get("faults", {}).get(route)
        if fault == "hang":
            time.sleep(600)
        if fault == "die":
            print("RuntimeError: the worker fell over", flush=True)
            os._exit(3)
        while isinstance(fault, str) and fault.startswith("/") and not Path(fault).exists():
            time.sleep(0.01)
        if isinstance(fault, int):
            return self._reply(fault, {"error": {"message": f"scripted failure of {route}"}})
        try:
            pass_fence(route, body)
        except FenceError as error:
            return self._reply(500, {"error": {"message": str(error)}})
        status, reply = self._answer(route, parse_qs(url.query), body, fault)
        return self._reply(status, reply)

    def _answer(self, route: str, query: dict[str, list[str]], body: dict[str, Any], fault: Any) -> tuple[int, Any]:
        match route:
            case "/version":
                return 200, {"version": SCRIPT.get("version", "0.32.0")}
            case "/pause":
                if query["mode"] == ["wait"]:
                    for request in list(STATE.running):
                        request.wait()
                abort()
                STATE.paused = True
            case "/resume":
                STATE.paused = False
            case "/abort_requests":
                abort()
            case "artd_begin" | "artd_capture_routes":
                return 200, {"results": [{}]}
            case "/update_weights":
                assert STATE.paused
                STATE.staged = seed_of_table(body["update_info"]["table"])
            case "artd_load_merged":
                assert STATE.paused
                STATE.staged = seed_of_table(body["kwargs"]["table"])
                return 200, {"results": [{}]}
            case "artd_finish":
                STATE.weights = STATE.staged
                return 200, {"results": [{"bytes": SCRIPT.get("bytes", 64), "transfer": 0.01, "load": 0.001}]}
            case "/reset_prefix_cache":
                return 200, {"success": fault != "false"}
            case "/v1/load_lora_adapter":
                STATE.adapters[body["lora_name"]] = seed_of_adapter(Path(body["lora_path"]))
                return 200, "Success"
            case "/v1/unload_lora_adapter":
                del STATE.adapters[body["lora_name"]]
            case "/v1/completions":
                return self._score(body, fault)
            case "/busy":
                return 200, {"aborted": busy(body["seconds"], body.get("model", ""))}
            case "/metrics":
                return 200, metrics()
        return 200, {}

    def _score(self, body: dict[str, Any], fault: Any) -> tuple[int, Any]:
        assert not STATE.paused, "a paused engine answers no canary"
        seed = STATE.adapters.get(body["model"], STATE.weights)
        offset = 1e-3 if fault == "wrong" else 0.0
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            rows = [{str(t): {"logprob": s + offset}} for t, s in zip(prompt[1:], scores(seed, prompt), strict=True)]
            choices.append({"index": index, "prompt_logprobs": [None, *rows]})
        return 200, {"choices": choices[::-1]}

    def _reply(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def pass_fence(route: str, body: dict[str, Any]) -> None:
    """What artd's extension asks of every call that leads to new weights. Raises FenceError."""
    match route:
        case "artd_begin":
            GATE.begin(Fence(**body["kwargs"]["fence"]))
        case "artd_load_merged":
            GATE.check(Fence(**body["kwargs"]["fence"]))
        case "/init_weight_transfer_engine" | "/start_weight_update" | "/finish_weight_update":
            GATE.require_open()
        case "/update_weights":
            GATE.check(Fence(**body["update_info"]["fence"]))
        case "artd_finish":
            GATE.check(Fence(**body["kwargs"]["fence"]))
            GATE.finish()


def busy(seconds: float, model: str) -> bool:
    done = threading.Event()
    STATE.running.append(done)
    STATE.lora_running.add(model)
    aborted = done.wait(seconds)
    STATE.lora_running.discard(model)
    STATE.running.remove(done)
    done.set()
    return aborted


def abort() -> None:
    for request in list(STATE.running):
        request.set()


def metrics() -> str:
    names = ",".join(sorted(STATE.lora_running))
    old = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="gone@9",waiting_lora_adapters=""} 1.0\n'
    now = f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{names}",waiting_lora_adapters=""}} {time.time()}\n'
    return old + now


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
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "300"])
    scratch = os.open(SCRIPT["shm"], os.O_CREAT | os.O_RDWR)
    server = Server(arguments[arguments.index("--uds") + 1], Handler)
    Path(SCRIPT["calls"] + ".env").write_text(json.dumps({"argv": arguments, "env": dict(os.environ)}))
    server.serve_forever()
    os.close(scratch)


if __name__ == "__main__":
    main()
