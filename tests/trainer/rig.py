"""What trainer tests share: policies, references, hand-made trees, packed batches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from msgspec import UNSET, UnsetType
from safetensors.torch import save_file
from torch import Tensor

from artd.packing.batch import PackSpec, Source, pack
from artd.packing.tensors import serialise
from artd_schema.codec import digest, to_json
from artd_schema.data.manifest import BatchManifest, PackedTrajectory, TensorInfo
from artd_schema.data.trajectory import Sampling, Turn
from artd_schema.run.spec import Learning, RunSpec
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer.batch.rows import DTYPES, Batch, PackedRow, make_batch
from artd_workers.trainer.model.lora import Lora, shapes_of
from artd_workers.trainer.model.model import Policy, build
from artd_workers.trainer.parameters.trained import FullState, open_model
from artd_workers.transfer.merge import BaseWeights

RANK, ALPHA = 4, 8
DEFAULTS = {"segment_ids": -1, "parent_ids": -1, "policy_epochs": -1, "trajectory_index": -1, "temperatures": 1}


def make_policy(folder: Path, seed: int = 0, random_b: bool = True) -> Policy:
    """A policy with LoRA; random_b: B is random too, so that the adapter does something."""
    plan, base = plan_for(read_config(folder)), BaseWeights(folder)
    lora = Lora(plan.codec, shapes_of(plan.codec, base), RANK, ALPHA)
    lora.initialise(seed)
    if random_b:
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, parameter in lora.list_parameters():
                if ".lora_B." in name:
                    parameter.normal_(0, 0.05, generator=generator)
    return Policy(plan, build(plan, base), lora)


def full_policy(folder: Path) -> tuple[Policy, FullState]:
    """The base model with every weight trained."""
    policy, trained = open_model(RunSpec(model=str(folder), parameters="full"))
    assert isinstance(trained, FullState)
    return policy, trained


def reference(folder: Path, dtype: torch.dtype = torch.float32):
    """The Hugging Face model, told of no padding token (its gradient would be dropped)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.pad_token_id = None
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).train()


