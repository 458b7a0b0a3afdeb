"""What a process holds: GPU memory, descriptors, mappings. Owner of: no state."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def held() -> dict[str, Any]:
    """gpu_bytes: in use on the GPU, by whomever; mapped: mappings by what they are of ("" = of no file)."""
    used = {}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = {"gpu_bytes": total - free}
    maps = [line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = dict(Counter(name[0] if name else "" for name in maps))
    return used | {"descriptors": len(os.listdir("/proc/self/fd")), "mappings": len(maps), "mapped": mapped}


def grown(times: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Takes `mapped` out of each: what there is more of in the last than in the first, or less, by name."""
    mapped = [Counter(one.pop("mapped", {})) for one in times]
    more = Counter(mapped[-1])
    more.subtract(mapped[0])
    return {name: count for name, count in more.items() if count}
