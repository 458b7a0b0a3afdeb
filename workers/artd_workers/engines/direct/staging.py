"""A pull in a thread of its own, beside the running engine. Owner of: that thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..base import Fence


class Staging:
    """Begins at once. work: the pull; returns its named seconds."""

    def __init__(self, fence: Fence, work: Callable[[], dict[str, float]]) -> None:
        self.fence = fence
        self._seconds: dict[str, float] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="artd-stage", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for its end, whatever that is."""
        self._thread.join()

    def result(self) -> dict[str, float]:
        """Its seconds; empty while it runs. Raises what it ended with."""
        if self._thread.is_alive():
            return {}
        if self._error is not None:
            raise self._error
        return self._seconds

    def _run(self, work: Callable[[], dict[str, float]]) -> None:
        try:
            self._seconds = work()
        except Exception as error:
            self._error = error