def hf_logprobs(model, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprobs [s - 1] of tokens 1.. of a sequence."""
    logits = model(tokens[None]).logits[0] / temperature
    return logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]


def per_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in transformers' names -> in a checkpoint's, where each expert has its own."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            half = tensor.shape[1] // 2
            for expert, both in enumerate(tensor):
                out[f"{stem}.{expert}.gate_proj.weight"], out[f"{stem}.{expert}.up_proj.weight"] = (
                    both[:half],
                    both[half:],
                )
        elif last == "down_proj":
            out |= {f"{stem}.{expert}.down_proj.weight": one for expert, one in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def load_weights(model, weights: dict[str, Tensor]) -> None:
    """Copy weights in a checkpoint's names into a Hugging Face model."""
    own = per_expert(dict(model.state_dict()))
    own.pop("lm_head.weight" if model.config.tie_word_embeddings else "", None)
    assert set(own) == set(weights)
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def relative(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


# ---- hand-made trees ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A segment: tokens, index of the parent piece (None = root), trained from this token of the piece on (None = none)."""

    tokens: Tensor
    parent: int | None = None
    trained_from: int | None = None
    advantage: float = 1.0
    temperature: float = 1.0


def row_columns(pieces: list[Piece], size: int, old: Tensor | None = None) -> dict[str, Tensor]:
    """Columns [size] of one row; trajectory i = i-th piece that is trained. old: behaviour logprobs of trained tokens."""
    out = {name: torch.full((size,), DEFAULTS.get(name, 0), dtype=dtype) for name, dtype in DTYPES.items()}
    out["old_logprobs"].fill_(float("nan"))
    ends: list[int] = []
    at = trajectory = 0
    for number, piece in enumerate(pieces):
        first = 0 if piece.parent is None else ends[piece.parent]
        here = slice(at, at + len(piece.tokens))
        out["tokens"][here] = piece.tokens.int()
        out["segment_ids"][here] = number
        out["parent_ids"][here] = number if piece.parent is None else piece.parent
        out["position_ids"][here] = torch.arange(first, first + len(piece.tokens))
        if piece.trained_from is not None:
            trained = slice(at + piece.trained_from, here.stop)
            out["loss_mask"][trained] = 1
            out["weights"][trained] = 1
            out["advantages"][trained] = piece.advantage
            out["old_logprobs"][trained] = -1.0
            out["temperatures"][trained] = piece.temperature
            out["policy_epochs"][trained] = 0
            out["trajectory_index"][here] = trajectory
            trajectory += 1
        ends.append(first + len(piece.tokens))
        at = here.stop
    if old is not None:
        out["old_logprobs"][out["loss_mask"].bool()] = old.float()
    return out


def batch_of(rows: list[dict[str, Tensor]], trajectories: int) -> Batch:
    columns = {name: torch.stack([row[name] for row in rows]) for name in DTYPES}
    return make_batch(columns, manifest_of(columns, trajectories), "0" * 64, 1024)


def manifest_of(columns: dict[str, Tensor], trajectories: int) -> BatchManifest:
    rows, length = columns["tokens"].shape
    names = {torch.int32: "I32", torch.uint8: "U8", torch.float32: "F32"}
    tensors = {
        name: TensorInfo(names[t.dtype], tuple(t.shape), hashlib.sha256(t.contiguous().numpy().data).hexdigest())
        for name, t in columns.items()
    }
    members = tuple(
        PackedTrajectory(id=i + 1, digest="", group=1, reward=float(i), advantage=1.0, rows=())
        for i in range(trajectories)
    )
    return BatchManifest(
        packer="test", run="r", step=1, seed=0, base_digest="base", row_length=length, rows=rows, tensors=tensors,
        token_digest=tensors["tokens"].sha256, trajectories=members, groups=(), logical_tokens=0, physical_tokens=0,
        trainable_tokens=int(columns["loss_mask"].sum()), scale_rewards=True,
    )  # fmt: skip


def only_row(pieces: list[Piece], size: int, old: Tensor | None = None) -> PackedRow:
    trained = sum(piece.trained_from is not None for piece in pieces)
    return batch_of([row_columns(pieces, size, old)], trained).rows[0]


# ---- batches by the real packer -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenBatch:
    tensors: Path
    manifest: Path
    sha: str


def write_batch(
    folder: Path,
    step: int,
    seed: int = 0,
    epoch: int = 0,
    row_length: int = 256,
    learning: Learning | UnsetType = UNSET,
) -> WrittenBatch:
    """Two groups of four random trajectories, packed as the daemon packs them."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    sources = []
    for group in range(2):
        prompt = torch.randint(3, 1024, (70,), generator=generator, dtype=torch.int32)
        for member in range(4):
            tokens = torch.randint(3, 1024, (6 + 3 * member,), generator=generator, dtype=torch.int32)
            logprobs = -6.9 - 0.2 * torch.rand(len(tokens), generator=generator)
            turn = Turn(
                prompt_ids=prompt.numpy().tobytes(), token_ids=tokens.numpy().tobytes(),
                logprobs=logprobs.numpy().tobytes(), sampling=Sampling(temperature=0.8), policy_epoch=((0, epoch),),
            )  # fmt: skip
            body = msgspec.msgpack.encode([turn])
            number = 100 * step + 4 * group + member
            sources.append(Source(id=number, group=group + 1, reward=float(member), digest=digest(body), body=body))
    spec = PackSpec(
        run="r", step=step, seed=seed, row_length=row_length, scale_rewards=True, base_digest="base", learning=learning
    )
    tensors, manifest, _ = pack(spec, sources)
    return _save(folder, f"batch-{step}", serialise(tensors), manifest)


def save_columns(folder: Path, name: str, columns: dict[str, Tensor], trajectories: int) -> WrittenBatch:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.raw"
    save_file(columns, path)
    return _save(folder, name, path.read_bytes(), manifest_of(columns, trajectories))


def _save(folder: Path, name: str, data: bytes, manifest: BatchManifest) -> WrittenBatch:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.safetensors").write_bytes(data)
    raw = to_json(manifest)
    (folder / f"{name}.json").write_bytes(raw)
    return WrittenBatch(folder / f"{name}.safetensors", folder / f"{name}.json", digest(raw))


def tree_mask(segments: Tensor, ancestors: dict[int, set[int]]) -> Tensor:
    """Bool [s, s], True where query q (first) must not see key k. segments: [s]; ancestors include the segment itself."""
    order = {segment: index for index, segment in enumerate(ancestors)}
    related = torch.zeros(len(order), len(order), dtype=torch.bool)
    for segment, seen in ancestors.items():
        related[order[segment], [order[s] for s in seen]] = True
    index = torch.tensor([order[s] for s in segments.tolist()], dtype=torch.int64)
    position = torch.arange(len(segments))
    return ~(related[index][:, index] & (position[None, :] <= position[:, None]))
