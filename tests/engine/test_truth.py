"""A live push into a real engine whose every weight is NaN, against Hugging Face: one server start, a toy Qwen3-MoE on a CPU.

What a push leaves out stays NaN and reaches every logprob. The same on a GPU, with the direct push: `tools.gpu.push --items truth`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from artd.runtimes import registry
from artd_schema.run.spec import EngineSpec, LoraSpec, RunSpec
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import EngineError
from tests.engine.real import HERE, START_S, Engine, HuggingFace, Sender
from tests.fake_daemon import ROOT, start_engine

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]
EXACT = 1e-5
"""Nats, in fp32."""
PROMPTS = [[3 + (i * 37 + j * 7) % 1000 for j in range(5 + 11 * i)] for i in range(8)]


class Reference(HuggingFace):
    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Of every token but the first, for each sequence."""
        return [answer["logprobs"] for answer in self.ask(sequences)]


@pytest.fixture(scope="module")
def reference(moe_toys: Path) -> Iterator[Reference]:
    """Made before the engine, so that both start at once."""
    made = Reference(moe_toys, "f1")
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(moe_toys: Path, reference: Reference) -> Iterator[Engine]:
    """Its harness has `truth_probe.Probe` put into the server."""
    python = str(registry.find("vllm").python)
    with tempfile.TemporaryDirectory(prefix="artd-r-") as name:
        probed = Path(name) / "python"
        probed.write_text(f"#!/bin/sh\nexec {python} {HERE / 'truth_probe.py'}\n")
        probed.chmod(0o700)
        settings = EngineSpec(max_model_len=512, max_num_seqs=8, kv_cache_mib=32)
        spec = RunSpec(model=str(moe_toys / "toy"), parameters="full", rollout_weights_mode="merged",
                       lora=LoraSpec(rank=4, alpha=8), engine=settings)  # fmt: skip
        config = EngineConfig(run="toy", spec=spec, dir=f"{name}/e", log=f"{name}/engine.log", python=python)
        path = ":".join(str(ROOT / part) for part in ("", "workers", "schema"))
        with start_engine(config, str(probed), env={"PYTHONPATH": path}) as daemon:
            started = Engine(daemon, moe_toys, "merged")
            started.socket = daemon.ready(START_S)
            yield started


def test_a_live_push_over_nan_gives_hugging_faces_logprobs(engine: Engine, reference: Reference) -> None:
    engine.live(engine.push("f0"))
    table = str(engine.toys / "f1" / "weights.json")
    body = {"method": "probe_spoil", "args": [table], "kwargs": {}, "timeout": 30.0}
    spoiled = engine.call("/collective_rpc", body)["results"][0]
    assert spoiled["tensors"] > spoiled["parameters"] > 0
    assert is_nonsense(engine), "the engine computes with something that is not NaN"
    sender = Sender(engine, "first")
    try:
        sender.order("f1")
        engine.live(engine.push("f1", source="live", rendezvous=sender.rendezvous))
        sender.sent()
    finally:
        sender.close()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        choices = list(pool.map(lambda prompt: engine.generate(prompt, max_tokens=20, ignore_eos=True), PROMPTS))
    sequences = [prompt + choice["token_ids"] for prompt, choice in zip(PROMPTS, choices, strict=True)]
    wanted = reference.logprobs(sequences)
    scores = engine.adapter().score("toy", sequences, Deadline(30))
    for prompt, choice, score, exact in zip(PROMPTS, choices, scores, wanted, strict=True):
        decoded = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert decoded == pytest.approx(exact[len(prompt) - 1 :], abs=EXACT)
        assert score == pytest.approx(exact, abs=EXACT)


def is_nonsense(engine: Engine) -> bool:
    """Whether no score is finite, or the server cannot even write them down."""
    try:
        scores: Any = engine.adapter().score("toy", PROMPTS[:1], Deadline(30))
    except EngineError as error:
        return "not JSON compliant" in str(error)
    return not any(map(math.isfinite, scores[0]))
