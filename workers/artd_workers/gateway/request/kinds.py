"""What differs between chat completions and completions: paths, bodies and the form of a choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from artd_workers.gateway.errors import invalid


@dataclass(frozen=True)
class Kind:
    """One of the two OpenAI endpoints."""

    path: str
    prefix: str
    object: str
    chat: bool

    def response_id(self) -> str:
        return f"{self.prefix}-{uuid4().hex}"

    def check(self, body: dict[str, Any]) -> None:
        """Check the body of a request. Raises ApiError 400 for what no part of the gateway supports."""
        if not isinstance(body.get("model"), str) or not body["model"]:
            raise invalid("`model` is missing: give a run's name, or RUN@STEP", param="model", code="model_missing")
        if body.get("echo"):
            raise invalid("`echo` is not supported: the prompt's ids come back with return_token_ids", param="echo")

    def wants_logprobs(self, body: dict[str, Any]) -> bool:
        asked = body.get("logprobs")
        return bool(asked) if self.chat else asked is not None and asked is not False

    def wants_ids(self, body: dict[str, Any]) -> bool:
        """Return whether token ids come with the answer: by either of the names that programs ask by."""
        return bool(body.get("return_token_ids") or body.get("return_tokens_as_token_ids"))

    def scores(self, shown: list[dict[str, Any]], offset: int = 0) -> dict[str, Any] | None:
        """Return logprobs as this endpoint has them, from those of chat; None when there are none. offset: characters before the first."""
        if not shown:
            return None
        if self.chat:
            return {"content": shown}
        offsets = [offset]
        for one in shown[:-1]:
            offsets.append(offsets[-1] + len(one["token"]))
        best = [{top["token"]: top["logprob"] for top in one.get("top_logprobs") or ()} or None for one in shown]
        return {"text_offset": offsets, "tokens": [one["token"] for one in shown],
                "token_logprobs": [one["logprob"] for one in shown], "top_logprobs": best}  # fmt: skip

    def text(self, choice: dict[str, Any]) -> str | None:
        return choice["message"].get("content") if self.chat else choice.get("text")

    def set_text(self, choice: dict[str, Any], text: str) -> None:
        if self.chat:
            choice["message"]["content"] = text
        else:
            choice["text"] = text

    def bearer_of_ids(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return the object that carries token ids when they were asked for."""
        return choice["message"] if self.chat else choice


CHAT = Kind(path="/v1/chat/completions", prefix="chatcmpl", object="chat.completion", chat=True)
COMPLETION = Kind(path="/v1/completions", prefix="cmpl", object="text_completion", chat=False)
