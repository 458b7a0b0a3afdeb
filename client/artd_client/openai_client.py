"""Makes OpenAI clients for the gateway. It imports `openai` only when one is made."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

MISSING = "run.openai() needs the package `openai`: pip install 'artd[openai]' (or use run.base_url and run.api_key)"


def async_openai(base_url: str, api_key: str, options: dict[str, Any]) -> AsyncOpenAI:
    """Return an AsyncOpenAI. Raises ImportError, which names the command, when the package is missing."""
    client: AsyncOpenAI = _module().AsyncOpenAI(**{"base_url": base_url, "api_key": api_key, **options})
    return client


def sync_openai(base_url: str, api_key: str, options: dict[str, Any]) -> OpenAI:
    """Return an OpenAI. Raises ImportError, which names the command, when the package is missing."""
    client: OpenAI = _module().OpenAI(**{"base_url": base_url, "api_key": api_key, **options})
    return client


def _module() -> Any:
    try:
        return import_module("openai")
    except ModuleNotFoundError as error:
        if error.name != "openai":
            raise
        raise ImportError(MISSING, name="openai") from None
