"""The scoring process of `artctl mismatch`: whose weights score, which token each number belongs to, what replay changes, and
what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from artd_schema.codec import to_json
from artd_schema.data.manifest import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    Canary,
)
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import LoraSpec, RunSpec
from artd_schema.wire.score import REQUEST, SCORES, SEQUENCES, ScoreRequest
from artd_schema.wire.worker import CheckpointRef
from artd_workers.models import random_moe
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer.checkpoint import folder as checkpoint
from artd_workers.trainer.model.model import Policy, build
from artd_workers.trainer.tools import score
from artd_workers.transfer.merge import BaseWeights

from . import rig, routes_rig

pytestmark = pytest.mark.torch
SHAPE = RouteShape(layers=2, topk=2, experts=8)
LENGTHS, PROMPTS, TOP = (9, 14, 6), (4, 1, 5), 20
SCORED = [length - prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_moe.make(tmp_path_factory.mktemp("models") / "moe")


def columns(vocab: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(3, vocab, (sum(LENGTHS),), generator=generator, dtype=torch.int32),
        "lengths": torch.tensor(LENGTHS, dtype=torch.int32),
        "prompts": torch.tensor(PROMPTS, dtype=torch.int32),
        "candidates": torch.randint(3, vocab, (sum(SCORED), TOP), generator=generator, dtype=torch.int32),
    }


def routes(seed: int = 0) -> Tensor:
    """Distinct ids [T, layers, topk]."""
    return routes_rig.random_routes(SHAPE, sum(LENGTHS), seed=seed).transpose(0, 1).to(torch.uint8).contiguous()


def ask(
    folder: Path,
    columns: dict[str, Tensor],
    spec: RunSpec,
    at: CheckpointRef | None = None,
    shape: RouteShape | None = None,
) -> dict[str, Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(columns, folder / SEQUENCES)
    (folder / REQUEST).write_bytes(to_json(ScoreRequest(spec=spec, checkpoint=at, routes=shape)))
    score.answer(folder)
    return load_file(folder / SCORES)


def full(model: Path) -> RunSpec:
    return RunSpec(model=str(model), parameters="full", threads=1)


def base_policy(model: Path) -> Policy:
    plan = plan_for(read_config(model))
    return Policy(plan, build(plan, BaseWeights(model)), None)


def pieces(column: Tensor, sizes: Any) -> list[Tensor]:
    return list(column.split(list(sizes)))


def scored(policy: Any, asked: dict[str, Tensor], ids: Tensor | None = None) -> Tensor:
    """Logprobs of the scored tokens by the policy's own road, sequence by sequence."""
    out = []
    parts = pieces(ids, LENGTHS) if ids is not None else [None] * len(LENGTHS)
    for tokens, prompt, part in zip(pieces(asked["tokens"].long(), LENGTHS), PROMPTS, parts, strict=True):
        layered = None if part is None else part.transpose(0, 1).contiguous()
        out.append(policy.score_sequence(tokens, routes=layered)[prompt - 1 :])
    return torch.cat(out)


def commit(folder: Path, file: str, weights: dict[str, Tensor]) -> CheckpointRef:
    """A checkpoint folder of what scoring reads."""
    staging = checkpoint.Staging(folder)
    staging.tensors(file, weights)
    staging.tensors(OPTIMIZER_FILE, {"step": torch.tensor(1)})
    staging.json(checkpoint.STATE, checkpoint.State(step=1, rng=""))
    staging.json(ADAPTER_CONFIG_FILE, {"r": 2})
    sha = staging.finish(
        run="r", step=1, epoch=1, lineage=0, parent="", batch="", base_digest="", spec_digest="", instance="", job=1, fence=1,
        canary=Canary(prompts=(), logprobs=(), max_abs=0.0, mean_abs=0.0),
    )  # fmt: skip
    return CheckpointRef(run="r", step=1, epoch=1, lineage=0, sha=sha, dir=str(folder))


# ---- the numbers ----------------------------------------------------------------------------------------------------


