"""artd itself on GPUs, end to end: `python -m tools.gpu.loop [--layers 4] [--steps 3] [--gpus 2] [--out DIR] [--tiny]`.
`--transfer nccl`, `--in-flight keep`, `--spec JSON`, `--tensor-parallel 2`, `--parameters full` go into the run's spec. The trainer has the first GPUs, the engine the last one.

Purpose: daemon, gateway, trainer and a stock vLLM server on a model of real layer shape whose weights are drawn: rollouts
through the OpenAI API, expert replay, train steps, pushes in merged mode. One JSON line for each thing seen, appended to
DIR/loop.jsonl as soon as it is known; a `phase` line has the seconds since the one before it. `--tiny`: the same on a CPU, with the installed runtimes.
Owner of: a data folder, a base model and, with --stack, a virtual environment, all in a temporary folder. What was served is
told by the replies; that nothing is left behind, by /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from site import getsitepackages
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CODE = [str(ROOT / part) for part in ("", "schema", "workers", "client")]
sys.path[:0] = [part for part in CODE if part not in sys.path]

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def passed(args: argparse.Namespace) -> float:
    """Seconds since the start."""
    return time.monotonic() - args.began


def say(args: argparse.Namespace, what: str, **values: Any) -> None:
    line = {"what": what, "at": round(passed(args), 2), **values}
    print(json.dumps(line), flush=True)
    with (args.out / "loop.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


# ---- the daemon and its parts -----------------------------------------------------------------------------------------


def daemon_python(args: argparse.Namespace) -> str:
    """An interpreter that has the daemon's packages: this one, or a virtual environment above the unpacked stack."""
    if not args.stack:
        return sys.executable
    venv = args.folder / "venv"
    command = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(venv)]
    subprocess.run(command, check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "artd.pth").write_text("\n".join([*CODE, f"{args.stack}/vllm", *getsitepackages()]) + "\n")
    return str(venv / "bin/python")


def base_model(args: argparse.Namespace) -> Path:
    """Config, tokenizer and seed; drawn by an interpreter that has torch."""
    folder, python, path = args.folder / "base", sys.executable, [*CODE, f"{args.stack}/vllm"]
    if not args.stack:
        from artd.runtimes import registry

        found = registry.find("megatron")
        python, path = str(found.python), [*CODE, *found.site_paths]
    size = [str(args.layers), args.family, *(["tiny"] if args.tiny else [])]
    words = [python, "-m", "tools.gpu.shape", str(folder), *size]
    subprocess.run(words, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)})
    return folder


def settings(args: argparse.Namespace) -> list[str]:
    """Flags of `artd`; with --stack a file that names interpreters and GPUs."""
    flags = ["--data-dir", str(args.folder / "data")]
    if not args.stack:
        return flags
    config = args.folder / "artd.toml"
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = [int(gpu) for gpu in seen.split(",")] if seen else list(range(args.gpus))
    trainer = [f"{args.stack}/te", f"{args.stack}/megatron"]
    config.write_text(
        f"[gpus]\ntrainer = {gpus[: args.tensor_parallel]}\nengine = [{gpus[args.gpus - 1]}]\n"
        f'[runtimes.trainer]\npython = "{sys.executable}"\npythonpath = {json.dumps(trainer)}\n'
        f'[runtimes.engine]\npython = "{sys.executable}"\npythonpath = ["{args.stack}/vllm"]\n'
    )
    return [*flags, "--config", str(config)]


def spec(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    engine: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 32, "kv_cache_mib": 64 if args.tiny else 4096}
    common = {"model": str(model), "parameters": args.parameters, "rollout_weights_mode": "merged", "group_size": args.group,
              "groups_per_step": args.groups, "row_length": 1024, "optimizer": {"lr": args.lr}, "keep_checkpoints": 2}  # fmt: skip
    engine["in_flight"], trainer = args.in_flight, {"tensor_parallel": args.tensor_parallel}
    if not args.tiny:
        trainer |= {"device": "cuda", "dtype": "bfloat16", "recompute": "full" if args.layers > 8 else "none"}
        engine |= {"dtype": "bfloat16", "device": "cuda", "transfer": args.transfer}
    return common | {"engine": engine, "trainer": trainer} | json.loads(args.spec)


# ---- what a user does -------------------------------------------------------------------------------------------------


