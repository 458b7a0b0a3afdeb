"""Runtimes: locks, markers, refusals, a fake pip, interruption. No network, no real package is installed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from artd.cli.main import main
from artd.runtimes import diagnose, doctor, install, lockfile, paths, pip, prune, registry
from artd.store.version import wal_reset_bug
from tests.awake import SOON_S

FORBIDDEN = ("nvidia", "cuda", "cupy", "torchvision", "torchaudio", "torchcodec", "flash-attn", "transformer-engine")
MINOR = paths.minor_of_running()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    return tmp_path


def make_lock(folder: Path, text: str, stem: str = "toy-cpu", minor: str = MINOR) -> lockfile.Lock:
    folder.mkdir(exist_ok=True)
    (folder / f"{stem}-{minor}.txt").write_text(text)
    return lockfile.parse(text, stem, minor)


# --- locks


@pytest.mark.parametrize("lock", lockfile.list_shipped(), ids=lambda lock: f"{lock.stem}-{lock.minor}")
def test_shipped_lock_is_exact_and_free_of_cuda(lock: lockfile.Lock) -> None:
    names = [pin.name for pin in lock.pins]
    assert len(set(names)) == len(names)
    assert not [name for name in names if any(bad in name for bad in FORBIDDEN)]
    assert lock.versions.get("torch", "2.13.0+cpu") == "2.13.0+cpu"


def test_shipped_locks_are_the_ones_that_the_commands_need() -> None:
    stems = {lock.stem for lock in lockfile.list_shipped()}
    assert stems == {"base", "megatron-cpu", "megatron-test-overlay", "vllm-cpu"}
    assert "torch" not in lockfile.load("base", "cpu", "py311").versions


def test_workers_wire_packages_are_in_every_runtime() -> None:
    base = lockfile.load("base", "cpu", "py311").versions
    for name in ("megatron", "vllm"):
        versions = lockfile.load(name, "cpu", "py311").versions
        assert {key: versions[key] for key in ("msgspec", "pyzmq")} == {key: base[key] for key in ("msgspec", "pyzmq")}
        assert "safetensors" in versions


@pytest.mark.parametrize("line", ["torch>=2", "torch", "torch==2.*", "https://x/y.whl", "-r other.txt", "Torch==1"])
def test_inexact_line_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(lockfile.LockError, match="line 2"):
        lockfile.parse(f"# head\n{line}\n", "toy-cpu", "py311")


def test_digest_ignores_comments_and_order_but_not_versions() -> None:
    one = lockfile.parse("a==1\nb==2  # build\n", "toy-cpu", "py311")
    two = lockfile.parse("# words\nb==2\na==1\n", "toy-cpu", "py311")
    other = lockfile.parse("a==1\nb==3\n", "toy-cpu", "py311")
    assert one.digest == two.digest != other.digest
    assert one.needs_compiler and not two.needs_compiler


def test_missing_lock_names_the_minor_and_the_command(tmp_path: Path) -> None:
    make_lock(tmp_path / "locks", "a==1\n", minor="py311")
    with pytest.raises(lockfile.LockError, match=r"Python 3\.14.*ships one for 3\.11.*--python python3\.11"):
        lockfile.load("toy", "cpu", "py314", tmp_path / "locks")


def test_cuda_is_refused_by_the_name_of_its_lock() -> None:
    with pytest.raises(lockfile.LockError, match=r"megatron-cuda-py311\.txt.*Next: artd runtime install megatron"):
        lockfile.load("megatron", "cuda", "py311")


# --- markers


def test_folder_is_a_runtime_only_with_a_fitting_marker(home: Path) -> None:
    marker = registry.Marker("d" * 12, sys.executable, 1.0, 10, {"a": "1"})
    registry.write_marker(home, marker)
    assert registry.read_marker(home, "d" * 12) == marker
    assert registry.read_marker(home, "e" * 12) is None
    assert not (home / (paths.MARKER + ".tmp")).exists()
    registry.write_marker(home, registry.Marker("d" * 12, str(home / "gone"), 1.0, 10, {}))
    assert registry.read_marker(home, "d" * 12) is None
    (home / paths.MARKER).write_text("{half")
    assert registry.read_marker(home, "d" * 12) is None


def test_missing_runtime_says_what_to_type(home: Path) -> None:
    with pytest.raises(registry.RuntimeMissing, match="artd runtime install vllm --cpu"):
        registry.find("vllm")
    with pytest.raises(registry.RuntimeMissing, match="install megatron --cpu --test-overlay"):
        registry.find(lockfile.OVERLAY)
    assert {row.state for row in registry.list_runtimes()} == {"missing"}


def test_found_overlay_brings_its_site_folder(home: Path) -> None:
    lock = lockfile.load(lockfile.OVERLAY, "cpu", "py311")
    folder = registry.folder_of(lock)
    folder.mkdir(parents=True)
    registry.write_marker(folder, registry.Marker(lock.digest, sys.executable, 1.0, 1, lock.versions))
    found = registry.find(lockfile.OVERLAY)
    assert found.site_paths == [str(folder / "site")] and found.versions["peft"]
    (folder.parent / "vllm-cpu-py311-000000000000").mkdir()
    assert [row.state for row in registry.list_runtimes() if "000000" in row.name] == ["stale"]


# --- prune


def made(name: str, marker: bool = True) -> Path:
    folder = paths.runtimes_root() / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "tool").write_text("#!/bin/sh\nread x\n")
    (folder / "bin" / "tool").chmod(0o755)
    if marker:
        (folder / paths.MARKER).write_text("{}")
    return folder


def test_prune_deletes_what_nothing_uses_and_nothing_else(home: Path) -> None:
    current = made(lockfile.load("megatron", "cpu", "py311").folder_name)
    old, half, used, named = (
        made(f"vllm-cpu-py311-{n}", n != "2" * 12) for n in ("1" * 12, "2" * 12, "3" * 12, "4" * 12)
    )
    (paths.runtimes_root() / "notes").mkdir()
    child = subprocess.Popen(["/bin/sh", used / "bin" / "tool"], stdin=subprocess.PIPE)
    try:
        assert all(row.size_bytes for row in prune.prune(False, dry=True, named=[f"{named}/bin/python"]))
        assert old.exists() and half.exists()
        rows = {Path(row.path): row.kept for row in prune.prune(False, dry=False, named=[f"{named}/bin/python"])}
        assert rows == {
            old: "",
            half: "",
            used: f"process {child.pid} runs in it",
            named: "artd.toml names its interpreter",
        }
        with install.exclusive(used):
            rows = {Path(row.path): row.kept for row in prune.prune(True, dry=False)}
        assert rows == {current: "", named: "", used: "an install is running"}
    finally:
        child.communicate()
    assert {path.name for path in paths.runtimes_root().iterdir() if not path.name.startswith(".")} == {
        used.name,
        "notes",
    }


def test_the_list_does_not_name_the_projects_own_overlay(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runtime", "list"]) == 0
    said = capsys.readouterr().out
    assert "megatron-cpu" in said and "overlay" not in said
    made("vllm-cpu-py311-000000000000")
    assert main(["runtime", "list"]) == 0 and "next: artd runtime prune" in capsys.readouterr().out
    assert main(["runtime", "prune"]) == 0 and capsys.readouterr().out.startswith("deleted  ")


# --- causes


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "has torch==2.13.0+cpu for this Python"),
        ("WARNING: Retrying (Retry(total=0)) after connection broken by 'x'\nNo matching distribution found for a==1",
         "could not be reached"),
        ("Max retries exceeded with url", "could not be reached"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("x.cpp:1: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("error: command 'g++' failed: No such file or directory", "no C++ compiler"),
        ("something else", "pip failed"),
    ],
)  # fmt: skip
def test_cause_is_named(log: str, said: str) -> None:
    assert said in diagnose.find_cause(log)


def test_full_disk_is_refused_before_anything_is_fetched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose.shutil, "disk_usage", lambda _: _Usage(1_000_000))
    assert "needs 2.3 GB" in (diagnose.disk_shortage("megatron-cpu", home / "a" / "b") or "")


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ("", False),
        ("global.timeout='60'\nglobal.index-url='https://pypi.org/simple'", False),
        (":env:.find-links='/somewhere'", True),
        ("global.extra-index-url='https://mirror/simple'", True),
        ("global.index-url='https://mirror/simple'", True),
    ],
)
def test_pips_own_configuration_is_seen(config: str, own: bool) -> None:
    assert pip.has_own_sources(config) is own


# --- whole installs against a fake pip

FAKE = """\
import json, os, pathlib, sys, time
argv = sys.argv[1:]
if argv[:2] == ["-c", argv[-1]] or "-c" in argv:
    os.execv(sys.executable, [sys.executable, *argv])
