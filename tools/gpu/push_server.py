"""A stock vLLM server with the direct push in its worker, and what the script asks of it. Owner of: that server."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from artd_schema.paths import process_ticks
from artd_workers.engines.vllm.command import CUDA_BACKEND

ROOT = Path(__file__).resolve().parents[2]


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """config.json and a tokenizer made on the spot; weights are drawn on the GPU and pushed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    more = {"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config | more))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(config["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t3"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


def visible(gpu: int) -> str:
    """The GPU of this number among those that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return seen.split(",")[gpu] if seen else str(gpu)


class Server:
    """Started at once; `ready` waits. gpu: its index; share: of the GPU's memory for weights and KV cache; sleeps: weights and KV
    cache lie in the pool of vLLM's sleep mode."""

    def __init__(self, model: Path, gpu: int, share: float, log: Path, sleeps: bool = False) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        path = os.pathsep.join(
            [*(str(ROOT / part) for part in ("", "workers", "schema")), os.environ.get("PYTHONPATH", "")]
        )
        env = os.environ | {
            "CUDA_VISIBLE_DEVICES": visible(gpu), "VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "ARTD_INSTANCE": "i", "ARTD_SPAWN": "1", "PYTHONPATH": path,
            "ARTD_HARNESS_PID": str(os.getpid()), "ARTD_HARNESS_START": str(process_ticks(os.getpid())),
        }  # fmt: skip
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
        options = {
            "--model": model, "--port": self.port, "--host": "127.0.0.1", "--load-format": "dummy", "--max-model-len": 4096,
            "--max-num-seqs": 32, "--gpu-memory-utilization": share, "--served-model-name": "m", "--moe-backend": "triton",
            "--compilation-config": json.dumps(graphs), "--worker-extension-cls": "tools.gpu.push_probe.Probe",
            "--logprobs-mode": "processed_logprobs",
            "--weight-transfer-config": json.dumps({"backend": CUDA_BACKEND}),
        }  # fmt: skip
        words = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *(str(w) for pair in options.items() for w in pair),
            *(["--enable-sleep-mode"] if sleeps else []),
        ]
        with log.open("a") as file:
            self._process = subprocess.Popen(
                words, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ready(self, timeout_s: float = 240) -> None:
        end = time.monotonic() + timeout_s
        while True:
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the vLLM server did not start: see its log")
            try:
                self.call("/health", timeout=2)
                return
            except (OSError, RuntimeError):
                time.sleep(0.25)

    def call(self, path: str, body: Any = None, timeout: float = 120) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        payload = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, payload, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        if reply.status != 200:
            raise RuntimeError(f"{path} {reply.status} {text[:600].decode(errors='replace')}")
        return json.loads(text) if text else {}

    def rpc(self, method: str, *args: Any) -> Any:
        return self.call("/collective_rpc", {"method": method, "args": list(args)})["results"][0]

    def pause(self, keep_kv: bool = False) -> None:
        self.call(f"/pause?mode=keep&clear_cache={'false' if keep_kv else 'true'}", {})

    def resume(self) -> None:
        self.call("/resume", {})

    def logprobs(self, prompts: list[list[int]], tokens: int = 16) -> list[float]:
        """Of greedy tokens, whatever is cached."""
        out: list[float] = []
        for prompt in prompts:
            body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "ignore_eos": True,
                    "cache_salt": str(time.time_ns())}  # fmt: skip
            out += self.call("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
        return out

    def scored(self, prompts: list[list[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
        """Each prompt with an answer of so many tokens, drawn with a seed; the logprob of every token but the first."""
        out = []
        for seed, prompt in enumerate(prompts):
            body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "seed": seed, "logprobs": 0,
                    "prompt_logprobs": 0, "ignore_eos": True, "return_token_ids": True, "cache_salt": str(time.time_ns())}  # fmt: skip
            (choice,) = self.call("/v1/completions", body)["choices"]
            rows = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
            read = [row[str(token)]["logprob"] for row, token in rows]
            out.append((prompt + choice["token_ids"], read + choice["logprobs"]["token_logprobs"]))
        return out

    def stream(self, prompt: list[int], tokens: int) -> Stream:
        return Stream(self.port, prompt, tokens)

    def sleep(self, level: int) -> None:
        self.call(f"/sleep?level={level}", {})

    def wake(self) -> None:
        self.call("/wake_up", {})

    def stop(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()


class Stream(threading.Thread):
    """One streaming request; `at`: clock readings of its tokens."""

    def __init__(self, port: int, prompt: list[int], tokens: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
        }
        self.at: list[float] = []
        self._ended = False
        self.start()

    def stop(self) -> None:
        """Hang up: the server ends the request."""
        self._ended = True
        self.join(30)

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(self._body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                self.at.append(time.perf_counter())
            if self._ended:
                break
        connection.close()
