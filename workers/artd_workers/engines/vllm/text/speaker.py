"""What a client sees of each choice of one generate request, event by event: text, or what vLLM's parsers find in it."""

from __future__ import annotations

from typing import Any

from .cut import Cut
from .decode import Decoder, Scores

Json = dict[str, Any]


class Speaker:
    """What the client sees of one generate request.

    `generate` is the request's body. `chat` or `completion` is the client's body. `logprobs` says whether the client
    gets those of the tokens. `derenderer` is vLLM's `OnlineDerenderer`, which has tokenizer and parsers.
    """

    def __init__(
        self, derenderer: Any, generate: Json, chat: Json | None, completion: Json | None, logprobs: bool
    ) -> None:
        self._derenderer = derenderer
        self._generate = generate
        self._chat = _chat_request(chat) if chat is not None and derenderer.parser is not None else None
        self._special = (chat or completion or {}).get("skip_special_tokens") is False
        self._logprobs = logprobs
        self._choices: dict[int, _Choice] = {}

    def show(self, choice: Json) -> Json:
        """Return what a choice of an event adds: `content`, `reasoning`, `tool_calls` (deltas, absent when empty) and `logprobs`."""
        index = choice["index"]
        if index not in self._choices:
            self._choices[index] = self._begin()
        return self._choices[index].show(choice)

    def _begin(self) -> _Choice:
        tokenizer, prompt = self._derenderer.renderer.get_tokenizer(), self._generate["token_ids"]
        parser = None if self._chat is None else self._parser(tokenizer)
        return _Choice(
            Decoder(tokenizer, prompt, self._special or parser is not None),
            Cut(self._generate["sampling_params"]),
            Scores(tokenizer) if self._logprobs else None,
            parser, self._chat, prompt,
        )  # fmt: skip

    def _parser(self, tokenizer: Any) -> Any:
        found, request = self._derenderer, self._chat
        options: Json = {}
        if not found.use_harmony:
            params = request.build_chat_params(found.chat_template, found.chat_template_content_format)  # type: ignore[union-attr]
            options = params.with_defaults(found.default_chat_template_kwargs).chat_template_kwargs
        return found.parser(tokenizer, request.tools, chat_template_kwargs=options)  # type: ignore[union-attr]


class _Choice:
    def __init__(
        self, decoder: Decoder, cut: Cut, scores: Scores | None, parser: Any, request: Any, prompt: list[int]
    ) -> None:
        self._decoder = decoder
        self._cut = cut
        self._scores = scores
        self._parser = parser
        self._request = request
        self._prompt = prompt

    def show(self, choice: Json) -> Json:
        text = self._cut.push(self._decoder.push(self._cut.shown_ids(choice)), choice)
        shown: Json = {"content": text} if text else {}
        if self._parser is not None:
            shown = self._parse(text, choice)
        if self._scores is not None and (content := (choice.get("logprobs") or {}).get("content")):
            shown["logprobs"] = self._scores.push(content)
        return shown

    def _parse(self, text: str, choice: Json) -> Json:
        finished = choice.get("finish_reason") is not None
        delta = self._parser.parse_delta(
            text, choice["token_ids"], self._request, prompt_token_ids=self._prompt, finished=finished
        )
        found = delta.model_dump(exclude_none=True) if delta is not None else {}
        return {name: found[name] for name in ("content", "reasoning", "tool_calls") if found.get(name)}


def _chat_request(body: Json) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest.model_validate(body)
