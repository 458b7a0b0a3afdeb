"""Entry point of the trainer worker: `python -m artd_workers.trainer`, started by artd's supervisor only."""

from __future__ import annotations

import faulthandler
import logging
import platform
import signal
import sys
import warnings
from importlib import metadata

import msgspec

from artd_workers.base_files import BaseChanged, BaseFiles
from artd_workers.daemon_link import Link, LinkClosed, Rejected
from artd_workers.gpus import refusal


def versions() -> dict[str, str]:
    """Return the versions that a bitwise repetition needs."""
    packages = ("torch", "megatron-core", "safetensors", "numpy")
    return {"python": platform.python_version()} | {package: metadata.version(package) for package in packages}


def _fail(why: str) -> int:
    """Print why the trainer ends; the daemon reports the log's last line. Returns the exit status."""
    print(f"trainer worker: {why}", file=sys.stderr)
    return 1


def main() -> int:
    # Before the daemon ends a stalled trainer, it sends SIGUSR1 for the stacks.
    faulthandler.register(signal.SIGUSR1, file=2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    link = Link.from_env("trainer", versions())
    try:
        welcome = link.start()
    except (Rejected, LinkClosed) as error:
        return _fail(str(error))
    try:
        if welcome.trainer is None:
            return _fail("Welcome carries no trainer configuration")
        spec = welcome.trainer.spec
        base = BaseFiles(spec.model, welcome.trainer.base)
        if refused := refusal("trainer.device", spec.trainer.device):  # at every start, before torch is imported
            return _fail(refused)
        logging.getLogger("megatron").setLevel(logging.ERROR)
        # Megatron warns of each missing accelerator package, which a CPU does not need.
        warnings.filterwarnings("ignore", module=r"megatron\..*")
        from .placement import device_of, prepare

        try:
            prepare(spec)
            from artd_workers.trainer.parallel import launch

            parallel = launch.layout(spec)
        except ValueError as error:
            return _fail(str(error))
        from .trainer import Trainer
        from .worker import TrainerWorker

        with launch.start_ranks(parallel, device_of(spec) == "cuda") as ranks:
            ranks.send_order(msgspec.msgpack.encode(welcome.trainer))
            trainer = Trainer(welcome.trainer, versions(), ranks)
            base.verify()
            return TrainerWorker(link, trainer).run()
    except BaseChanged as error:
        return _fail(str(error))
    finally:
        link.close()


if __name__ == "__main__":
    sys.exit(main())
