"""The reply to the client: what is corrected in what the engine derendered, and what is added to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from artd_schema.data.trajectory import RouteShape
from artd_workers.gateway.dialect import Dialect, Scored
from artd_workers.gateway.engine import npy
from artd_workers.gateway.engine.capture import Capture

from .kinds import Kind

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """An answer in the core's form. head: all of it but `choices`; bulky: it takes long to encode."""

    head: Json
    choices: list[Json]
    bulky: bool = False


def cut_choice(dialect: Dialect, kind: Kind, shown: Json, choice: Json, params: Json) -> None:
    """Cut what ended the choice off the text that derender made of it."""
    if text := kind.text(shown):
        kind.set_text(shown, dialect.cut_text(text, choice, params))


def finish_choice(kind: Kind, shown: Json, index: int) -> Json:
    """Return a choice as the client sees it, corrected: index, finish reason."""
    shown["index"] = index
    if kind.chat:
        _finish_message(shown["message"])
    if kind.chat and shown["message"].get("tool_calls") and shown.get("finish_reason") == "stop":
        shown["finish_reason"] = "tool_calls"
    return shown


def notes(dropped: bool) -> Json:
    """Return what a reply says beside the answer: that a grammar was dropped, so that the answer may have another form than was asked for."""
    return {"artd": {"grammar": "dropped"}} if dropped else {}


def raw_of(shown: Json, choice: Json, generated: Json, head: Json) -> Json:
    """Return the raw response of one choice for the ledger: what the client gets and what the engine said besides, without what the
    columns hold. head: the response without its choices."""
    told = {name: value for name, value in choice.items() if name not in _COLUMNS and value is not None}
    beside = {name: value for name, value in generated.items() if name not in _GENERATE_COLUMNS and value is not None}
    return head | {"choices": [shown], "engine": beside | {"choices": [told]}}


def _finish_message(message: Json) -> None:
    """Give tool calls our ids, reasoning both of its names, and leave out what is empty."""
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [call | {"id": own_call_id(call.get("id"))} for call in calls]
    if reasoning := message.pop("reasoning", None):
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}


def own_call_id(given: str | None) -> str:
    """Return the id of a tool call: the gateway's, by which its answer is found again, unless the model wrote one itself (Kimi)."""
    return given if given and given.startswith(("functions.", CALL_ID)) else CALL_ID + uuid4().hex


CALL_ID = "call_artd_"


def spell_ids(dialect: Dialect, shown: Json, choice: Json) -> None:
    """Name tokens of a chat choice's logprobs by their ids, `token_id:17`."""
    content = (shown.get("logprobs") or {}).get("content") or ()
    for entry, token, best in zip(content, choice["token_ids"], dialect.alternatives(choice), strict=False):
        entry["token"] = f"token_id:{token}"
        for one, (other, _) in zip(entry.get("top_logprobs") or (), best, strict=False):
            one["token"] = f"token_id:{other}"


def add_ids(kind: Kind, shown: Json, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    """Add the token ids of prompt and answer, and the sampled tokens' logprobs, for a client that asked for them."""
    shown["token_ids"] = tokens
    bearer = kind.bearer_of_ids(shown)
    bearer["prompt_token_ids"] = prompt
    bearer["generation_token_ids"] = tokens
    bearer["generation_log_probs"] = logprobs


def add_alternatives(dialect: Dialect, kind: Kind, shown: Json, choice: Json) -> None:
    """Add `generation_top_log_probs`: for each sampled token [[token id, logprob], ...], likeliest first, itself among them."""
    found = [_best_first(one) for one in dialect.alternatives(choice)]
    kind.bearer_of_ids(shown)["generation_top_log_probs"] = found


def add_experts(kind: Kind, shown: Json, capture: Capture, shape: RouteShape) -> None:
    """Add the routed experts, for a client that asked for token ids: base64 (msgspec's form of bytes) of a .npy file, [rows, MoE layers,
    topk], without dense layers; the first row is that of token routed_experts_start."""
    rows = len(capture.routes) // shape.row_bytes
    bearer = kind.bearer_of_ids(shown)
    bearer["routed_experts"] = npy.write(npy.Ids(rows, shape.layers, shape.topk, shape.width, capture.routes))
    bearer["routed_experts_start"] = capture.start


def _best_first(found: list[Scored]) -> list[tuple[int, float]]:
    return sorted(((token, value) for token, value in found if token is not None), key=lambda pair: -pair[1])


_COLUMNS = ("token_ids", "logprobs")
_GENERATE_COLUMNS = ("choices", "usage", "created", "prompt_token_ids")
