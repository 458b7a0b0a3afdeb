"""Tokens to text, as many at a time as came: the state of one choice between its events.

vLLM's own incremental decoder (`vllm.tokenizers.detokenizer_utils`, in 0.25 and 0.32) keeps a character back until it is whole. Imports vLLM
only when called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
_CONTEXT = 4
"""Tokens before one that may begin its character: UTF-8 has at most 4 bytes."""
_BROKEN = "\ufffd"


class Decoder:
    """Decodes the tokens of one choice. `prompt` has the token ids before the first sampled one. `special` says whether
    special tokens are text."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], special: bool) -> None:
        from vllm.tokenizers.detokenizer_utils import convert_prompt_ids_to_tokens

        self._tokenizer = tokenizer
        self._skip = not special
        # Only the end of the prompt matters, and with it the first token keeps its leading space.
        self._window, self._prefix, self._read = convert_prompt_ids_to_tokens(
            tokenizer, list(prompt), skip_special_tokens=self._skip
        )

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens add."""
        from vllm.tokenizers.detokenizer_utils import detokenize_incrementally

        said = []
        for token in tokens:
            new, text, self._prefix, self._read = detokenize_incrementally(
                tokenizer=self._tokenizer, all_input_ids=[token], prev_tokens=self._window, prefix_offset=self._prefix,
                read_offset=self._read, skip_special_tokens=self._skip, spaces_between_special_tokens=True,
            )  # fmt: skip
            # What is before the prefix is never read again.
            self._window = (self._window + new)[self._prefix :]
            self._read -= self._prefix
            self._prefix = 0
            said.append(text)
        return "".join(said)


class Scores:
    """Logprobs with the text of their tokens, as OpenAI's chat form has them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []

    def push(self, content: Sequence[Json]) -> list[Json]:
        """Add the entries of one event. Returns {token, bytes, logprob, top_logprobs} for each."""
        shown = []
        for entry in content:
            token = token_of(entry)
            best = [self._entry(token_of(one), one["logprob"]) for one in entry.get("top_logprobs") or ()]
            shown.append(self._entry(token, entry["logprob"]) | {"top_logprobs": best})
            self._before = [*self._before, token][-_CONTEXT:]
        return shown

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._text(token)
        return {"token": text, "bytes": list(text.encode(errors="replace")), "logprob": logprob}

    def _text(self, token: int) -> str:
        """Return what a token adds to the text before it; "" for a token that only begins a character."""
        from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

        (text,) = convert_ids_list_to_tokens(self._tokenizer, [token])
        if not text.endswith(_BROKEN):
            return str(text)
        for count in range(1, len(self._before) + 1):
            context = self._before[-count:]
            whole = self._tokenizer.decode([*context, token])
            if not whole.endswith(_BROKEN):
                return str(whole[len(self._tokenizer.decode(context).rstrip(_BROKEN)) :])
        return ""


def token_of(entry: Json) -> int:
    """Return the token that a logprob belongs to; before 0.32 it is text, `token_id:17`."""
    return entry["token_id"] if "token_id" in entry else int(str(entry["token"]).removeprefix("token_id:"))
