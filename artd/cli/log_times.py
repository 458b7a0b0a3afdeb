"""Times in the lines of logs: artd's own (UTC), Python's (local), and those without a year (local)."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from .outcome import USAGE, CliError

_FULL = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{3}))?(Z?)")
_YEARLESS = re.compile(r"\b[A-Z]+ (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d) ")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_HEAD = 80
"""Characters of a line in which its time stands."""


def time_of(line: str, year: int) -> float | None:
    """Return the time of a line in seconds since the epoch, None if it has none. `year` is assumed for lines without a
    year."""
    head = line[:_HEAD]
    try:
        if found := _FULL.search(head):
            *date, fraction, utc = found.groups()
            year, month, day, hour, minute, second = map(int, date)
            micro, zone = int(fraction or 0) * 1000, UTC if utc else None
            return datetime(year, month, day, hour, minute, second, micro, zone).timestamp()
        if found := _YEARLESS.search(head):
            return datetime(year, *map(int, found.groups())).timestamp()  # type: ignore[arg-type]
    except ValueError:
        return None  # 31 February: a text that looks like a time
    return None


def times_of(lines: Sequence[str]) -> list[float]:
    """Return a time for each line: its own, else that of the line before, else of the first line that has one; 0.0 if none has."""
    year = time.localtime().tm_year
    found = [time_of(line, year) for line in lines]
    last = next((one for one in found if one is not None), 0.0)
    out = []
    for one in found:
        last = last if one is None else one
        out.append(last)
    return out


def parse_since(text: str) -> float:
    """Return the time that `--since` means: a span such as 90s, 10m, 2h or 1d before now, or a time in ISO 8601 (local without a zone).

    Raises CliError(USAGE)."""
    if found := _SPAN.fullmatch(text):
        return time.time() - float(found[1]) * _UNITS[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise CliError(
            USAGE, f"--since: {text!r} is not a time: use 90s, 10m, 2h, 1d or 2026-01-31T12:00", ""
        ) from None
