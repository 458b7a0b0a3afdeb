"""Checks what this machine has and lacks for artd: one check, one line, one next step.

It changes nothing but a probe file, which it deletes. A finding `missing` makes `artd doctor` exit 1, a `warning` does not.
"""

import os
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from artd.net.descriptors import AMPLE, NEEDED, reserve
from artd.store.version import BUG, REMEDY, wal_reset_bug

from . import diagnose, lockfile, own, paths, pythons, registry
from .finding import Finding

FSYNC_ROUNDS = 20
LOW_DISK = 5_000_000_000
LOW_MEMORY = 8_000_000_000
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "ceph")


def report(data_dir: Path, owns: Sequence[own.Own] = ()) -> list[Finding]:
    """Run all checks. `owns`: interpreters that artd.toml names in place of a runtime."""
    replaced = {each.runtime for each in owns}
    builder = _builder()
    runtimes = _runtimes(replaced, builder)
    lacking = [finding.name for finding in runtimes if finding.state == "missing"]
    checks: list[Callable[[], Finding]] = [
        lambda: _python(builder, bool(lacking)),
        _sqlite,
        _compiler,
        lambda: _headers(builder),
        lambda: _file_system(data_dir),
        lambda: _fsync(data_dir),
        lambda: _disk(data_dir),
        _memory,
        _cores,
        _files,
    ]
    further = [*_room(lacking), *_registry()] if lacking else []
    return [check() for check in checks] + _gpu(owns) + own.findings(owns) + runtimes + further


def _builder() -> pythons.Found:
    """Return the interpreter that runtimes would be made with."""
    minors = [lock.minor for lock in lockfile.list_shipped() if lock.stem not in (lockfile.BASE, lockfile.OVERLAY)]
    return pythons.find_any(list(dict.fromkeys(minors)))


def _python(builder: pythons.Found, lacking: bool) -> Finding:
    """Check the interpreters. `lacking`: whether a runtime is still to be made."""
    value = f"{sys.version.split()[0]} at {sys.executable}"
    if builder.minor == paths.minor_of_running():
        return Finding("python", "ok", value)
    if builder.path:
        return Finding("python", "ok", f"{value}; runtimes are made with {builder.path}")
    what, _, cure = builder.why.partition(" Next: ")
    return Finding("python", "missing" if lacking else "warning", f"{value}; for runtimes, {what.rstrip('.')}", cure)


def _sqlite() -> Finding:
    version = sqlite3.sqlite_version
    if wal_reset_bug(version):
        return Finding("sqlite", "warning", f"{version}, {BUG}", REMEDY)
    return Finding("sqlite", "ok", version)


def _compiler() -> Finding:
    found = diagnose.compiler()
    if found:
        return Finding("compiler", "ok", found)
    return Finding("compiler", "warning", "no C++ compiler; needed where Megatron-Core comes as source",
                   "install one (Debian: apt-get install g++)")  # fmt: skip


