"""A scripted stand-in for the vLLM server, run as `FAKE -m vllm.entrypoints.openai.api_server --uds PATH ...` (`scripted`: its script).

What a stock push would bring over NCCL is taken to be there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

sys.path.insert(0, str(Path(__file__).parents[2]))
from artd_workers.engines.adapter import EngineError, Fence
from artd_workers.engines.gate import FenceError
from artd_workers.engines.vllm import guard
from tests.engine import scripted
from tests.engine.folders import seed_of_adapter
from tests.engine.scripted import GATE, LOCK, SCRIPT, STATE, Speaker, Unfit, Wire

ENGINELESS = ("/health", "/metrics", "/version", guard.IN_FLIGHT)


class Handler(Speaker):
    def serve(self, body: dict[str, Any]) -> None:
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
            return self.reply(fault, {"error": {"message": f"scripted failure of {route}"}})
        if scripted.dead() and route == "/health":
            return self.reply(503, "")
        if scripted.dead() and route not in ENGINELESS:
            time.sleep(600)
        if why := guard.refusal(url.path, self.headers.get(guard.HEADER, "")):
            return self.reply(guard.CONFLICT, {"error": {"message": why}})
        try:
            pass_fence(route, body)
            status, reply = self._answer(route, parse_qs(url.query), body)
        except (FenceError, Unfit, EngineError) as error:
            return self.reply(500, {"error": {"message": str(error)}})
        return self.reply(status, reply)

    def _answer(self, route: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        match route:
            case "/version":
                return 200, {"version": SCRIPT.get("version", "0.32.0")}
            case "/pause":
                scripted.pause(query["mode"][0], query["clear_cache"] == ["true"])
            case "/resume":
                scripted.resume()
            case "/is_paused":
                return 200, {"is_paused": STATE.paused}
            case "/abort_requests":
                scripted.abort()
            case "artd_begin":
                return 200, {"results": [{}]}
            case "artd_capture_routes":
                scripted.require_shape(list(body["kwargs"].values()))
                return 200, {"results": [{}]}
            case "artd_warm":
                return 200, {"results": [SCRIPT.get("warm", scripted.WARM)]}
            case "/init_weight_transfer_engine":
                info = body["init_info"]
                STATE.wire = Wire(info.get("rendezvous", "nowhere: it comes over NCCL"))
            case "/update_weights":
                info = body["update_info"]
                table = info.get("table", STATE.expected)
                if "names" in info and not Path(STATE.wire.path).exists():  # as if it had come over NCCL
                    scripted.load(table, (row[3] for row in table))
                    return 200, {}
                scripted.load(table, STATE.wire.read(table, info.get("timeout_s", 600.0)))
            case "artd_expect":
                STATE.expected = body["kwargs"]["table"]
                return 200, {"results": [{}]}
            case "artd_load_merged":
                scripted.load_from_disk(body["kwargs"]["table"], body["kwargs"]["checkpoint"])
                return 200, {"results": [{}]}
            case "artd_finish":
                return 200, {"results": [scripted.finish()]}
            case _ if route.startswith("artd_direct_"):
                return 200, {"results": [scripted.direct(route.removeprefix("artd_direct_"), body["kwargs"])]}
            case "/update_weight_version":
                STATE.label = body["new_version"]
            case "/weight_info":
                return 200, {"weight_version": STATE.label}
            case "/reset_prefix_cache":
                return 200, {"success": scripted.sweep()}
            case "artd_label":
                if body["kwargs"]["owner"] != guard.own():
                    raise FenceError(f"this engine belongs to {guard.own()}")
                assert STATE.paused
                return 200, {"results": [{}]}
            case "artd_check_adapter":
                scripted.check_adapter(**body["kwargs"])
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


def complete(body: dict[str, Any]) -> tuple[int, Any]:
    model = body["model"]
    if (found := scripted.complete(model, body["prompt"], body["max_tokens"])) is None:
        return 404, {"error": {"message": f"The model {model} does not exist."}}
    reason, scored = found
    choices = []
    for index, (prompt, row) in enumerate(zip(body["prompt"], scored, strict=True)):
        told = [{str(token): {"logprob": score}} for token, score in zip(prompt[1:], row, strict=True)]
        choices.append({"index": index, "finish_reason": reason, "prompt_logprobs": [None, *told]})
    return 200, {"choices": choices[::-1]}


def metrics() -> str:
    names = ",".join(sorted(set(STATE.running.values())))
    old = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="gone@9",waiting_lora_adapters=""} 1.0\n'
    now = f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{names}",waiting_lora_adapters=""}} {time.time()}\n'
    running = f'vllm:num_requests_running{{engine="0"}} {float(len(STATE.running))}\n'
    running += f'vllm:generation_tokens_total{{engine="0"}} {float(STATE.tokens)}\n'
    return old + now + running + f'vllm:prefix_cache_hits_total{{engine="0"}} {float(STATE.hits)}\n'


if __name__ == "__main__":
    scripted.main(Handler)
