"""The run spec: what a user decides about a run, fixed when the run is created.

Immutable: attaching to a run with another spec is a `Conflict` that names the first field that differs. Every number has
bounds at both ends, so it is finite, and JSON and SQLite hold it as it is.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import force_setattr

from artd_schema.codec import prepare

from .engines import AUTO, DEFAULT
from .losses import EXAMPLES, Normalise, defaults_of
from .spec_defaults import (
    ENGINE_DTYPE,
    ENGINE_REPLICAS,
    GROUPS_PER_STEP,
    MAX_MODEL_LEN,
    ROLLOUT_WEIGHTS_MODE,
    ROW_LENGTH,
)

Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
Processes = Annotated[int, Meta(ge=1, le=1 << 10)]
Rate = Annotated[float, Meta(ge=0, le=1e3)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
Clip = Annotated[float, Meta(gt=0, le=1e9)]
Ratio = Annotated[float, Meta(ge=0, le=1e9)]
Bounds = tuple[Ratio, Ratio]
"""(lowest, highest)."""
YEAR_S = 366 * 86400.0
Seconds = Annotated[float, Meta(ge=0, le=YEAR_S)]
ParamName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
ParamValue = Annotated[float, Meta(ge=-1e9, le=1e9)]
Params = Annotated[dict[ParamName, ParamValue], Meta(min_length=1, max_length=64)]
Mode = Literal["merged", "lora"]
EngineName = Annotated[str, Meta(min_length=1, max_length=64)]
"""A key of `artd_schema.run.engines.ENGINES`."""
Parameters = Literal["lora", "full"]
InFlight = Literal["drain", "keep", "recompute"]


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters (arXiv:2106.09685). Their product is scaled by alpha / rank, with `rslora` by alpha / sqrt(rank)
    (arXiv:2312.03732). `targets` are the linears that have one, by their names in the checkpoint; unset means every linear."""

    rank: Annotated[int, Meta(ge=1, le=1 << 16)] = 16
    alpha: Count = 32
    rslora: bool | UnsetType = UNSET
    targets: Annotated[tuple[Target, ...], Meta(min_length=1, max_length=7)] | UnsetType = UNSET

    @property
    def stored_alpha(self) -> float:
        """The alpha that a checkpoint's adapter names: divided by the rank it is the scale, for whoever loads it.

        PEFT adapts the fused experts of a layer at another rank, where its own `use_rslora` would be another scale (seen in 0.21).
        """
        return self.alpha * math.sqrt(self.rank) if self.rslora else self.alpha

    @property
    def scale(self) -> float:
        """What the product of the adapters is multiplied by."""
        return self.stored_alpha / self.rank


class ScheduleSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the learning rate changes from one optimizer step to the next; docs/losses.md has the formulas.

    warmup: steps with less than `lr`, in a rising line. kind: what comes after them, up to optimizer step `steps`; `constant` has no end.
    floor: the share of `lr` that is left from then on. Steps count from the run's first one."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    steps: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | UnsetType = UNSET
    floor: Annotated[float, Meta(ge=0, le=1)] = 0.0


class OptimizerSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW (arXiv:1711.05101) with a global gradient-norm clip. schedule: of `lr`, which is constant without. minibatches: parts of a
    batch, each of which is an optimizer step; epochs: how often a batch is gone through. Both are 1 unless given."""

    lr: Rate = 1e-5
    beta1: Beta = 0.9
    beta2: Beta = 0.999
    eps: Annotated[float, Meta(gt=0, le=1)] = 1e-8
    weight_decay: Rate = 0.0
    clip_grad_norm: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    # Unset as far as a run does not ask for it: the bytes and the digest of a stored spec stay what they were.
    schedule: ScheduleSpec | UnsetType = UNSET
    minibatches: Annotated[int, Meta(ge=1, le=1 << 10)] | UnsetType = UNSET
    epochs: Annotated[int, Meta(ge=1, le=1 << 6)] | UnsetType = UNSET


BY_LOSS: Any = UNSET
"""Default of a field that `__post_init__` fills in by the loss, so that a stored spec says what its run is trained with."""


def _fill(spec: Struct, **defaults: Any) -> None:
    """Set each field that is unset, unless its default is None."""
    for name, value in defaults.items():
        if getattr(spec, name) is UNSET and value is not None:
            force_setattr(spec, name, value)


class CorrectionSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights and masks by k, the trainer's probability of a token divided by the engine's. docs/losses.md has the
    formulas.

    - `tis`: truncated importance sampling; each token's loss is multiplied by min(k, tis).
    - `icepop`, `product`, `geometric`: the lowest and the highest k of a token, product of a sequence's k, and
      geometric mean of them, that are trained.
      Other tokens have weight 0.
    """

    tis: Clip | UnsetType = UNSET
    icepop: Bounds | UnsetType = UNSET
    product: Bounds | UnsetType = UNSET
    geometric: Bounds | UnsetType = UNSET


class KlSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A penalty for the distance to the base model (the model with the adapter off).

    `estimator` names the estimator of a token's KL, as docs/losses.md defines them. `into` says what the penalty is
    added to: the loss, or the token's advantage.
    """

    coef: Annotated[float, Meta(gt=0, le=1e3)]
    estimator: Literal["k1", "k2", "k3"] = "k3"
    into: Literal["loss", "advantage"] = "loss"


class LossSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy loss. docs/losses.md has each formula, its source and its defaults.

    - `kind`: a loss of artd (`artd_schema.run.losses`), or of a package that the daemon's owner installed. The daemon
      refuses others.
    - `clip_low`, `clip_high`: bounds of the importance ratio, as the loss defines them; unset for a loss without them.
    - `normalise`: `token` adds up the losses of trained tokens and divides by their number in the whole batch.
      `sequence` and `constant` add them up for
      each trajectory, divide by the trajectory's trained tokens or by `divisor`, and average over trajectories.
    - `params`: numbers by name, for a loss that has parameters of its own.
    - `proximal`: whose logprobs the importance ratio compares with: the engine's (unset), or the trainer's own before
      the step, which leaves the engine's
      to `correction`.
    - `entropy_bonus`: each token's entropy in nats times this number is subtracted from its loss.
    """

    kind: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,63}$")] = "cispo"
    clip_high: Clip | UnsetType = UNSET
    normalise: Normalise = BY_LOSS
    # Unset and not empty: a spec without it keeps the bytes and the digest that it had before there were parameters.
    params: Params | UnsetType = UNSET
    clip_low: Clip | UnsetType = UNSET
    divisor: Tokens | UnsetType = UNSET
    proximal: Literal["engine", "trainer"] | UnsetType = UNSET
    correction: CorrectionSpec | UnsetType = UNSET
    kl: KlSpec | UnsetType = UNSET
    entropy_bonus: Annotated[float, Meta(gt=0, le=1e3)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        own = defaults_of(self.kind)
        _fill(self, clip_high=own.clip_high, normalise=own.normalise, clip_low=own.clip_low)


class LengthSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A soft penalty for long answers: up to `penalty` is subtracted from the reward of a trajectory, in proportion
    over the last `buffer` of `limit` sampled tokens."""

    limit: Tokens
    buffer: Tokens
    penalty: Annotated[float, Meta(gt=0, le=1e9)] = 1.0


class Learning(Struct, frozen=True, kw_only=True):
    """What a train job learns with: the part of a run's spec that may change while the run goes on. version: how often it has changed."""

    optimizer: OptimizerSpec
    loss: LossSpec
    version: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0


class AdvantageSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rewards become advantages. docs/losses.md has the formulas.

    - `baseline`: what a reward is compared with: the mean of its group (`group`), the mean of the others in its group
      (`leave_one_out`), or nothing
      (`none`). With `given` the program gives each token's advantage.
    - `batch_scale`: normalise over the whole batch.
    - `positive`, `negative`: factors of advantages above and below 0.
    - `truncated`: what happens to a trajectory with an answer that ended at a length limit: it is trained, it is not
      trained (`mask`), or it is left
      out of its group's statistics, too (`drop`).
    - `length`: a soft penalty for long answers.
    """

    baseline: Literal["group", "leave_one_out", "none", "given"] = "group"
    batch_scale: bool = False
    positive: Rate = 1.0
    negative: Rate = 1.0
    truncated: Literal["train", "mask", "drop"] = "train"
    length: LengthSpec | UnsetType = UNSET

    @property
    def trains_equal(self) -> bool:
        """Whether a group whose rewards are all equal may have advantages other than 0."""
        return self.baseline in ("none", "given") or self.length is not UNSET


class EngineSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the inference engine is started. Lengths are in tokens, memory is in MiB.

    - `device`: `auto` takes a GPU if the engine's torch sees one.
    - `transfer`: how a merged push travels on a GPU. `auto` takes the first that is possible: `staged` (directly, into a second copy of the
      weights beside the KV cache), `in_place` (directly), `nccl` (the same over NCCL, so no GPU memory is shared between processes), `stock`
      (the engine's own calls). On a CPU it has no effect.
    - `in_flight`: what happens to running requests at a merged push. `drain` waits for them (`push_drain_s`). `keep` pauses them and continues
      with their KV cache of the old weights. `recompute` computes their cache again with the new weights. Responses of the last two have
      several policy epochs. They work only for direct pushes, which are verified before the engine continues; all others (from disk, by the
      engine's own calls, on a CPU) drain.
    - `tool_parser`, `reasoning_parser`: find tool calls and reasoning in the model's text: a name of the engine's,
      `none`, or `auto` (by the model's family and chat template). The engine's start tests them.
    - `chat_template`: Jinja text that replaces the model's own.
    - `args`: flags of the engine's server, without dashes, of those that `artd_schema.run.engines` allows.
    - `grammar`: what happens to a grammar of a request for training (a required or named tool, a response format,
      strict tools). `drop` samples freely and says so in the reply; `refuse` answers 400.
    - `replicas`: how many engines serve the run, each with the whole model and a process of its own.
    """

    kind: EngineName = DEFAULT
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = ENGINE_DTYPE
    transfer: Literal["auto", "staged", "in_place", "nccl", "stock"] = "auto"
    in_flight: InFlight = "drain"
    max_model_len: Tokens = MAX_MODEL_LEN
    max_num_seqs: Count = 64
    kv_cache_mib: Annotated[int, Meta(ge=1, le=1 << 28)] = 256
    tool_parser: Annotated[str, Meta(max_length=64)] = AUTO
    reasoning_parser: Annotated[str, Meta(max_length=64)] = AUTO
    chat_template: Annotated[str, Meta(max_length=1 << 17)] = ""
    args: dict[str, bool | int | float | str] = {}
    grammar: Literal["drop", "refuse"] = "drop"
    replicas: Annotated[int, Meta(ge=1, le=64)] = ENGINE_REPLICAS


class TrainerSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the trainer computes, and with which number formats.

    - `device`: `auto` takes a GPU if torch sees one.
    - `dtype`: of base weights and activations. Masters of trained parameters are always float32. `bfloat16` needs a
      GPU, and with `parameters` full an engine
      of the same dtype.
    - `recompute`: what the backward computes again instead of keeping it: nothing, the experts (`selective`) or every
      layer (`full`). The CPU keeps all.
    - `tensor_parallel`: processes, each with a GPU of its own, that share the products of a layer.
    - `expert_parallel`: processes that share a layer's experts.
    - `context_parallel`: processes that share a row's tokens in every operation.
    - `pipeline_parallel`: stages, each with the same number of layers.

    A stage takes tensor_parallel x context_parallel processes, or expert_parallel if that is more, and then trains
    several rows at a time; one must divide the other. Several processes train an adapter. They can train every weight
    only if no size but context_parallel is above 1; each then has a part of the masters.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    tensor_parallel: Processes = 1
    expert_parallel: Processes = 1
    pipeline_parallel: Processes = 1
    context_parallel: Processes = 1

    @property
    def near(self) -> int:
        """Processes that share one row."""
        return self.tensor_parallel * self.context_parallel

    @property
    def processes(self) -> int:
        """How many train together."""
        return max(self.near, self.expert_parallel) * self.pipeline_parallel


class RunSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy that is trained.

    - `model`: absolute path of a local Hugging Face checkpoint (safetensors).
    - `parameters`: what is trained: an adapter on every linear (`lora`; routers stay frozen) or every weight (`full`).
    - `rollout_weights_mode`: `merged` replaces the engine's weights in place; `lora` loads one adapter for each step
      (only with `parameters` lora).
    - `expert_replay`: train a mixture-of-experts model through the experts to which the engine routed each token, and
      refuse a batch without them. It has
      no effect on a dense model.
    - `group_size`: trajectories in a group, at least 2 where rewards are compared.
    - `groups_per_step`: trainable groups in a batch.
    - `group_timeout_s`: an open group is sealed after this many seconds (at most a year).
    - `row_length`: tokens of a packed row, 0 = engine.max_model_len (`row_tokens` is the result). A longer sequence is
      never trained, so a smaller
      value is refused unless `drop_longer` is true.
    - `scale_rewards`: divide advantages by the population standard deviation (+1e-6). By default all losses but dr_grpo
      do.
    - `push_drain_s`: how long a merged push waits for running requests.
    - `threads`: OpenMP threads of the CPU trainer (0 = all cores of the machine).
    - `keep_checkpoints`: how many of the newest checkpoints are kept.
    - `advantages`: how rewards become advantages, unless by their group's mean alone.
    """

    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    parameters: Parameters = "lora"
    rollout_weights_mode: Mode = ROLLOUT_WEIGHTS_MODE
    expert_replay: bool = True
    seed: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    group_size: Count = BY_LOSS
    groups_per_step: Count = GROUPS_PER_STEP
    group_timeout_s: Annotated[float, Meta(ge=0.001, le=YEAR_S)] = 600.0
    row_length: Annotated[int, Meta(ge=0, le=1 << 24)] = ROW_LENGTH
    drop_longer: bool = False
    scale_rewards: bool = BY_LOSS
    lora: LoraSpec = LoraSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    loss: LossSpec = LossSpec()
    engine: EngineSpec = EngineSpec()
    trainer: TrainerSpec = TrainerSpec()
    push_drain_s: Seconds = 30.0
    threads: Annotated[int, Meta(ge=0, le=1 << 12)] = 0
    keep_checkpoints: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] = 3
    advantages: AdvantageSpec | UnsetType = UNSET

    def __post_init__(self) -> None:
        own = defaults_of(self.loss.kind)
        if self.loss.kind == EXAMPLES:
            _fill(self, advantages=AdvantageSpec(baseline="none"))
        how = self.advantages or AdvantageSpec()
        by_group = how.baseline in ("group", "leave_one_out") and not how.batch_scale
        _fill(self, scale_rewards=own.scale_rewards and by_group, group_size=own.group_size)
        if self.loss.normalise == "constant" and self.loss.divisor is UNSET:
            force_setattr(self, "loss", msgspec.structs.replace(self.loss, divisor=self.engine.max_model_len))

    @property
    def learning(self) -> Learning:
        """What the run learns with as it was made."""
        return Learning(optimizer=self.optimizer, loss=self.loss)

    @property
    def row_tokens(self) -> int:
        """Tokens of a packed row."""
        return self.row_length or self.engine.max_model_len


def first_difference(stored: RunSpec, asked: RunSpec) -> str | None:
    """Return the dotted name of the first field in which two specs differ, None if they are equal."""
    return _difference(msgspec.to_builtins(stored), msgspec.to_builtins(asked), "")


def _difference(a: dict[str, Any], b: dict[str, Any], prefix: str) -> str | None:
    for name in [*a, *(name for name in b if name not in a)]:
        value, other = a.get(name), b.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            if found := _difference(value, other, f"{prefix}{name}."):
                return found
        elif value != other:
            return prefix + name
    return None


prepare(RunSpec)