def _headers(builder: pythons.Found) -> Finding:
    found = diagnose.headers(builder.path or sys.executable)
    if found:
        return Finding("headers", "ok", str(found))
    return Finding("headers", "warning", "no Python.h; needed where Megatron-Core comes as source",
                   "install your Python's headers (Debian: apt-get install python3-dev)")  # fmt: skip


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def file_system_of(folder: Path, mounts: str) -> str:
    """Return the type of the file system that holds `folder`. `mounts`: the text of /proc/self/mounts."""
    best, kind = "", "unknown"
    target = str(nearest_existing(folder).resolve())
    for line in mounts.splitlines():
        _, point, found, *_ = line.split()
        point = point.replace("\\040", " ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


def _file_system(data_dir: Path) -> Finding:
    try:
        kind = file_system_of(data_dir, Path("/proc/self/mounts").read_text())
    except OSError:
        kind = "unknown"
    if kind in NETWORK_FILE_SYSTEMS:
        return Finding("file system", "missing", f"{kind} at {data_dir}: SQLite's WAL needs a local disk",
                       "artd start --data-dir DIR on a local disk")  # fmt: skip
    if kind == "tmpfs":
        return Finding("file system", "warning", f"tmpfs at {data_dir}: a reboot loses everything",
                       "artd start --data-dir DIR on a disk")  # fmt: skip
    return Finding("file system", "ok", f"{kind} at {data_dir}")


def _fsync(data_dir: Path) -> Finding:
    where = nearest_existing(data_dir)
    times = []
    try:
        with tempfile.TemporaryFile(dir=where) as probe:
            for _ in range(FSYNC_ROUNDS):
                probe.write(b"x" * 4096)
                probe.flush()
                start = time.perf_counter()
                os.fdatasync(probe.fileno())
                times.append(time.perf_counter() - start)
    except OSError as error:
        return Finding("fsync", "missing", f"cannot write at {where}: {error}", "artd start --data-dir DIR elsewhere")
    milliseconds = statistics.median(times) * 1000
    if milliseconds > 50:
        return Finding("fsync", "warning", f"p50 {milliseconds:.1f} ms: commits will be slow", "a faster disk")
    return Finding("fsync", "ok", f"p50 {milliseconds:.2f} ms")


def _disk(data_dir: Path) -> Finding:
    free = shutil.disk_usage(nearest_existing(data_dir)).free
    value = f"{free / 1e9:.1f} GB free at {data_dir}"
    if free < LOW_DISK:
        return Finding("disk", "warning", value, "free space there, or artd start --data-dir DIR elsewhere")
    return Finding("disk", "ok", value)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total < LOW_MEMORY:
        return Finding("memory", "warning", f"{total / 1e9:.1f} GB; the demo's trainer and engine take about 6 GB",
                       "close other programs, or use a smaller model")  # fmt: skip
    return Finding("memory", "ok", f"{total / 1e9:.1f} GB")


def _cores() -> Finding:
    return Finding("cores", "ok", str(len(os.sched_getaffinity(0))))


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{hard} ({soft} until the daemon raises it); connections of clients take {max(0, hard - reserve(hard))} at most"
    more = "raise the hard limit of open files: limits.conf, or LimitNOFILE= of the service"
    if hard < NEEDED:
        return Finding("open files", "missing", f"{hard}; artd needs {NEEDED}", more)
    return Finding("open files", "ok" if hard >= AMPLE else "warning", value, "" if hard >= AMPLE else more)


def _gpu(owns: Sequence[own.Own]) -> list[Finding]:
    """Report a GPU that no configured runtime would use."""
    if owns or not own._NVIDIA.exists():
        return []
    what = "an NVIDIA GPU is here; the CPU runtimes do not use it"
    return [Finding("gpu", "warning", what, "two interpreters of your own: docs/operations.md, Training on a GPU")]


def _room(lacking: Sequence[str]) -> list[Finding]:
    """Check the disk space for missing runtimes. `lacking` has their folder names."""
    root = paths.runtimes_root()
    needed = sum(diagnose.NEEDED_BYTES.get(name.partition("-py")[0], 0) for name in lacking)
    free = shutil.disk_usage(nearest_existing(root)).free
    if free >= needed:
        return []
    value = f"the missing runtimes take {needed / 1e9:.1f} GB at {root}, and {free / 1e9:.1f} GB are free"
    return [Finding("room for runtimes", "missing", value, "free space there, or set XDG_DATA_HOME to another disk")]


def _registry() -> list[Finding]:
    """Check that pip, as it is configured, reaches a registry: download a small package of the locks."""
    base = next(lock for lock in lockfile.list_shipped() if lock.stem == lockfile.BASE)
    pin = f"msgspec=={base.versions['msgspec']}"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-input",
            "--retries",
            "0",
            "--timeout",
            "8",
        ]
        done = subprocess.run([*command, "-d", folder, pin], capture_output=True, text=True, check=False)
    if done.returncode == 0 or "No module named pip" in done.stderr:
        return []
    what, _, cure = diagnose.find_cause(done.stdout + done.stderr).partition(" Next: ")
    return [
        Finding(
            "registry", "missing", f"pip cannot fetch {pin}: {what}", cure or "check the network and pip config list"
        )
    ]


def _runtimes(replaced: Set[str], builder: pythons.Found) -> list[Finding]:
    """Report each runtime. `replaced`: names of those that artd.toml replaces; `builder`: makes the missing ones."""
    cure = "" if builder.path else builder.why.partition(" Next: ")[2] + "; then "
    findings = []
    for row in registry.list_runtimes():
        if row.state != "ready" and any(row.name.startswith(lockfile.stem_of(name, "cpu")) for name in replaced):
            continue
        if row.state == "stale":
            findings.append(Finding(row.name, "warning", f"left by another artd version at {row.path}", row.next))
        elif row.state == "ready":
            findings.append(Finding(row.name, "ok", f"{row.size_bytes / 1e9:.2f} GB at {row.path}"))
        elif not row.name.startswith(lockfile.OVERLAY):  # tests alone need that: a user without it lacks nothing
            findings.append(Finding(row.name, "missing", row.state, cure + row.next))
    return findings
