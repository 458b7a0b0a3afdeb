"""Decides what pip installs: in which order, with which flags, from which index.

Every call has --no-deps, so only packages of the lock are ever installed.
"""

from collections.abc import Iterator
from pathlib import Path

from . import diagnose, pip
from .lockfile import Lock


def stages(lock: Lock, sources: list[str], torch_index: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield (pins, flags) of each call of pip.

    CPU builds come first and alone: only they need the extra index, and without it they fail at once. Then come the rest, and
    last the packages that may have to be built with setuptools and pybind11 of the rest.
    """
    local = [pin for pin in lock.pins if "+" in pin.version]
    built = [pin for pin in lock.pins if pin.build]
    rest = [pin for pin in lock.pins if pin not in local and pin not in built]
    # Megatron-Core says Python >= 3.12; megatron.core is clean on 3.11 (only megatron.training is not).
    build_flags = ["--no-build-isolation", "--ignore-requires-python"]
    for pins, flags in ((local, torch_index), (rest, []), (built, build_flags)):
        if pins:
            yield [str(pin) for pin in pins], sources + flags


def pip_command(interpreter: Path, extra: list[str], pins: list[str]) -> list[str]:
    """Return pip's command line. --no-compile: Python compiles what is used at first import; compiling all takes longer."""
    flags = ["--no-deps", "--no-input", "--prefer-binary", "--no-compile", "--disable-pip-version-check"]
    return [str(interpreter), "-m", "pip", "install", *flags, *extra, *pins]


def torch_index(lock: Lock, interpreter: Path, sources: list[str]) -> list[str]:
    """Return flags for PyTorch's CPU index, but none when the user or pip's configuration names a package source."""
    if "+cpu" not in lock.versions.get("torch", "") or sources or pip.has_own_sources(pip.config_list(interpreter)):
        return []
    return ["--extra-index-url", diagnose.TORCH_CPU_INDEX]
