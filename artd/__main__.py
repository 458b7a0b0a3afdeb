"""`python -m artd`: the command line `artd`."""

import sys

from artd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
