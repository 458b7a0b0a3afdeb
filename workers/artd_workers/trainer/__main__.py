"""Entry point of the trainer worker: `python -m artd_workers.trainer`, started by artd's supervisor only."""

from __future__ import annotations

import logging
import platform
import sys
import warnings
from importlib import metadata

import msgspec

from ..harness import Link, LinkClosed, Rejected


def versions() -> dict[str, str]:
    """Versions that a bitwise repeat needs."""
    packages = ("torch", "megatron-core", "safetensors", "numpy")
    return {"python": platform.python_version()} | {package: metadata.version(package) for package in packages}


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    link = Link.from_env("trainer", versions())
    try:
        welcome = link.start()
    except (Rejected, LinkClosed) as error:
        print(f"trainer worker: {error}", file=sys.stderr)
        return 1
    try:
        if welcome.trainer is None:
            print("trainer worker: Welcome carries no trainer configuration", file=sys.stderr)
            return 1
        logging.getLogger("megatron").setLevel(logging.ERROR)
        # Megatron warns of each accelerator package that a CPU does not need.
        warnings.filterwarnings("ignore", module=r"megatron\..*")
        from .placement import device_of, prepare

        spec = welcome.trainer.spec
        prepare(spec)
        from . import launch
        from .trainer import Trainer
        from .worker import TrainerWorker

        try:
            parallel = launch.layout(spec)
        except ValueError as error:
            print(f"trainer worker: {error}", file=sys.stderr)
            return 1
        with launch.started(parallel, device_of(spec) == "cuda") as ranks:
            ranks.tell(msgspec.msgpack.encode(welcome.trainer))
            return TrainerWorker(link, Trainer(welcome.trainer, versions(), ranks)).run()
    finally:
        link.close()


if __name__ == "__main__":
    sys.exit(main())
