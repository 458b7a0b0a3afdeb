"""Builds the arguments and the environment of a stock vLLM server, on a CPU or on a GPU.

Everything that differs between devices and versions is here. A flag that the installed version lacks is never given. Prefix
caching stays on (it pays for multi-turn prompts) unless hooks capture routes; `Adapter.finish` empties the cache at every
merged push, but not where requests were kept with their cache. There, and in lora mode, the gateway's salts keep epochs apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from artd_schema.paths import process_ticks
from artd_schema.run.engines import VLLM
from artd_schema.run.families import SEEDED
from artd_schema.run.spec import EngineSpec
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.engines.adapter import EngineError, Routes, model_name
from artd_workers.engines.registry import Device
from artd_workers.engines.vllm.text.middleware import MIDDLEWARE as TEXT
from artd_workers.transfer.nccl.stock import ENVIRONMENT

from .guard import MIDDLEWARE
from .parsers import TEMPLATE, Parsers
from .versions import find_installed

MODULE = "vllm.entrypoints.openai.api_server"
EXTENSION = "artd_workers.engines.vllm.extension.Extension"
CPU_BACKEND, CUDA_BACKEND = "artd_gloo", "artd_nccl"
"""Transfer backends of artd's extension: its own over gloo, and vLLM's own over NCCL behind the gate."""
MAX_LORAS = 4
"""Adapters that may run in one batch; requests of other adapters wait for a slot."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts")
"""`experts` are all of a layer's; where it is missing, vLLM takes an adapter and silently drops what it has of them. Without
the list vLLM wraps the output head too: memory for nothing, and on CPU any request for prompt logprobs (the canary) in a batch
of two then ends the engine (vLLM 0.32: einsum over requests instead of tokens)."""
NO_PARSERS = Parsers()
ROUTE_FLAGS: dict[Routes, str] = {"hooks": "--no-enable-prefix-caching", "field": "--enable-return-routed-experts"}
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, VLLM.adapter_rank)
YIELDING = frozenset(("--max-num-batched-tokens", "--gpu-memory-utilization"))
"""Flags of artd's that `engine.args` may set to something else."""
PREFILL_TOKENS: dict[Device, int] = {"cpu": 2048, "cuda": 8192}
"""The smallest --max-num-batched-tokens by device."""
_ASK = "import torch; print(torch.cuda.is_available())"
_ASK_S = 120.0


def device_of(engine: EngineSpec) -> Device:
    """Return the device on which the server will run."""
    if engine.device == "auto":
        return "cuda" if sees_gpu() else "cpu"
    return engine.device


@cache
def sees_gpu() -> bool:
    """Return whether the torch of this interpreter, which is the server's, sees a GPU. Raises EngineError.

    Another process is asked, because importing torch costs seconds and hundreds of MB.
    """
    try:
        if metadata.version("torch").endswith("+cpu"):
            return False
    except metadata.PackageNotFoundError:
        return False
    try:
        done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True, timeout=_ASK_S)
    except subprocess.SubprocessError as error:
        raise EngineError(f"torch cannot say whether there is a GPU (set engine.device): {error}") from None
    return done.stdout.strip() == "True"


def command(config: EngineConfig, socket: Path, parsers: Parsers = NO_PARSERS) -> list[str]:
    """Return the server's argument list. Raises EngineError for `engine.args` that it may not take."""
    engine, merged, device = (
        config.spec.engine,
        config.spec.rollout_weights_mode == "merged",
        device_of(config.spec.engine),
    )
    options: dict[str, Any] = {
        "--model": config.spec.model,
        "--served-model-name": model_name(config),
        "--uds": str(socket),
        "--dtype": engine.dtype,
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": engine.max_num_seqs,
        "--kv-cache-memory-bytes": engine.kv_cache_mib << 20,
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        # vLLM counts the sampled token among them: one more than the top 20 that `artctl mismatch` compares.
        "--max-logprobs": 21,
        "--worker-extension-cls": EXTENSION,
        "--middleware": MIDDLEWARE,
        "--uvicorn-log-level": "warning",
    }
    version = find_installed()
    flags = ["--enable-scale-out"] if version.scale_out_flag else []
    more_flags, more = _of_cpu(engine) if device == "cpu" else _of_cuda(engine)
    flags, options = flags + more_flags, options | more
    flags += parsers.flags()
    if engine.chat_template:
        options["--chat-template"] = socket.parent / TEMPLATE
    if config.routes is not None:
        flags.append(ROUTE_FLAGS[version.routes])
    if merged:
        options["--weight-transfer-config"] = json.dumps({"backend": CPU_BACKEND if device == "cpu" else CUDA_BACKEND})
        if device == "cuda" or (Path(config.spec.model) / SEEDED).is_file():
            # The first push is from disk and fills every tensor before anything is served: the base's own are never used.
            options["--load-format"] = "dummy"
    else:
        flags += ["--enable-lora", "--lora-target-modules", *LORA_TARGETS]
        options |= {"--max-loras": MAX_LORAS, "--max-lora-rank": lora_rank(config.spec.lora.rank)}
    flags, options = _with_args(engine, flags, options, version.series)
    # The last middleware is the outermost: a stream passes the guard under the name of the server's own route.
    words = [str(word) for pair in options.items() for word in pair]
    return [config.python, "-m", MODULE, *flags, *words, "--middleware", TEXT]


