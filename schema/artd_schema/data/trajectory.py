"""Trajectories: turns of tokens, with the policy that sampled them.

The wire (by value), the ledger and the store use the same form, whose columns are little-endian bytes, never lists. A
trajectory's body is the msgpack encoding of `list[Turn]`; its digest is the sha256 of that body.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Split = Literal["train", "eval"]
Pick = Literal["newest", "best", "worst", "random"]
"""How to choose trajectories to read: best and worst by reward."""


class RouteShape(Struct, frozen=True, kw_only=True):
    """The shape of the routes of a mixture of experts.

    `layers`: MoE layers, in order, without dense ones. `topk`: experts per token and layer. `experts`: routed experts of a
    layer; ids are below it.
    """

    layers: int
    topk: int
    experts: int

    @property
    def width(self) -> int:
        """Bytes of one expert id: 1 (u8) for up to 256 experts, else 2 (little-endian u16)."""
        return 1 if self.experts <= 256 else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's routes, [layers, topk]."""
        return self.layers * self.topk * self.width


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The effective sampling parameters of a turn.

    `untrainable` says which of them the trainer cannot score. `stop` and `max_tokens` do not change the distribution of the
    sampled tokens.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Untrainable(Struct, frozen=True, kw_only=True):
    """A sampling parameter with which samples cannot be trained. `why`: the effect of its value; `wanted`: a value that can be
    trained."""

    name: str
    value: float
    why: str
    wanted: str


_SHAPING = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_shape = attrgetter(*_SHAPING)
_PLAIN = _shape(Sampling())


HEAT = (0.01, 100.0)
"""The range of temperatures that can be trained. Engines raise a lower temperature to 0.01, and far above the range samples are noise."""


def untrainable(sampling: Sampling) -> list[Untrainable]:
    """Return the parameters that the trainer, which scores softmax(logits / temperature) over the whole vocabulary, cannot
    score."""
    found = []
    low, high = HEAT
    if not low <= sampling.temperature <= high:
        why = f"artd trains on temperatures from {low:g} to {high:g}"
        if not sampling.temperature > 0:
            why = "greedy samples have no policy gradient"
        wanted = f"a temperature from {low:g} to {high:g}"
        found.append(Untrainable(name="temperature", value=sampling.temperature, why=why, wanted=wanted))
    shape = _shape(sampling)
    if shape != _PLAIN:
        why = "this truncates or reshapes the policy, which the trainer cannot score"
        found += [
            Untrainable(name=name, value=value, why=why, wanted=f"{name}={plain}")
            for name, value, plain in zip(_SHAPING, shape, _PLAIN, strict=True)
            if value != plain and not (name == "top_k" and value == -1)
        ]
    return found


class Given(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the program gives for the sampled tokens of a turn.

    `advantages`: float32 [C], the advantage of each token. `weights`: float32 [C], a factor of each token's loss, at
    least 0; a token of weight 0 is not trained. b"" = none. `example`: the tokens were not sampled but given, to be
    trained by cross-entropy; their logprobs are 0.
    """

    advantages: bytes = b""
    weights: bytes = b""
    example: bool = False


class Turn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation.

    `prompt_ids`: int32 [P]. `token_ids`: int32 [C], the sampled tokens. `logprobs`: float32 [C], natural logarithm, processed
    (after the temperature), finite and <= 0. `policy_epoch`: runs of (start_token, epoch) over the C sampled tokens, starts
    rising from 0, of the weights that sampled each token. `kv_cache_epoch`: the same for the weights that computed its entry in
    the KV cache as later tokens saw it. Both are empty when unknown (an engine that artd does not run, or a push that nobody
    saw).

    `routes`: the experts of each token when it was first the engine's input, by which the next token was sampled, whatever was
    recomputed later. They are ids [rows, layers, topk] of the run's `RouteShape` (u8 or little-endian u16). Row j belongs to
    token `routes_start` + j of prompt_ids + token_ids. The rows reach the end, or end one token before it, because the last
    sampled token was never an input. b"" = none.

    `given`: what the program gives beside what was sampled. `raw`: the raw response (JSON) with unknown fields, without what the columns
    hold.
    """

    prompt_ids: bytes
    token_ids: bytes
    logprobs: bytes
    sampling: Sampling = Sampling()
    policy_epoch: tuple[tuple[int, int], ...] = ()
    kv_cache_epoch: tuple[tuple[int, int], ...] = ()
    num_evictions: int = 0
    routes: bytes = b""
    routes_start: int = 0
    finish_reason: str = ""
    response_id: str = ""
    choice: int = 0
    raw: bytes = b""
    # One field: with more than 15, msgspec would write another header of every turn.
    given: Given | UnsetType = UNSET

    @property
    def advantages(self) -> bytes:
        """The advantages as `Given` has them, b"" if none are given."""
        return self.given.advantages if self.given else b""

    @property
    def weights(self) -> bytes:
        """The weights as `Given` has them, b"" if none are given."""
        return self.given.weights if self.given else b""

    @property
    def example(self) -> bool:
        """Whether the turn is an example."""
        return self.given.example if self.given else False


class Credit(Struct, frozen=True, omit_defaults=True):
    """The advantages and weights that a program gives for one turn: a number for each sampled token, or one for all of
    them. () = none."""

    advantages: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()


class ExchangeRef(Struct, frozen=True):
    """One choice of a response that artd's gateway served and wrote to its ledger."""

    response_id: str
    choice: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