async def group(args: argparse.Namespace, run: Any, openai: Any, name: str, vocab: int) -> set[str]:
    """One prompt, several answers, each submitted with its reward; returns the policies that answered."""
    chosen = random.Random(name)
    response = await openai.completions.create(
        model=run.model, prompt=[chosen.randrange(vocab) for _ in range(args.prompt)], n=args.group, temperature=1.0,
        seed=chosen.randrange(1 << 30), max_tokens=args.answer, extra_body={"return_token_ids": True},
    )  # fmt: skip
    for choice in response.choices:
        tokens = choice.generation_token_ids
        reward = sum(token < vocab // 2 for token in tokens) / len(tokens)
        await run.submit(name, reward, responses=[(response.id, choice.index)])
    return {response.model}


async def train(args: argparse.Namespace, model: Path) -> None:
    from artd_client import Client

    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    async with Client(data_dir=args.folder / "data", timeout=300) as art, following(args, art):
        run = await art.run("run", **spec(args, model))
        await run.wait(0, timeout=args.limit)
        say(args, "served", step=0)
        openai = run.openai(timeout=300)
        for step in range(1, args.steps + 1):
            began = time.monotonic()
            names = [f"{step}-{index}" for index in range(args.groups)]
            answered = await asyncio.gather(*(group(args, run, openai, name, vocab) for name in names))
            sampled = time.monotonic() - began
            say(args, "phase", phase="all rollouts submitted", step=step, seconds=round(sampled, 2))
            info = await run.wait(step, timeout=args.limit)
            say(args, "step", step=step, answered_by=sorted(set().union(*answered)), rollouts_s=round(sampled, 3),
                step_s=round(time.monotonic() - began, 3), seconds=info.seconds, metrics=info.metrics)  # fmt: skip
        answered = await group(args, run, openai, "last", vocab)
        say(args, "answer after the last step", answered_by=sorted(answered))
        if args.streams:
            from tools.gpu.streams import measure

            say(args, "streams", **await measure(run, openai, args.streams))


@asynccontextmanager
async def following(args: argparse.Namespace, art: Any) -> AsyncIterator[None]:
    """Inside, what the daemon does is told as it happens."""
    from tools.gpu.phases import follow

    task = asyncio.create_task(follow(art, partial(say, args)))
    try:
        yield
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(ended, Exception):
            say(args, "phase", phase="no more are told", error=repr(ended))


def await_ready(args: argparse.Namespace, daemon: subprocess.Popen[bytes], seconds: float = 60) -> None:
    """Raises RuntimeError when the daemon ends, or is not ready in time."""
    from artd_schema.paths import read_daemon_file

    end = time.monotonic() + seconds
    while (told := read_daemon_file(args.folder / "data")) is None or told.state != "ready":
        if daemon.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the daemon did not start: see artd.log")
        time.sleep(0.1)


def look(args: argparse.Namespace, python: str, verb: str) -> Any:
    words = [python, "-m", "artd.cli.ctl", verb, "--json", "--data-dir", str(args.folder / "data")]
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=environment(args), timeout=60)
    except subprocess.TimeoutExpired as error:
        return {"error": str(error)}  # the daemon is ended all the same
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-1000:]}


def environment(args: argparse.Namespace) -> dict[str, str]:
    short = {"XDG_RUNTIME_DIR": str(args.folder / "r")}
    return os.environ | OFF | short | ({} if args.stack else {"PYTHONPATH": os.pathsep.join(CODE)})


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes whose environment names this folder."""
    out = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and str(folder).encode() in (entry / "environ").read_bytes():
                out.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120])
        except OSError:
            continue
    return out


def bounds(args: argparse.Namespace) -> dict[str, list[float]]:
    """What each checkpoint grants an engine's canary: the largest and the mean difference, in nats."""
    found = sorted((args.folder / "data" / "checkpoints" / "run").glob("*/manifest.json"))
    told = {one.parent.name: json.loads(one.read_bytes())["canary"] for one in found}
    return {name: [canary["max_abs"], canary["mean_abs"]] for name, canary in told.items()}


def gpu_memory() -> list[int]:
    """MiB in use on each GPU."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True).stdout.split()]


def main(args: argparse.Namespace) -> int:
    os.environ["XDG_RUNTIME_DIR"] = str(args.folder / "r")
    (args.folder / "r").mkdir(mode=0o700)
    model = base_model(args)
    say(args, "phase", phase="base model written", seconds=round(passed(args), 2))
    python, flags = daemon_python(args), settings(args)
    log = (args.out / "artd.log").open("w")
    daemon = subprocess.Popen(
        [python, "-m", "artd.cli.main", "start", *flags], stdout=log, stderr=subprocess.STDOUT, env=environment(args),
        start_new_session=True,
    )  # fmt: skip
    code = 1
    try:
        await_ready(args, daemon)
        say(args, "phase", phase="daemon ready")
        asyncio.run(asyncio.wait_for(train(args, model), args.limit - passed(args)))
        code = 0
    except Exception as error:
        say(args, "failed", error=f"{type(error).__name__}: {error}")
    finally:
        say(args, "pushes", pushes=look(args, python, "pushes"), bounds=bounds(args), gpu_mib=gpu_memory())
        if code:
            say(args, "status", status=look(args, python, "status"), jobs=look(args, python, "jobs"))
        daemon.terminate()
        began = time.monotonic()
        try:
            ended = daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            ended = daemon.wait()
        time.sleep(2)
        say(args, "stopped", status=ended, seconds=round(time.monotonic() - began - 2, 2),
            left=left_behind(args.folder), gpu_mib=gpu_memory())  # fmt: skip
        for path in (args.folder / "data/logs").glob("*.log"):
            (args.out / path.name).write_bytes(path.read_bytes()[-200_000:])
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--family", default="qwen3_moe", help="of tools.gpu.shape")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=2, help="1: trainer and engine share one")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--answer", type=int, default=64, help="tokens")
    parser.add_argument("--parameters", default="lora", help="what is trained: lora or full")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--transfer", default="auto", help="engine.transfer")
    parser.add_argument("--in-flight", default="drain", help="engine.in_flight")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="trainer.tensor_parallel: GPUs from the first on"
    )
    parser.add_argument(
        "--spec", default="{}", help='JSON that replaces top-level fields, e.g. {"loss": {"kind": "ppo"}}'
    )
    parser.add_argument("--streams", type=int, default=0, help="chats that are streamed beside each other at the end")
    parser.add_argument("--limit", type=float, default=500, help="seconds from the start, after which the end is told")
    parser.add_argument("--stack", default="", help="folder with the unpacked te, megatron and vllm")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"))
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if not given.tiny and given.tensor_parallel > given.gpus:
        parser.error(
            f"--tensor-parallel {given.tensor_parallel} needs as many --gpus, and one more for the engine alone"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the daemon is ended on the way out
    given.began = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    sys.path += [f"{given.stack}/vllm"] * bool(given.stack)  # for what the client needs and this interpreter lacks
    with tempfile.TemporaryDirectory(prefix="artd-gpu-") as made:
        given.folder = Path(made)
        sys.exit(main(given))