def _with_args(
    engine: EngineSpec, flags: list[str], options: dict[str, Any], series: str
) -> tuple[list[str], dict[str, Any]]:
    """Add `engine.args`. Raises EngineError for one that is not allowed, or that artd itself sets for a reason."""
    flags, options = list(flags), dict(options)
    for name, value in engine.args.items():
        flag = "--" + name.removeprefix("--")
        if refused := VLLM.arg_refusal(name, value, series):
            raise EngineError(refused)
        negative = "--no-" + flag.removeprefix("--")
        if {flag, negative} & set(flags) or (flag in options and flag not in YIELDING):
            raise EngineError(f"engine.args: artd sets {flag} itself for this engine (vLLM {series}); leave it out")
        if isinstance(value, bool):
            flags.append(flag if value else negative)
        else:
            options[flag] = value
    return flags, options


def _of_cpu(engine: EngineSpec) -> tuple[list[str], dict[str, Any]]:
    # A seeded request whose prefill is split ends vLLM 0.32 on CPU: no chunks, and every prompt fits into one batch.
    tokens = max(engine.max_model_len, PREFILL_TOKENS["cpu"])
    return ["--enforce-eager", "--no-enable-chunked-prefill"], {"--max-num-batched-tokens": tokens}


def _of_cuda(engine: EngineSpec) -> tuple[list[str], dict[str, Any]]:
    """Return the flags and options for a GPU. Nothing is compiled; decoding steps run as CUDA graphs, whose tensors pushes
    write in place."""
    graphs = {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": graph_sizes(engine.max_num_seqs),
    }  # fmt: skip
    options: dict[str, Any] = {
        "--max-num-batched-tokens": max(engine.max_num_seqs, PREFILL_TOKENS["cuda"]),
        "--compilation-config": json.dumps(graphs),
        # The size of the KV cache is given; this share must merely be free at the start, which a trainer may have taken.
        "--gpu-memory-utilization": 0.01,
        # Other backends change the layout of the experts' weights.
        "--moe-backend": "triton",
    }
    return [], options


def graph_sizes(most: int) -> list[int]:
    """Return the batch sizes up to `most` for which graphs are made; other sizes run as the next larger one."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, most, 32)}
    return sorted(size for size in sizes if size < most) + [most]


def lora_rank(rank: int) -> int:
    """Return the smallest rank that vLLM can be started with and that holds `rank`. Raises EngineError above its largest."""
    for allowed in LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise EngineError(
        f"lora.rank {rank} is more than vLLM serves ({LORA_RANKS[-1]}); use rollout_weights_mode='merged'"
    )


def environment(config: EngineConfig, scratch: Path) -> dict[str, str]:
    """Return the server's environment: the harness's own, which carries the tags by which processes are reaped, with changes."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("OMP_NUM_THREADS")}
    pid = os.getpid()
    common = {
        "TMPDIR": str(scratch),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        # Routes are kept by the worker's request names, which `row_book.owner_of` reads.
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "SPT_NOENV": "1",
        "PYTHONUNBUFFERED": "1",
        "ARTD_HARNESS_PID": str(pid),
        "ARTD_HARNESS_START": str(process_ticks(pid) or 0),
    }
    return env | common | (_CPU_ENV if device_of(config.spec.engine) == "cpu" else _CUDA_ENV)


_CPU_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    # vLLM compiles one small function of its logprobs at the first request even when eager: 21 s of C++ on two cores.
    "TORCHDYNAMO_DISABLE": "1",
}
_CUDA_ENV = {
    # FlashInfer's sampler is compiled at the first start, and nobody has checked its processed logprobs.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # vLLM 0.25 runs dense models by its new runner, which reports no routes and which nobody has checked. Sparse models use this runner anyway.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Multicast over NVLink needs rights that a container may lack, and nothing here gains by it; ENVIRONMENT has NCCL's.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
} | ENVIRONMENT
