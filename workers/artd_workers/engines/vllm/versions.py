"""What each version of vLLM can do, as rows of a table; no other code compares versions.

The series are those of the engine's entry in `artd_schema.run.engines`, which a test compares.
"""

from __future__ import annotations

from importlib import metadata

from artd_schema.run import engines
from artd_workers.engines.adapter import Capabilities, capabilities

VERSIONS: tuple[Capabilities, ...] = (
    Capabilities(
        "0.32", weight_version=True, abort_route=True, scale_out_flag=True, routes="hooks", own_transfer=False,
    ),
    Capabilities(
        "0.25", weight_version=False, abort_route=False, scale_out_flag=False, routes="field", own_transfer=True,
    ),
)  # fmt: skip


def find_installed() -> Capabilities:
    """Return the row of the vLLM that will be started. Raises EngineError for a version that is not in the table.

    The harness runs in the server's interpreter, so it asks for the package; where the package has another name, the newest row
    is assumed.
    """
    for package in engines.VLLM.packages:
        try:
            return capabilities(VERSIONS, metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    return VERSIONS[0]
