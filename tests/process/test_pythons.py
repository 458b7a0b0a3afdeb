"""Which Python a runtime is built from: a machine with several, with none, with one that cannot make environments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from artd.runtimes import doctor, install, lockfile, paths, pythons, registry

RUNNING = paths.minor_of_running()


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one folder, and no pyenv."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def test_the_running_one_is_taken_when_it_fits_and_is_never_a_link_of_an_environment(alone: Path) -> None:
    found = pythons.find_any((RUNNING,))
    assert found.minor == RUNNING and found.path == getattr(sys, "_base_executable", "")


@pytest.mark.parametrize("place", ["bin/python3.99", "pyenv/versions/3.99.4/bin/python3.99"])
def test_another_one_is_found_by_its_name(alone: Path, place: str) -> None:
    made = script(alone / place, f"echo py399 {alone}/base")
    assert pythons.find_any(("py399",)).path == f"{alone}/base"
    made.write_text("#!/bin/sh\necho py398 /elsewhere\n")  # a name that does not keep its word
    assert pythons.find_any(("py399",)).path == ""


def test_one_that_cannot_make_environments_is_named_with_the_cure(alone: Path) -> None:
    script(alone / "bin/python3.99", "exit 3")
    why = pythons.find_any(("py399",)).why
    assert (
        why == f"{alone}/bin/python3.99 has no venv module. Next: install it (Debian: apt-get install python3.99-venv)"
    )


def test_none_at_all_is_one_line_with_the_cure(alone: Path) -> None:
    why = pythons.find_any(("py399",)).why
    assert "no Python 3.99 was found here. Next:" in why and "\n" not in why


def test_uv_is_asked_last_and_fetches_only_when_told(alone: Path) -> None:
    script(alone / "base", f"echo py399 {alone}/base")
    script(alone / "bin/uv", f'[ "$2" = install ] && : > {alone}/there; [ -e {alone}/there ] && echo {alone}/base')
    assert pythons.find_any(("py399",)).path == "" and not (alone / "there").exists()
    assert pythons.find_any(("py399",), fetch=True).path == f"{alone}/base"


def test_an_install_finds_the_python_of_its_lock_by_itself(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(alone / "bin/python3.99", "echo py399 /the/one")
    locks = alone / "locks"
    locks.mkdir()
    (locks / "toy-cpu-py399.txt").write_text("a==1\n")
    monkeypatch.setattr(lockfile.list_shipped, "__defaults__", (locks,))
    assert install._interpreter("toy", "cpu", None) == pythons.Found("/the/one", "py399")
    (alone / "bin/python3.99").unlink()
    with pytest.raises(install.InstallError, match=r"runtime toy: no Python 3\.99 was found here\. Next: install it"):
        install._interpreter("toy", "cpu", None)


def test_doctor_never_proposes_what_is_then_refused(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no interpreter has a lock, the next step of every missing runtime is that interpreter."""
    monkeypatch.setenv("XDG_DATA_HOME", str(alone / "xdg"))
    locks = alone / "locks"
    locks.mkdir()
    (locks / "megatron-cpu-py399.txt").write_text("a==1\n")
    monkeypatch.setattr(lockfile.list_shipped, "__defaults__", (locks,))
    monkeypatch.setattr(doctor, "_registry", list)
    by_name = {finding.name: finding for finding in doctor.report(alone / "data")}
    assert by_name["python"].state == "missing" and "install it" in by_name["python"].next
    missing = next(finding for name, finding in by_name.items() if name.startswith("megatron-cpu-py399"))
    assert "install it" in missing.next and missing.next.endswith("then artd runtime install megatron --cpu")
    made = script(alone / "bin/python3.99", f"echo py399 {alone}/bin/python3.99")
    by_name = {finding.name: finding for finding in doctor.report(alone / "data")}
    assert by_name["python"].state == "ok" and f"runtimes are made with {made}" in by_name["python"].value
    missing = next(finding for name, finding in by_name.items() if name.startswith("megatron-cpu-py399"))
    assert missing.next == registry.command_for(lockfile.list_shipped()[0]) == "artd runtime install megatron --cpu"
