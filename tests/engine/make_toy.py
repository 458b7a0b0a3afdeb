"""A toy model folder with changes of its config: `MEGATRON_PYTHON make_toy.py OUT FAMILY CONFIG_JSON`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import toys


def main() -> None:
    out, family, changes = sys.argv[1:]
    toys.make(Path(out), family, **json.loads(changes))


if __name__ == "__main__":
    main()
