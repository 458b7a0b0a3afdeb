"""Which parsers a run gets by its model's template, what is refused by name, and what `engine.args` adds to the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from artd_schema.run.engines import VLLM, Flag
from artd_schema.run.spec import EngineSpec, RunSpec
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.engines.adapter import EngineError
from artd_workers.engines.vllm.command import command
from artd_workers.engines.vllm.parsers import Parsers, choose

TOOLS = Path(__file__).parents[1] / "gateway" / "tools_template.jinja"


def model(folder: Path, template: str, model_type: str = "qwen3") -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("template", "model_type", "found"),
    [
        (TOOLS.read_text(), "qwen3", Parsers("hermes", "qwen3")),
        ("{{ messages }}", "qwen3", Parsers()),
        ("<tool_call> <function=f>", "qwen3_moe", Parsers("qwen3_coder", "")),
        ("<|python_tag|> <think>", "llama", Parsers("llama3_json", "deepseek_r1")),
        ("<tool_call> <arg_key> <think>", "glm4_moe", Parsers("glm45", "glm45")),
    ],
)
def test_the_template_chooses(tmp_path: Path, template: str, model_type: str, found: Parsers) -> None:
    assert choose(EngineSpec(), model(tmp_path, template, model_type), "0.32") == found
    nowhere = model(tmp_path, "", model_type)
    assert choose(EngineSpec(chat_template=template), nowhere, "0.32") == found
    assert (
        choose(EngineSpec(chat_template=template, tool_parser="none", reasoning_parser="none"), nowhere, "0.32")
        == Parsers()
    )


def test_a_template_file_comes_before_the_tokenizers(tmp_path: Path) -> None:
    folder = model(tmp_path, "{{ messages }}")
    (folder / "chat_template.jinja").write_text("<tool_call>")
    assert choose(EngineSpec(), folder, "0.25") == Parsers("hermes")


def test_a_parser_that_this_version_lacks_is_refused_by_name(tmp_path: Path) -> None:
    folder = model(tmp_path, "")
    assert choose(EngineSpec(tool_parser="qwen3_json"), folder, "0.32") == Parsers("qwen3_json")
    with pytest.raises(EngineError, match=r"engine.tool_parser='qwen3_json' is not a parser of vLLM 0.25"):
        choose(EngineSpec(tool_parser="qwen3_json"), folder, "0.25")
    with pytest.raises(EngineError, match=r"engine.reasoning_parser='hermes'"):
        choose(EngineSpec(reasoning_parser="hermes"), folder, "0.32")


FORBIDDEN = (
    "middleware trust-remote-code logits-processors logprobs-mode quantization hf-overrides speculative-config kv-cache-dtype"
    " worker-extension-cls model served-model-name host port api-key load-format chat-template tool-parser-plugin"
    " --trust-remote-code generation-config max-logprobs enable-lora"
)


@pytest.mark.parametrize("name", FORBIDDEN.split())
def test_what_loads_code_or_changes_logits_is_refused_by_name(name: str) -> None:
    assert name in VLLM.arg_refusal(name, "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [("stream-interval", "4"), ("stream-interval", True), ("async-scheduling", "yes"), ("scheduling-policy", "a; rm"),
     ("scheduling-policy", "--model")],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused(name: str, value: Any) -> None:
    assert VLLM.arg_refusal(name, value)


def test_a_flag_that_this_version_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(Any, VLLM.args), "newest", Flag("switch", "0.32"))
    assert VLLM.arg_refusal("newest", True, "0.32") == VLLM.arg_refusal("newest", True) == ""
    assert "vLLM 0.25 has no 'newest'" in VLLM.arg_refusal("newest", True, "0.25")


def words(**args: Any) -> list[str]:
    spec = RunSpec(model="/m", engine=EngineSpec(device="cpu", args=args.pop("args")))
    return command(EngineConfig(run="toy", spec=spec, dir="d", log="l", python="python", **args), Path("/s"))


def test_args_reach_the_command() -> None:
    line = words(args={"stream-interval": 4, "max-num-batched-tokens": 4096, "async-scheduling": False})
    assert line[line.index("--stream-interval") + 1] == "4" and "--no-async-scheduling" in line
    assert line.count("--max-num-batched-tokens") == 1 and line[line.index("--max-num-batched-tokens") + 1] == "4096"


def test_what_artd_sets_for_a_reason_stays() -> None:
    with pytest.raises(EngineError, match="artd sets --enable-chunked-prefill itself"):
        words(args={"enable-chunked-prefill": True})
