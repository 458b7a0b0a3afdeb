"""Import modules in the interpreter that runs this script: `python importing.py FOLDER:FOLDER... <NAMES`.

It prints one JSON object that maps each module whose import fails to the reason: `needs PACKAGE` when another package is missing, else
the error. It uses the standard library alone, so that any interpreter can run it.
"""

import importlib
import json
import sys
import warnings


def failure(name: str) -> str:
    """Return why a module cannot be imported, or ""."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"needs {(error.name or '').partition('.')[0]}"
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folders: str) -> None:
    sys.path[:0] = [folder for folder in folders.split(":") if folder]
    warnings.simplefilter("ignore")
    out, sys.stdout = sys.stdout, sys.stderr  # what a module prints is no answer
    found = {name: why for name in sys.stdin.read().split() if (why := failure(name))}
    print(json.dumps(found), file=out)


if __name__ == "__main__":
    main(sys.argv[1])