if argv[:3] == ["-m", "pip", "config"]:
    print(os.environ.get("FAKE_CONFIG", "")); sys.exit(0)
pathlib.Path(os.environ["FAKE_SEEN"]).open("a").write(json.dumps(argv) + "\\n")
mode = os.environ.get("FAKE_MODE", "ok")
if mode == "fail":
    print("ERROR: No matching distribution found for torch==2.13.0+cpu"); sys.exit(1)
if mode == "hang":
    pathlib.Path(os.environ["FAKE_SEEN"] + ".pid").write_text(str(os.getpid())); time.sleep(600)
here = pathlib.Path(os.environ["FAKE_SITE"])
for pin in (a for a in argv if "==" in a):
    print(f"Downloading {pin.replace('==', '-')}-py3-none-any.whl (1 kB)")
    (here / f"{pin.replace('==', '-')}.dist-info").mkdir(parents=True, exist_ok=True)
"""


@pytest.fixture
def fake(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock folder `toy-cpu`, and an environment maker whose interpreter answers for pip."""
    locks = home / "locks"
    lock = make_lock(locks, "# check: import json\ntorch==2.13.0+cpu\na==1\nb==2  # build\n")
    monkeypatch.setattr(lockfile.load, "__defaults__", (locks,))
    monkeypatch.setattr(lockfile.list_shipped, "__defaults__", (locks,))
    script = home / "fake_pip.py"
    script.write_text(FAKE)
    maker = home / "maker"
    maker.write_text(
        textwrap.dedent(f"""\
        #!/bin/bash
        # Interpreter that "makes" environments whose python is the fake pip.
        if [ "$2" = -m ] && [ "$3" = venv ]; then
            mkdir -p "$4/bin" && printf '#!/bin/bash\\nexec {sys.executable} {script} "$@"\\n' > "$4/bin/python"
            exec chmod +x "$4/bin/python"
        fi
        exec {sys.executable} "$@"
        """)
    )
    maker.chmod(0o755)
    monkeypatch.setenv("FAKE_SEEN", str(home / "seen"))
    folder = registry.folder_of(lock)
    monkeypatch.setenv("FAKE_SITE", str(folder / "lib" / f"python3.{MINOR[3:]}" / "site-packages"))
    return maker