def test_a_dense_base_scores_as_hugging_face_does(toy_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = toy_folders["qwen3"]
    asked = columns(1024)
    found = ask(tmp_path, asked, RunSpec(model=str(folder), threads=1))
    assert set(found) == {f"live.{name}" for name in ("logprobs", "candidates", "top_ids", "top_logprobs")}
    model = rig.reference(folder).eval()
    with torch.no_grad():
        wanted = torch.cat(
            [
                model(tokens[None]).logits[0].log_softmax(-1)[prompt - 1 : -1]
                for tokens, prompt in zip(pieces(asked["tokens"].long(), LENGTHS), PROMPTS, strict=True)
            ]
        )
    targets = torch.cat([t[p:] for t, p in zip(pieces(asked["tokens"].long(), LENGTHS), PROMPTS, strict=True)])
    top = wanted.topk(TOP, -1)
    assert torch.allclose(found["live.logprobs"], wanted.gather(-1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(found["live.candidates"], wanted.gather(-1, asked["candidates"].long()), atol=1e-5)
    assert torch.allclose(found["live.top_logprobs"], top.values, atol=1e-5)
    assert torch.equal(found["live.top_ids"].long(), top.indices)
    assert found["live.top_ids"].dtype == torch.int32 and found["live.logprobs"].dtype == torch.float32


def test_replay_uses_the_given_experts_token_by_token(moe: Path, tmp_path: Path) -> None:
    asked, ids = columns(256), routes()
    found = ask(tmp_path, asked | {"routes": ids}, full(moe), shape=SHAPE)
    policy = base_policy(moe)
    assert torch.allclose(found["replay.logprobs"], scored(policy, asked, ids), atol=1e-6)
    assert torch.allclose(found["live.logprobs"], scored(policy, asked), atol=1e-6)
    assert float((found["replay.logprobs"] - found["live.logprobs"]).abs().mean()) > 0.05, "foreign experts change much"


def test_the_last_tokens_routes_do_not_matter_and_the_others_do(moe: Path, tmp_path: Path) -> None:
    asked, ids = columns(256), routes()
    first = ask(tmp_path / "a", asked | {"routes": ids}, full(moe), shape=SHAPE)
    last = ids.clone()
    last[[sum(LENGTHS[: i + 1]) - 1 for i in range(3)]] = torch.tensor([0, 1], dtype=torch.uint8)
    same = ask(tmp_path / "b", asked | {"routes": last}, full(moe), shape=SHAPE)
    assert all(torch.equal(first[name], same[name]) for name in first)
    moved = ids.roll(1, 0)
    other = ask(tmp_path / "c", asked | {"routes": moved}, full(moe), shape=SHAPE)
    assert not torch.allclose(first["replay.logprobs"], other["replay.logprobs"], atol=1e-3)
    assert torch.equal(first["live.logprobs"], other["live.logprobs"])


def test_a_full_checkpoint_scores_and_not_its_base(moe: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    weights = {name: t + 0.02 * torch.randn(t.shape, generator=generator) for name, t in BaseWeights(moe).items()}
    ref = commit(tmp_path / "checkpoint", MODEL_FILE, weights)
    asked, ids = columns(256), routes()
    found = ask(tmp_path / "ask", asked | {"routes": ids}, full(moe), ref, SHAPE)
    plan = plan_for(read_config(moe))
    assert torch.allclose(
        found["replay.logprobs"], scored(Policy(plan, build(plan, weights), None), asked, ids), atol=1e-6
    )
    assert not torch.allclose(found["replay.logprobs"], scored(base_policy(moe), asked, ids), atol=1e-2)


def test_an_adapter_scores_on_top_of_its_base(toy_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = toy_folders["llama"]
    policy = rig.make_policy(folder)
    assert policy.lora is not None
    ref = commit(tmp_path / "checkpoint", ADAPTER_FILE, dict(policy.lora.state()))
    asked, spec = columns(1024), RunSpec(model=str(folder), lora=LoraSpec(rank=rig.RANK, alpha=rig.ALPHA), threads=1)
    found = ask(tmp_path / "ask", asked, spec, ref)
    assert torch.allclose(found["live.logprobs"], scored(policy, asked), atol=1e-6)
    assert not torch.allclose(found["live.logprobs"], scored(base_policy(folder), asked), atol=1e-2)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["manifest", "weights", "missing"])
def test_a_damaged_checkpoint_scores_nothing(moe: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "checkpoint"
    ref = commit(folder, MODEL_FILE, dict(BaseWeights(moe).items()))
    path = folder / (MANIFEST_FILE if damage == "manifest" else MODEL_FILE)
    if damage == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match=path.name):
        ask(tmp_path / "ask", columns(256), full(moe), ref)
    assert not (tmp_path / "ask" / SCORES).exists()


def change(name: str, value: Any) -> Any:
    def apply(asked: dict[str, Tensor]) -> None:
        asked[name] = value(asked[name])

    return apply


def with_first(value: int) -> Any:
    def apply(column: Tensor) -> Tensor:
        out = column.clone()
        out.view(-1)[0] = value
        return out

    return apply


BAD = {
    "lengths do not add up": change("lengths", with_first(10)),
    "a prompt is empty": change("prompts", with_first(0)),
    "nothing comes after it": change("prompts", with_first(9)),
    "candidates": change("candidates", lambda column: column[1:]),
    "outside the vocabulary of 256": change("tokens", with_first(256)),
    "an id lies outside": change("candidates", with_first(-1)),
    "routes (28, 2, 2) are not (29, 2, 2)": change("routes", lambda column: column[1:]),
    "2 different experts of 8": change("routes", with_first(8)),
    "routes are not 2 different": change("routes", lambda column: torch.zeros_like(column)),
    "'lengths'": lambda asked: asked.pop("lengths"),
}


@pytest.mark.parametrize("says", BAD)
def test_columns_that_do_not_fit_are_refused(moe: Path, tmp_path: Path, says: str) -> None:
    asked = columns(256) | {"routes": routes()}
    BAD[says](asked)
    with pytest.raises(score.ScoreError) as refused:
        ask(tmp_path, asked, full(moe), shape=SHAPE)
    assert says in str(refused.value) and SEQUENCES in str(refused.value)
    assert not (tmp_path / SCORES).exists()


def test_the_process_answers_in_its_folder_or_says_why_not(moe: Path, tmp_path: Path) -> None:
    save_file(columns(256) | {"routes": routes()}, tmp_path / SEQUENCES)
    (tmp_path / REQUEST).write_bytes(to_json(ScoreRequest(spec=full(moe), routes=SHAPE)))
    command = [sys.executable, "-m", "artd_workers.trainer.tools.score", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "replay.logprobs" in load_file(tmp_path / SCORES)
    (tmp_path / REQUEST).write_text(json.dumps({"spec": 3}))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and REQUEST in done.stderr and "Traceback" not in done.stderr
