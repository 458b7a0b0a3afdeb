"""What every benchmark prints with --json: one object {machine, versions, cases: [{name, value, unit, goal, met}]}."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

PACKAGES = ("artd", "anyio", "aiosqlite", "msgspec", "numpy", "pyzmq", "safetensors")
WORKERS = ("torch", "megatron-core", "transformer-engine", "vllm")
"""Told where they are."""


@dataclass(frozen=True)
class Case:
    """met: None when the case has no goal. goal: such as `>= 0.97`."""

    name: str
    value: float
    unit: str
    goal: str | None
    met: bool | None


@dataclass
class Report:
    """Cases of one benchmark, in the order in which they were measured."""

    title: str
    cases: list[Case] = field(default_factory=list)
    machine: dict[str, object] = field(default_factory=lambda: machine())  # at the start, before anything is pinned

    def add(
        self, name: str, value: float, unit: str, goal: float | None = None, want: Literal[">=", "<="] = ">="
    ) -> None:
        met = None if goal is None else (value >= goal if want == ">=" else value <= goal)
        self.cases.append(Case(name, value, unit, None if goal is None else f"{want} {goal:g}", met))

    def to_dict(self) -> dict[str, object]:
        return {"machine": self.machine, "versions": versions(), "cases": [asdict(case) for case in self.cases]}

    def finish(self, as_json: bool) -> int:
        """Print; 0 when every goal was met, else 1."""
        if as_json:
            print(json.dumps(self.to_dict(), indent=2))
        else:
            print(self.title)
            for case in self.cases:
                verdict = {None: "", True: "met", False: "MISSED"}[case.met]
                print(f"  {case.name:<52} {case.value:>14,.4g} {case.unit:<10} {case.goal or '':<12} {verdict}")
        return 0 if all(case.met is not False for case in self.cases) else 1


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with --json."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def machine() -> dict[str, object]:
    """The machine: processor, cores that this process may use, memory in MiB, load, kernel, GPUs with their driver."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "arch": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": pages // 2**20,
        "load_1m": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, SQLite, of what the daemon and its client import, and of what workers do."""
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    for name in (*PACKAGES, *WORKERS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "not installed"
    return found


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or sys.platform
