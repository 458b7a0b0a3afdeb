"""The models that the examples train, made once by the megatron runtime and kept in the XDG data folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from artd.models import names
from artd.models.fetch import FetchError, fetch, to_stderr
from artd.runtimes import registry
from artd_schema.paths import data_home


def smollm2() -> str:
    """SmolLM2-135M-Instruct as a Hugging Face folder (`artd model fetch`; 20 s, once)."""
    name = names.parse("smollm2-135m-instruct")
    assert name is not None
    try:
        return str(fetch(name, to_stderr()))
    except FetchError as error:
        raise SystemExit(f"error: {error}") from None


def random_moe(seed: int) -> str:
    """A Qwen3-MoE of a million random parameters (4 s)."""
    name = f"random-qwen3-moe-1m-{seed}"
    return _made(name, f"making a random Qwen3-MoE (seed {seed})", "random_moe", ["--seed", str(seed)])


def _made(name: str, doing: str, module: str, arguments: list[str]) -> str:
    target = data_home() / "artd" / "models" / name
    if (target / "config.json").exists():
        return str(target)
    print(f"{doing} at {target} (once)", flush=True)
    paths = [_beside(package) for package in ("artd_workers", "artd_schema")]
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [str(registry.find("megatron").python), "-m", f"artd_workers.models.{module}", str(target), *arguments]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": ":".join(paths)}, check=True)
    return str(target)


def _beside(package: str) -> str:
    """The folder that a package lies in."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]).parent)
