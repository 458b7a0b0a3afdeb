"""The children's environment and the copy of their code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from artd.supervise import code, procfs
from artd.supervise.code import CodeError, install_code
from artd.supervise.environment import Tags, child_environment
from artd_schema.packages import read_tree

TAGS = Tags(instance="i" * 32, boot=3, spawn=7, worker="trainer", build="0123456789ab", socket="ipc:///tmp/s")


def test_tags_and_settings(tmp_path: Path) -> None:
    env = child_environment({"HOME": "/h"}, TAGS, code=tmp_path, tmpdir=Path("/t"), site_paths=["/a", "/b"])
    me = procfs.identity()
    assert env == {
        "HOME": "/h",
        "ARTD_SOCKET": "ipc:///tmp/s",
        "ARTD_INSTANCE": "i" * 32,
        "ARTD_BOOT": "3",
        "ARTD_SPAWN": "7",
        "ARTD_WORKER": "trainer",
        "ARTD_BUILD": "0123456789ab",
        "ARTD_OWNER": f"{me.pid}:{me.ticks}",
        "SPT_NOENV": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": f"{tmp_path}:/a:/b",
        "TMPDIR": "/t",
    }


def test_secrets_foreign_python_and_older_tags_are_not_inherited(tmp_path: Path) -> None:
    base = {
        "ARTD_TOKEN": "secret",
        "ARTD_API_KEY": "secret",
        "ARTD_INSTANCE": "outer",
        "PYTHONPATH": "/elsewhere",
        "PYTHONHOME": "/elsewhere",
        "PYTHONDONTWRITEBYTECODE": "1",
        "VIRTUAL_ENV": "/elsewhere",
        "NOTIFY_SOCKET": "/run/elsewhere",
        "TMPDIR": "/elsewhere",
    }
    env = child_environment(base, TAGS, code=tmp_path, tmpdir=Path("/t"), extra={"OMP_NUM_THREADS": "2"})
    assert "secret" not in env.values()
    assert not [value for value in env.values() if "elsewhere" in value]
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert (env["ARTD_INSTANCE"], env["OMP_NUM_THREADS"]) == ("i" * 32, "2")


@pytest.mark.parametrize("name", ["ARTD_SPAWN", "ARTD_OWNER", "ARTD_TOKEN"])
def test_extra_may_not_change_a_tag(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        child_environment({}, TAGS, code=tmp_path, tmpdir=tmp_path, extra={name: "x"})


def test_code_is_copied_once_and_complete(tmp_path: Path) -> None:
    target = install_code(tmp_path)
    assert target.parent == tmp_path / "code"
    assert len(target.name) == 12 and int(target.name, 16) >= 0
    assert read_tree(target / "artd_schema") == read_tree(Path(code._locate("artd_schema")))
    assert (target / "artd_schema" / "sql" / "0001_initial.sql").is_file()
    assert (target / "artd_workers" / "__init__.py").is_file()
    assert not list(target.rglob("__pycache__"))
    inode = target.stat().st_ino
    assert install_code(tmp_path) == target
    assert target.stat().st_ino == inode
    assert [path.name for path in target.parent.iterdir()] == [target.name], "no temporary folder is left"


def test_byte_code_in_the_copy_does_not_change_it(tmp_path: Path) -> None:
    target = install_code(tmp_path)
    program = "import artd_schema.wire.worker, artd_workers, json, sys; print(json.dumps(artd_workers.__path__))"
    env = {"PYTHONPATH": str(target), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd="/", capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [str(target / "artd_workers")]
    assert list(target.rglob("__pycache__")), "the child wrote its byte code there"
    inode = target.stat().st_ino
    assert install_code(tmp_path).stat().st_ino == inode
    assert list(target.rglob("__pycache__")), "and it is still there at the next start"


def test_byte_code_from_before_a_power_loss_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = install_code(tmp_path)
    torn = target / "artd_schema" / "wire" / "__pycache__" / "worker.cpython-311.pyc"
    torn.parent.mkdir()
    torn.write_bytes(b"half")
    assert install_code(tmp_path) == target and torn.exists()
    monkeypatch.setattr(code, "boot_id", lambda: "the machine was started again")
    assert install_code(tmp_path) == target and not torn.exists()


def test_a_damaged_copy_is_replaced(tmp_path: Path) -> None:
    target = install_code(tmp_path)
    (target / "artd_workers" / "__init__.py").write_text("raise SystemExit\n")
    (target / "artd_schema" / "wire" / "worker.py").unlink()
    assert install_code(tmp_path) == target
    assert read_tree(target / "artd_schema") == read_tree(code._locate("artd_schema"))
    assert read_tree(target / "artd_workers") == read_tree(code._locate("artd_workers"))


def test_other_content_or_name_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src" / "some_worker_code"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "src")
    builds = {install_code(tmp_path, ["some_worker_code"])}
    (source / "__init__.py").write_text("A = 2\n")
    builds.add(install_code(tmp_path, ["some_worker_code"]))
    (source / "__init__.py").rename(source / "other.py")
    builds.add(install_code(tmp_path, ["some_worker_code"]))
    assert len(builds) == 3
    assert "some_worker_code" not in sys.modules, "located, never imported"


def test_a_full_disk_while_copying_leaves_no_half_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(code, "_sync", stop)
        with pytest.raises(OSError, match="No space left"):
            install_code(tmp_path)
    assert list((tmp_path / "code").iterdir()) == []
    assert install_code(tmp_path).is_dir()


def test_what_a_killed_copy_left_is_removed(tmp_path: Path) -> None:
    target = install_code(tmp_path)
    dying = "import os, signal, sys; from pathlib import Path; from artd.supervise import code; "
    dying += "code._sync = lambda _: os.kill(os.getpid(), signal.SIGKILL); code.install_code(Path(sys.argv[1]), ['artd_schema'])"
    done = subprocess.run([sys.executable, "-c", dying, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(target.parent.glob(".new-*/new/artd_schema/wire/worker.py"))) == 1
    assert install_code(tmp_path) == target
    assert list(target.parent.iterdir()) == [target]


def test_a_copy_that_another_process_makes_is_not_a_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, half, whole = code._write_tree, threading.Event(), threading.Event()

    def slow(folder: Path, files: dict[str, bytes]) -> None:
        write(folder, files)
        half.set()
        assert whole.wait(20)

    monkeypatch.setattr(code, "_write_tree", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(install_code, tmp_path)
        assert half.wait(20)
        second = pool.submit(install_code, tmp_path)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        assert len(list(tmp_path.glob("code/.new-*/new/artd_schema/wire/worker.py"))) == 1
        whole.set()
        assert first.result(20) == second.result(20)


def test_a_package_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CodeError, match="'no_such_package'"):
        install_code(tmp_path, ["no_such_package"])


def test_credentials_do_not_reach_a_child_unless_told(tmp_path: Path) -> None:
    base = {
        "AWS_SESSION_TOKEN": "1", "AWS_PROFILE": "1", "WANDB_API_KEY": "1", "HF_TOKEN": "1", "GITHUB_TOKEN": "1",
        "DB_PASSWORD": "1", "CLIENT_SECRET": "1", "SSH_AUTH_SOCK": "1", "ARTD_TOKEN": "1",
        "CUDA_HOME": "/c", "NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": "/h", "PATH": "/bin",
    }  # fmt: skip
    usual = {"CUDA_HOME", "NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "HF_HOME", "PATH"}
    made = child_environment(base, TAGS, code=tmp_path, tmpdir=tmp_path)
    assert base.keys() & made.keys() == usual
    made = child_environment(base, TAGS, code=tmp_path, tmpdir=tmp_path, keep=["HF_*", "ARTD_TOKEN"])
    assert base.keys() & made.keys() == usual | {"HF_TOKEN"}
    made = child_environment(base, TAGS, code=tmp_path, tmpdir=tmp_path, drop=["HF_HOME"])
    assert base.keys() - made.keys() == {"HF_HOME", "ARTD_TOKEN"}
