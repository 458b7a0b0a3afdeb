"""Which of vLLM's parsers find tool calls and reasoning in what a model says: chosen by its chat template, proven once the server answers.

Most of vLLM's parsers start with any tokenizer, and find nothing in a model of another family. So the template writes a call of its own, and the
parser has to find it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artd_schema.run.engines import AUTO, NONE, VLLM
from artd_schema.run.spec import EngineSpec
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import EngineError
from artd_workers.engines.http import StatusError, call

TEMPLATE = "chat_template.jinja"
_CHAT = "/v1/chat/completions"
_TOOLS = (
    ("<arg_key>", "glm45"), ("<function=", "qwen3_coder"), ("<start_function_call>", "functiongemma"),
    ("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"), ("<|channel|>", "openai"),
)  # fmt: skip
"""What a chat template writes -> the parser that reads it; the first that is found counts."""
_REASONING = (("<arg_key>", "glm45"), ("<|channel|>", "openai_gptoss"))
_THINKS = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_next": "qwen3",
    "qwen2": "deepseek_r1",
    "llama": "deepseek_r1",
}
"""Of a template with `<think>`: model_type -> parser. Llama and Qwen2 think where they were distilled from DeepSeek-R1."""
_TOOL = {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
_CALL = {"city": "Oslo"}
_USER = {"role": "user", "content": "u"}


@dataclass(frozen=True)
class Parsers:
    """The names of a run's parsers; "" = none."""

    tool: str = ""
    reasoning: str = ""

    def flags(self) -> list[str]:
        """Return the server's flags."""
        found = ["--enable-auto-tool-choice", "--tool-call-parser", self.tool] if self.tool else []
        return found + (["--reasoning-parser", self.reasoning] if self.reasoning else [])


def choose(spec: EngineSpec, model: Path, series: str) -> Parsers:
    """Return the parsers of a run. `model` is its folder, `series` that of the installed vLLM. Raises EngineError for a
    name that this vLLM lacks."""
    for field in ("tool_parser", "reasoning_parser"):
        if refused := VLLM.parser_refusal(field, getattr(spec, field), series):
            raise EngineError(refused)
    template = spec.chat_template or read_template(model)
    tool, reasoning = spec.tool_parser, spec.reasoning_parser
    if tool == AUTO:
        tool = next((name for mark, name in _TOOLS if mark in template), NONE)
    if reasoning == AUTO:
        thinks = _THINKS.get(_model_type(model), NONE) if "<think>" in template else NONE
        reasoning = next((name for mark, name in _REASONING if mark in template), thinks)
    return Parsers(*("" if name == NONE else name for name in (tool, reasoning)))


def read_template(model: Path) -> str:
    """Return the chat template of a model's folder; "" if it has none."""
    try:
        return (model / TEMPLATE).read_text()
    except FileNotFoundError:
        pass
    found = _read_json(model / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # the model has several templates with names
        named = {one.get("name"): one.get("template") for one in found}
        found = named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else ""


def prove(parsers: Parsers, socket: Path, model: str, deadline: Deadline) -> None:
    """Have the template write a tool call and some reasoning, and the parsers find them. Raises EngineError with the field to change."""
    if not parsers.tool and not parsers.reasoning:
        return
    proof = _Proof(socket, model, deadline)
    if parsers.tool:
        proof.tool(parsers.tool)
    if parsers.reasoning:
        proof.reasoning(parsers.reasoning)


class _Proof:
    def __init__(self, socket: Path, model: str, deadline: Deadline) -> None:
        self._socket = str(socket)
        self._deadline = deadline
        self._body: dict[str, Any] = {"model": model, "tools": [{"type": "function", "function": _TOOL}]}

    def tool(self, name: str) -> None:
        asked = {
            "id": "call_1",
            "type": "function",
            "function": {"name": _TOOL["name"], "arguments": json.dumps(_CALL)},
        }
        found = self._parse({"role": "assistant", "content": "", "tool_calls": [asked]}, "tool_parser", name)
        calls = [one.get("function") or {} for one in found.get("tool_calls") or ()]
        if [(one.get("name"), _arguments(one)) for one in calls] != [(_TOOL["name"], _CALL)]:
            raise EngineError(
                f"engine.tool_parser={name!r} does not find the tool call that the model's chat template writes (it made {found} of it):"
                " name the model's own parser, or 'none'"
            )

    def reasoning(self, name: str) -> None:
        said = {"role": "assistant", "content": "answer", "reasoning_content": "because", "reasoning": "because"}
        found = self._parse(said, "reasoning_parser", name)
        text = str(found.get("reasoning") or found.get("reasoning_content") or "")
        if "because" not in str(found):
            return  # the template drops reasoning, so it cannot prove the parser
        if text.strip() != "because" or (found.get("content") or "").strip() != "answer":
            raise EngineError(
                f"engine.reasoning_parser={name!r} does not find the reasoning that the model's chat template writes (it made {found} of it):"
                " name the model's own parser, or 'none'"
            )

    def _parse(self, message: dict[str, Any], field: str, name: str) -> dict[str, Any]:
        """Return what the parsers make of an assistant's message as the template writes it."""
        try:
            before = self._render([_USER], True)
            tokens = self._render([_USER, message], False)
            same = next((i for i, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), len(before))
            choice = {"index": 0, "finish_reason": "stop", "token_ids": tokens[same:], "logprobs": None}
            asked = {"generate_response": {"request_id": "proof", "choices": [choice]}, "prompt_token_ids": before,
                     "chat_request": self._body | {"messages": [_USER]}, "model": self._body["model"]}  # fmt: skip
            told = call(self._socket, "POST", f"{_CHAT}/derender", asked, deadline=self._deadline)
        except StatusError as error:
            raise EngineError(
                f"engine.{field}={name!r} cannot be proven with the model's chat template: {error}"
            ) from None
        found: dict[str, Any] = told["choices"][0]["message"]
        return {key: value for key, value in found.items() if value}

    def _render(self, messages: list[dict[str, Any]], prompt: bool) -> list[int]:
        body = self._body | {"messages": messages, "add_generation_prompt": prompt}
        tokens: list[int] = call(self._socket, "POST", f"{_CHAT}/render", body, deadline=self._deadline)["token_ids"]
        return tokens


def _arguments(function: dict[str, Any]) -> Any:
    try:
        return json.loads(function.get("arguments") or "")
    except ValueError:
        return None


def _model_type(model: Path) -> str:
    return str(_read_json(model / "config.json").get("model_type", ""))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
