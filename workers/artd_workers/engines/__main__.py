"""Entry point of the engine worker: `python -m artd_workers.engines`, started by artd's supervisor only."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from artd_schema.run.engines import ENGINES
from artd_workers.daemon_link import Link, LinkClosed, Rejected

from .worker import EngineWorker, remove_folder


def versions() -> dict[str, str]:
    """Return versions for Hello from package metadata; importing an engine here would cost seconds and hundreds of MB."""
    found = {"python": platform.python_version()}
    packages = [package for engine in ENGINES.values() for package in engine.packages]
    for package in (*packages, "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    link = Link.from_env("engine", versions())
    try:
        welcome = link.start()
    except (Rejected, LinkClosed) as error:
        print(f"engine worker: {error}", file=sys.stderr)
        return 1
    if welcome.engine is None:
        print("engine worker: Welcome carries no engine configuration", file=sys.stderr)
        link.close()
        return 1
    try:
        return EngineWorker(link, welcome.engine).run()
    finally:
        remove_folder(welcome.engine)


if __name__ == "__main__":
    sys.exit(main())
