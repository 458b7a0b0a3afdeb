"""artd: a durable daemon for RL post-training.

Importing it imports nothing heavy. `Client` and `SyncClient` come from `artd_client` on first use, so the daemon never loads
the client.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from artd_client import Client, SyncClient

__all__ = ["Client", "SyncClient", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("Client", "SyncClient"):
        import artd_client

        return getattr(artd_client, name)
    raise AttributeError(f"module 'artd' has no attribute {name!r}")
