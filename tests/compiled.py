"""Builds the tests' C libraries, once per process, each in a temporary folder.

A machine without a C compiler is a failure, never a skip.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path


@functools.cache
def library(source: Path) -> Path:
    """`source` as a shared library. Errors: AssertionError with what to install, or what the compiler said."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, f"{source.name} needs a C compiler (cc): apt-get install gcc libc6-dev"
    folder = Path(tempfile.mkdtemp(prefix="artd-compiled."))
    atexit.register(shutil.rmtree, folder)
    target = folder / source.with_suffix(".so").name
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *flags, "-o", str(target), str(source), "-ldl", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{source} does not compile:\n{done.stderr}"
    return target
