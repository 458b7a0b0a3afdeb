"""`artd doctor` and interpreters of the user's own: each is run, and what a worker would lack there is said with what to do."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from artd.runtimes import own, registry
from artd.runtimes.finding import Finding
from artd.runtimes.own import Own
from artd.supervise import procfs
from artd_schema.run.engines import ENGINES
from artd_workers import probe
from tests.awake import SOON_S

WORKERS = Path(probe.__file__).parent
FOLDERS = {"trainer": ("trainer", "models", "transfer"), "engine": ("engines", "models", "transfer")}
TORCH = """
import os
print("a word on stdout")
__version__ = "2.11.0"
class version:
    cuda = os.environ.get("BUILT_FOR")
class cuda:
    @staticmethod
    def device_count():
        return len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) if os.environ.get("BUILT_FOR") else 0
"""


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def packages(folder: Path, **content: str) -> tuple[str, ...]:
    """Modules by these names, `__` for a dot, beside stand-ins for what every worker needs."""
    for name, text in {"numpy": "", "safetensors": "", "torch": TORCH, **content}.items():
        for part in (place := folder / name.replace("__", "/"), *place.relative_to(folder).parents):
            (folder / part).mkdir(parents=True, exist_ok=True)
            (folder / part / "__init__.py").touch()
        (place / "__init__.py").write_text(text)
    return (str(folder),)


def one(which: Own) -> Finding:
    (found,) = own.findings([which])
    return found


@pytest.fixture(autouse=True)
def _no_gpu_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(own, "_NVIDIA", tmp_path / "nvidiactl")
    monkeypatch.delenv("BUILT_FOR", raising=False)


def test_what_is_there_is_told_with_its_versions(tmp_path: Path) -> None:
    folders = packages(tmp_path / "site", megatron__core="__version__ = '0.19.2'")
    found = one(Own("trainer", "megatron", sys.executable, folders))
    assert (found.name, found.state, found.next) == ("megatron", "ok", "")
    assert "torch 2.11.0, megatron.core 0.19.2" in found.value and found.value.endswith("torch sees no GPU")


def test_what_is_missing_is_told_with_the_command(tmp_path: Path) -> None:
    bare = script(tmp_path / "python", f'exec "{sys.executable}" -S "$@"')  # without site-packages
    found = one(Own("trainer", "megatron", bare))
    assert found.state == "missing" and "megatron.core (ModuleNotFoundError: " in found.value
    assert found.next.startswith(f"{bare} -m pip install torch megatron-core numpy safetensors msgspec pyzmq; docs/")


def test_what_cannot_be_loaded_is_no_missing_package(tmp_path: Path) -> None:
    folders = packages(tmp_path / "site", vllm="raise ImportError('undefined symbol: _ZN3c10')")
    found = one(Own("engine", "vllm", sys.executable, folders))
    assert found.state == "missing" and "vllm (ImportError: undefined symbol: _ZN3c10)" in found.value
    assert f"PYTHONPATH={folders[0]} {sys.executable} -c 'import torch, vllm' shows all of it" in found.next


@pytest.mark.parametrize(("version", "state"), [("0.25.1", "ok"), ("0.99.0", "missing")])
def test_an_engine_that_artd_does_not_know_is_told_before_the_daemon_starts_it(
    version: str, state: str, tmp_path: Path
) -> None:
    found = one(Own("engine", "vllm", sys.executable, packages(tmp_path, vllm=f"__version__ = {version!r}")))
    assert found.state == state
    assert ("0.99.0 is not in artd's capability table (it knows 0.32, 0.25" in found.value) == (state == "missing")


def test_on_a_gpu_the_trainer_needs_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILT_FOR", "13.0")
    folders = packages(tmp_path, megatron__core="")
    found = one(Own("trainer", "megatron", sys.executable, folders, gpus=(2, 3)))
    assert found.state == "missing" and "transformer_engine.pytorch (ModuleNotFoundError" in found.value
    assert "pip install 'transformer-engine[core-cu13,pytorch]' triton; docs/" in found.next
    packages(tmp_path, transformer_engine__pytorch="", triton="")
    found = one(Own("trainer", "megatron", sys.executable, folders, gpus=(2, 3)))
    assert found.state == "ok" and found.value.endswith("torch sees 2 GPUs")


def test_a_torch_that_sees_too_few_gpus_is_told(tmp_path: Path) -> None:
    folders = packages(tmp_path / "site", megatron__core="")
    found = one(Own("trainer", "megatron", sys.executable, folders, gpus=(1,)))
    assert found.state == "warning"
    assert found.next.startswith("gpus.trainer = [1] in artd.toml, and torch sees none: its torch is a CPU build")
    (tmp_path / "nvidiactl").touch()
    found = one(Own("trainer", "megatron", sys.executable, folders))
    assert found.state == "warning" and found.next.startswith("this machine has a GPU, and torch sees none")


def test_programs_that_give_no_answer(tmp_path: Path) -> None:
    broken = script(tmp_path / "broken", "echo 'no such option: -m' >&2; exit 3")
    old = script(tmp_path / "old", """echo '{"python": "3.9.1", "versions": {}, "failed": {"torch": "x"}}'""")
    (tmp_path / "no-format").write_bytes(b"\0\1")
    (tmp_path / "no-format").chmod(0o755)
    value = {name: one(Own("engine", "vllm", str(tmp_path / name))) for name in ("none", "broken", "old", "no-format")}
    assert {found.state for found in value.values()} == {"missing"} and all(found.next for found in value.values())
    assert "is not a program" in value["none"].value and value["broken"].value.endswith("status 3: no such option: -m")
    assert "3.11 or newer" in value["old"].next and "Exec format error" in value["no-format"].value
    assert broken and old


def test_they_are_asked_at_once_and_none_outlives_the_deadline(tmp_path: Path) -> None:
    slow = script(tmp_path / "slow", f"sleep 300 & echo $! >>{tmp_path}/pids; wait")
    started = time.monotonic()
    found = own.findings([Own("trainer", "megatron", slow), Own("engine", "vllm", slow)], deadline_s=1.0)
    assert time.monotonic() - started < SOON_S
    assert [(each.name, each.state) for each in found] == [("megatron", "warning"), ("vllm", "warning")]
    assert "still importing" in found[0].value
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2, "the second was asked after the first"
    assert not [stat for stat in map(procfs.read_stat, pids) if stat is not None and not stat.dead]


@pytest.mark.parametrize("kind", ["trainer", "engine"])
def test_the_probe_asks_for_whatever_the_worker_imports(kind: str) -> None:
    files = [WORKERS / "daemon_link.py", *(path for name in FOLDERS[kind] for path in (WORKERS / name).rglob("*.py"))]
    imported = {name for path in files for name in _imports(ast.parse(path.read_text()).body)}
    asked = {name.partition(".")[0] for name in (*probe.list_needed(kind, ENGINES["vllm"]), *probe.ON_GPU[kind])}
    lacking = imported - asked - {"artd_schema", "artd_workers"} - sys.stdlib_module_names
    assert not lacking and asked - {"transformer_engine"} <= imported


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    """First names of what a module imports when it is imported itself."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _imports(node.body)


@pytest.mark.real
def test_the_installed_runtimes_have_what_the_probe_asks_for() -> None:
    owns = [Own(w, name, str(registry.find(name).python)) for w, name in (("trainer", "megatron"), ("engine", "vllm"))]
    found = own.findings(owns, 240.0)
    assert [each.state for each in found] == ["ok", "ok"], found
