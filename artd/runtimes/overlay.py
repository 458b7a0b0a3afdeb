"""`python -m artd.runtimes.overlay path|python`: prints how to run tests that need torch, for the Makefile and CI.

It exits 1 with the command to type when something is missing.
"""

import sys

from . import lockfile, registry


def main(what: str) -> int:
    try:
        overlay = registry.find(lockfile.OVERLAY)
    except registry.RuntimeMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(":".join(overlay.site_paths) if what == "path" else overlay.python)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
