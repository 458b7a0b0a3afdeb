"""The JSON files beside tensors: batch manifests, checkpoint manifests, weight tables and canaries.

A checkpoint's sha is the sha256 of its `manifest.json`; a batch's is the sha256 of its manifest blob.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from artd_schema.codec import prepare
from artd_schema.packages import PackageCode, RunCode
from artd_schema.run.spec import AdvantageSpec, Learning, Parameters

from .trajectory import RouteShape

# The files of a checkpoint's folder. Moments above a file's limit are in numbered files, whose names begin with the stem of OPTIMIZER_FILE.
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


class TensorInfo(Struct, frozen=True):
    """A tensor of a file. `dtype`: safetensors name (I32, F32, U8 ...); `sha256`: hex digest of the raw little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class PackedTrajectory(Struct, frozen=True, kw_only=True):
    """A trajectory of a batch. `id`: row id; `digest`: sha256 of the body in hex; `rows`: packed rows that hold some of its
    tokens."""

    id: int
    digest: str
    group: int
    reward: float
    advantage: float
    rows: tuple[int, ...]


class GroupAdvantage(Struct, frozen=True, kw_only=True):
    """Reward statistics of one group; std is the population standard deviation."""

    group: int
    size: int
    mean: float
    std: float


DropKind = Literal["", "too_long", "no_tokens", "no_turns", "group", "truncated"]


class Drop(Struct, frozen=True):
    """A trajectory, or one of its sequences, that was left out of a batch, and why.

    `kind`: too_long and no_tokens concern a sequence, no_turns, group and truncated a whole trajectory ("" in older manifests).
    `tokens`: sampled tokens that are not trained because of it, 0 for a whole trajectory.
    """

    trajectory: int
    reason: str
    kind: DropKind = ""
    tokens: int = 0


class BatchManifest(Struct, frozen=True, kw_only=True):
    """Everything that determines a packed batch, and the result.

    `tensors`: safetensors name -> TensorInfo, each of shape [rows, row_length]: tokens I32, segment_ids I32 (pad -1),
    parent_ids I32 (own id at a root, pad -1), position_ids I32 (position in the original sequence), loss_mask U8 (1 = this
    token is trained), old_logprobs F32 (NaN where not sampled), advantages F32, weights F32, temperatures F32 (1 where not
    sampled), policy_epochs I32 (-1 where unknown), trajectory_index I32 (index into `trajectories`; -1 in shared or padded
    positions).

    `token_digest`: sha256 of the tokens tensor. `logical_tokens`: without sharing; `physical_tokens`: as packed. `replay`:
    sha256 of the batch's `ReplayManifest` file ("" = no expert replay). `unshared_tokens`: tokens of common prefixes that were
    not shared because the siblings' routes differ. `metrics`: measures of the trajectories (docs/metrics.md), to which the step
    adds its own. `advantages`: how rewards became advantages; unset: within their group alone, as `scale_rewards` says. `learning`: what
    the batch is trained with; unset in older manifests: the run's spec. `minibatches`: of each row the number, from 0, of the minibatch that it
    belongs to, rising; unset where the batch is one.
    """

    version: int = 1
    packer: str
    run: str
    step: int
    seed: int
    base_digest: str
    row_length: int
    rows: int
    tensors: dict[str, TensorInfo]
    token_digest: str
    trajectories: tuple[PackedTrajectory, ...]
    groups: tuple[GroupAdvantage, ...]
    drops: tuple[Drop, ...] = ()
    logical_tokens: int
    physical_tokens: int
    trainable_tokens: int
    scale_rewards: bool
    replay: str = ""
    unshared_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    advantages: AdvantageSpec | UnsetType = UNSET
    learning: Learning | UnsetType = UNSET
    minibatches: tuple[int, ...] | UnsetType = UNSET