def calls(home: Path) -> list[list[str]]:
    return [json.loads(line) for line in (home / "seen").read_text().splitlines()]


def test_install_builds_from_the_lock_alone_and_is_reused(
    home: Path, fake: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = install.Options(python=str(fake))
    runtime = install.install("toy", "cpu", options)
    assert runtime.versions == {"torch": "2.13.0+cpu", "a": "1", "b": "2"}
    torch, rest, built = calls(home)
    assert torch[-1] == "torch==2.13.0+cpu" and "--no-deps" in torch and diagnose.TORCH_CPU_INDEX in torch
    assert rest[-1] == "a==1" and "--no-deps" in rest and diagnose.TORCH_CPU_INDEX not in rest
    assert built[-1] == "b==2" and "--no-build-isolation" in built
    assert "adding " + diagnose.TORCH_CPU_INDEX in capfd.readouterr().err
    install.install("toy", "cpu", options)
    assert len(calls(home)) == 3
    install.install("toy", "cpu", install.Options(python=str(fake), force=True))
    assert len(calls(home)) == 6
    left = {path.name for path in paths.runtimes_root().iterdir()}
    assert left == {runtime.root.name, f".{runtime.root.name}.lock"} if runtime.root else False


def test_users_own_index_is_not_added_to(home: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CONFIG", ":env:.find-links='/wheels'")
    install.install("toy", "cpu", install.Options(python=str(fake)))
    assert diagnose.TORCH_CPU_INDEX not in calls(home)[0]


def test_named_index_reaches_pip(home: Path, fake: Path) -> None:
    install.install("toy", "cpu", install.Options(index="https://i/simple", find_links="/w", python=str(fake)))
    for call in calls(home):
        assert call[call.index("--extra-index-url") + 1] == "https://i/simple"
        assert call[call.index("--find-links") + 1] == "/w" and diagnose.TORCH_CPU_INDEX not in call


def test_failed_install_names_cause_and_log_and_leaves_nothing(
    home: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "fail")
    with pytest.raises(install.InstallError, match=r"has torch==2\.13\.0\+cpu for this Python(.|\n)*whole log: /"):
        install.install("toy", "cpu", install.Options(python=str(fake)))
    assert [path for path in paths.runtimes_root().iterdir() if not path.name.endswith(".lock")] == []


def test_half_made_folder_is_made_again(home: Path, fake: Path) -> None:
    folder = registry.folder_of(lockfile.load("toy", "cpu", MINOR))
    (folder / "bin").mkdir(parents=True)
    (folder / "rubbish").write_text("x")
    assert [row.state for row in registry.list_runtimes()] == ["half-made"]
    install.install("toy", "cpu", install.Options(python=str(fake)))
    assert not (folder / "rubbish").exists()


def test_missing_interpreter_is_named(home: Path, fake: Path) -> None:
    with pytest.raises(install.InstallError, match="/nowhere/python was not found"):
        install.install("toy", "cpu", install.Options(python="/nowhere/python"))


DRIVER = """\
import argparse, pathlib, sys
from artd.cli.artd import runtime
from artd.runtimes import lockfile
locks = pathlib.Path(sys.argv[1])
lockfile.load.__defaults__ = lockfile.list_shipped.__defaults__ = (locks,)
space = argparse.Namespace(name="toy", device="cpu", test_overlay=False, index=None, find_links=None,
                           python=sys.argv[2], force=False)
sys.exit(runtime.run_install(space))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_install_ends_pip_and_leaves_nothing(
    home: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    monkeypatch.setenv("FAKE_MODE", "hang")
    child = subprocess.Popen([sys.executable, "-c", DRIVER, str(home / "locks"), str(fake)], start_new_session=True)
    pid_file = home / "seen.pid"
    deadline = time.monotonic() + SOON_S
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(SOON_S) == code
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert [path for path in paths.runtimes_root().iterdir() if not path.name.endswith(".lock")] == []


# --- doctor


@pytest.mark.parametrize(
    ("version", "bad"), [("3.6.23", False), ("3.7.0", True), ("3.51.2", True), ("3.51.3", False), ("3.46.0.1", True)]
)
def test_wal_reset_verdict(version: str, bad: bool) -> None:
    assert wal_reset_bug(version) is bad


def test_file_system_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    mounts = f"a / ext4 rw 0 0\nb {tmp_path} nfs4 rw 0 0\nc {tmp_path}x tmpfs rw 0 0\n"
    assert doctor.file_system_of(tmp_path / "not" / "there", mounts) == "nfs4"
    assert doctor.file_system_of(Path("/"), mounts) == "ext4"


def test_doctor_says_the_next_command_for_all_that_is_missing(home: Path) -> None:
    findings = doctor.report(home / "data")
    assert all(finding.next for finding in findings if finding.state != "ok")
    missing = {finding.next for finding in findings if finding.state == "missing"}
    assert {"artd runtime install megatron --cpu", "artd runtime install vllm --cpu"} <= missing
    assert not (home / "data").exists()