class ReplayManifest(Struct, frozen=True, kw_only=True):
    """The replay bundle of one batch: the experts of every packed token, independent of any parallel layout.

    The bundle is one safetensors file: `routes` U8 or U16 [layers, rows, row_length, topk] and `covered` U8 [rows, row_length]
    (1 = the engine reported this position's routes). Padding and the last token of a sequence, which was never the engine's
    input, are not covered; both hold the ids 0 .. topk-1, on which nothing trained depends. `token_digest`: of its batch
    (`BatchManifest.token_digest`). `tokens`: physical tokens, of which `covered` have routes; the others are last tokens.
    `tensors`: name -> TensorInfo.
    """

    version: int = 1
    run: str
    step: int
    token_digest: str
    shape: RouteShape
    rows: int
    row_length: int
    tensors: dict[str, TensorInfo]
    tokens: int
    covered: int


class FileEntry(Struct, frozen=True):
    """A file of a checkpoint folder; sha256 in hex."""

    name: str
    bytes: int
    sha256: str


class WeightEntry(Struct, frozen=True):
    """One tensor as the engine is served it: Hugging Face name, torch's dtype name, and a digest of its bytes.

    `sha256`: in hex, "" where the trainer made the bytes on a GPU. `sum64`: there, their position-dependent 64-bit checksum as
    a signed integer (`artd_workers.transfer.checksum`), None elsewhere. One of the two is always set.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str = ""
    sum64: int | None = None

    @property
    def known(self) -> str | int:
        """The digest that is set: `sha256` as text, or `sum64` as a number."""
        return self.sha256 if self.sum64 is None else self.sum64


class WeightTable(Struct, frozen=True, kw_only=True):
    """`weights.json`: the ordered tensors of a push. `mode`: merged = the full weights W + (alpha/r) B A, lora = the adapter.

    `held`, lora only: the same tensors as the engine must hold them, in its dtype and with alpha/r in B, by their sum64.
    """

    mode: str
    tensors: tuple[WeightEntry, ...]
    held: tuple[WeightEntry, ...] = ()


class Canary(Struct, frozen=True, kw_only=True):
    """Fixed prompts (token ids), and the trainer's logprobs of tokens 1..n-1 given the tokens before them (temperature 1).

    `max_abs`: the largest |difference| in nats allowed to an engine that serves the same weights; `mean_abs`: the bound on the
    mean. In lora mode only, `base`: the same logprobs without the adapter; `rounding`: root mean square, in nats, of what
    rounding alone may change in one of these scores.
    """

    prompts: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    max_abs: float
    mean_abs: float
    base: tuple[tuple[float, ...], ...] = ()
    rounding: float = 0.0


class CheckpointManifest(Struct, frozen=True, kw_only=True):
    """`manifest.json` of a committed checkpoint folder.

    `epoch`: the policy epoch under which these weights are served. `parameters`: `lora` = the folder holds an adapter to the
    base model; `full` = it holds every weight (fp32, `model.safetensors`, Hugging Face names), and serving needs no base model.
    `files`: every other file of the folder. `batch`: sha of the batch manifest it was trained on ("" at step 0). `metrics`: of
    the train job. `environment`: what a bitwise repetition needs (CPU features, threads, versions). `loss`: the package's code
    of the run's loss, unset where the loss is artd's own and in older manifests. `family`: likewise the code that planned the
    model. `learning`: what the step was trained with, as its batch's manifest has it; unset at step 0.
    """

    version: int = 1
    run: str
    step: int
    epoch: int
    lineage: int
    parent: str
    batch: str
    base_digest: str
    spec_digest: str
    instance: str
    job: int
    fence: int
    files: tuple[FileEntry, ...]
    canary: Canary
    parameters: Parameters = "lora"
    metrics: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    loss: PackageCode | UnsetType = UNSET
    family: PackageCode | UnsetType = UNSET
    learning: Learning | UnsetType = UNSET


def read_code(checkpoint: Path) -> RunCode:
    """Read which packages' code the manifest of a checkpoint's folder names. Raises OSError, and one of `codec.UNREADABLE`."""
    return msgspec.json.decode((checkpoint / MANIFEST_FILE).read_bytes(), type=RunCode)


prepare(BatchManifest, ReplayManifest, CheckpointManifest, WeightTable)
