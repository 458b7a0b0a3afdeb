"""`artd replay-job`: what is asked of the trainer's interpreter, what is told, and when it is refused.

The interpreter is a shell script that keeps what it was given and answers what the test says; the real one is tested in
tests/trainer/test_replay_job.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from artd.cli import main
from artd.cli.artd import replay_job as verb
from artd_schema.codec import digest
from artd_schema.run.spec import RunSpec
from artd_schema.wire.replay_job import EnvironmentRow, ReplayReport, ReplayRow
from tests.awake import SOON_S, wait_until
from tests.cli.replay_rig import CORES, NEARLY, OTHERWISE, SAME, Interpreter, Past
from tests.cli.test_golden import check


@pytest.fixture
def past(tmp_path: Path, frozen: None) -> Past:
    return Past(tmp_path)


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    return Interpreter(tmp_path)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(verb.tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def artd(
    past: Past,
    interpreter: Interpreter,
    scratch: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Call `artd replay-job` in this process: (exit code, stdout, stderr). Whatever it does, it leaves nothing behind."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # of the scratch folder, hundreds of them; no test pulls the plug

    def call(*words: str) -> tuple[int, str, str]:
        before = past.content()
        code = main.main(["replay-job", *words, "--data-dir", str(past.data), "--config", str(interpreter.config)])
        assert past.content() == before, "the data folder was changed"
        assert not list(scratch.iterdir()), "the scratch folder is still there"
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


# ---- what is asked --------------------------------------------------------------------------------------------------


def test_the_trainer_is_asked_for_the_very_same_job(
    artd: Any, past: Past, interpreter: Interpreter, scratch: Path
) -> None:
    code, out, err = artd("3")
    assert code == 0 and "replaying job 3 (train, step 2 of toy)" in err
    order, made, config = interpreter.request.run, interpreter.request.committed, interpreter.request.config
    assert (order.job, order.kind, order.step, order.epoch, order.lineage) == (3, "train", 2, 6, 0)
    assert (order.fence, order.instance) == (2, "the-instance"), "the result's manifest would be another one"
    assert order.parent is not None and Path(order.parent.dir) == past.folder(1)
    assert (order.parent.step, order.parent.epoch, order.parent.run) == (1, 5, "toy")
    assert order.parent.sha == digest((past.folder(1) / "manifest.json").read_bytes())
    assert order.batch_sha == past.blobs["manifest-2"].name
    wanted = [str(past.blobs[f"{name}-2"]) for name in ("tensors", "manifest", "replay", "replay_manifest")]
    assert [order.batch, order.manifest, order.replay, order.replay_manifest] == wanted
    assert Path(order.dir).is_relative_to(scratch)
    assert (Path(made.dir), made.step, made.epoch) == (past.folder(2), 2, 6)
    assert made.sha == digest((past.folder(2) / "manifest.json").read_bytes())
    assert (config.run, config.base_digest) == ("toy", "b" * 64)
    assert config.spec == RunSpec(model=str(past.model), seed=7)
    lines = out.splitlines()
    assert lines[0].split() == ["name", "committed", "replayed", "equal"]
    assert ["loss", "-0.125", "-0.125", "yes"] in [line.split() for line in lines]
    assert ["adapter_model.safetensors", "(1", "tensors)", "d" * 12, "d" * 12, "yes"] in [
        line.split() for line in lines
    ]
    assert lines[-1] == "job 3 replayed in 1.5 s with 2 threads: the result is bit for bit the committed one"


def test_the_work_is_done_in_the_trainers_environment(artd: Any, interpreter: Interpreter, scratch: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    monkeypatch.setenv("ARTD_TOKEN", "secret")
    assert artd("3")[0] == 0
    env = dict(line.split("=", 1) for line in interpreter.told("environment").splitlines() if "=" in line)
    assert interpreter.told("arguments").split() == ["-m", "artd_workers.trainer.tools.replay_job"]
    assert interpreter.told("cwd") == "/\n"
    assert (env["OMP_WAIT_POLICY"], env["GOMP_SPINCOUNT"], env["TOKENIZERS_PARALLELISM"]) == ("PASSIVE", "0", "false")
    code, further = env["PYTHONPATH"].split(":")
    assert Path(code).is_relative_to(scratch) and further == "/further"
    assert interpreter.told("code").split() == ["artd_schema", "artd_workers"]
    assert Path(env["TMPDIR"]).is_relative_to(scratch) and "ARTD_TOKEN" not in env
    assert env["ARTD_INSTANCE"] != "the-instance", "a daemon that starts would take it for a leftover and kill it"


def test_init_has_neither_parent_nor_batch(artd: Any, past: Past, interpreter: Interpreter) -> None:
    assert artd("1")[0] == 0
    order = interpreter.request.run
    assert (order.kind, order.parent, order.batch, order.batch_sha, order.replay) == ("init", None, "", "", "")
    assert Path(interpreter.request.committed.dir) == past.folder(0)


def test_with_the_daemon_up_and_writing(artd: Any, past: Past, daemon: object) -> None:
    past.connection.execute("BEGIN IMMEDIATE")
    past.connection.execute("UPDATE run SET step = 99")
    assert artd("2")[0] == 0
    past.connection.execute("ROLLBACK")


# ---- what is told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "environment", "code", "verdict", "cell", "says"),
    [
        (OTHERWISE, (), 1, "different", "NO", "NOT the committed one"),
        (NEARLY, (), 1, "different", "NO", "NOT the committed one"),  # in the same environment only bits count
        (NEARLY, (CORES,), 0, "close", "close", "within tolerance"),
        (OTHERWISE, (CORES,), 1, "different", "NO", "NOT the committed one"),
        (SAME, (CORES,), 0, "equal", "yes", "bit for bit"),
    ],
)
def test_verdicts(
    rows: tuple[ReplayRow, ...], environment: tuple[EnvironmentRow, ...], code: int, verdict: str, cell: str, says: str,
    artd: Any, interpreter: Interpreter,
) -> None:  # fmt: skip
    interpreter.answers(ReplayReport(rows=rows, environment=environment, threads=2, seconds=1.5))
    found, out, _ = artd("3")
    assert found == code and says in out.splitlines()[-1]
    [loss] = [line for line in out.splitlines() if line.startswith("loss ")]
    assert loss.split()[3] == cell
    assert ("adapter_model.safetensors: x.lora_A.weight" in out) == (verdict == "different")
    assert ("cpu AVX512 -> AVX2" in out) == bool(environment)
    assert json.loads(artd("3", "--json")[1])["verdict"] == verdict


def test_many_different_tensors_are_counted(artd: Any, interpreter: Interpreter) -> None:
    row = OTHERWISE[1]
    rows = tuple(msgspec.structs.replace(row, name=f"layer-{number}") for number in range(50))
    interpreter.answers(ReplayReport(rows=rows))
    code, out, _ = artd("3")
    assert code == 1 and out.count("layer-") == 20 and "and 30 more that differ" in out


def test_json(artd: Any, past: Past, interpreter: Interpreter) -> None:
    interpreter.answers(ReplayReport(rows=SAME + OTHERWISE, environment=(CORES,), threads=2, seconds=1.5))
    code, out, _ = artd("3", "--json")
    assert code == 1
    check("replay-job", out, past.data)


def test_keep(artd: Any, tmp_path: Path) -> None:
    kept = tmp_path / "new" / "kept"
    assert artd("3", "--keep", str(kept))[:2] == (0, artd("3")[1] + f"{kept}\n")
    assert sorted(path.name for path in kept.iterdir()) == ["report.json", "trainer.log"]
    assert (kept / "trainer.log").read_text() == "words of the trainer\n"
    assert [path.name for path in kept.parent.iterdir()] == ["kept"]
    code, out, err = artd("3", "--keep", str(kept))
    assert (code, out) == (6, "") and "exists already" in err


def test_a_failed_replay_keeps_its_log(artd: Any, interpreter: Interpreter, tmp_path: Path) -> None:
    interpreter.first("exit 3")
    assert artd("3", "--keep", str(tmp_path / "kept"))[0] == 1
    assert (tmp_path / "kept/trainer.log").read_text() == "words of the trainer\n"


# ---- when it is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "code", "says"),
    [("77", 5, "there is no job 77; the newest is 4"), ("4", 6, "job 4 is running: only a job that succeeded")],
)
def test_jobs_that_have_no_result(job: str, code: int, says: str, artd: Any) -> None:
    found, out, err = artd(job)
    assert (found, out) == (code, "") and says in err and "next: artctl job" in err


def test_no_database(artd: Any, past: Past, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["replay-job", "1", "--data-dir", str(tmp_path / "nothing")]) == 3


def test_a_retired_parent(artd: Any, past: Past) -> None:
    past.retire(0)
    code, _, err = artd("2")
    assert code == 5 and "job 2 cannot be replayed: its parent toy@0 was deleted (keep_checkpoints)" in err
    assert "can be replayed: 3)" in err and "next: artd replay-job 3" in err
    code, _, err = artd("1")
    assert code == 5 and "its checkpoint toy@0 was deleted" in err


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("tensors", "its batch ("), ("manifest", "its batch's manifest ("), ("replay", "its replay bundle ("),
        ("replay_manifest", "its replay bundle's manifest ("),
    ],
)  # fmt: skip
def test_a_missing_blob(name: str, what: str, artd: Any, past: Past) -> None:
    path = past.blobs[f"{name}-2"]
    path.unlink()
    code, _, err = artd("3")
    assert code == 5 and f"job 3 cannot be replayed: {what}{path}) is gone (can be replayed: 2, 1)" in err


def test_folders_that_are_gone(artd: Any, past: Past) -> None:
    for step in (1, 2):
        shutil.rmtree(past.folder(step))
    code, _, err = artd("3")
    assert code == 5 and "its checkpoint toy@2 is not in" in err and "its parent toy@1 is not in" in err
    shutil.rmtree(past.folder(0))
    assert "no job can be replayed any more" in artd("1")[2]


def test_another_base_model(artd: Any, past: Past) -> None:
    (past.model / "model.safetensors").write_bytes(b"other weights")
    code, _, err = artd("3")
    assert code == 6 and "model.safetensors changed since the run was created" in err


def test_an_error_of_the_trainer(artd: Any, interpreter: Interpreter) -> None:
    interpreter.answers(ReplayReport(error="tensor tokens: /b is damaged"))
    code, out, err = artd("3", "--json")
    assert (
        code == 1
        and json.loads(out)["schema"] == "artctl.error/1"
        and "job 3 cannot be replayed: tensor tokens: /b is damaged" in err
    )


def test_retired_while_it_ran(artd: Any, past: Past, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon goes on with its steps; what it deletes in the meantime is not damage."""
    interpreter.answers(ReplayReport(error="adapter_model.safetensors is missing"))
    replay = verb._replay

    def slow(*arguments: Any) -> ReplayReport:
        report = replay(*arguments)
        past.connection.execute("UPDATE checkpoint SET state = 'retired' WHERE step = 1")
        return report

    monkeypatch.setattr(verb, "_replay", slow)
    code, _, err = artd("3")
    assert code == 5 and "its parent toy@1 was deleted (keep_checkpoints) (can be replayed: 1)" in err


@pytest.mark.parametrize(("first", "says"), [("exit 3", "exit status 3"), ("kill -9 $$", "killed by SIGKILL")])
def test_no_answer(first: str, says: str, artd: Any, interpreter: Interpreter) -> None:
    interpreter.first(first)
    code, out, err = artd("3")
    assert (code, out) == (1, "") and says in err and "words of the trainer" in err


def test_no_interpreter(artd: Any, interpreter: Interpreter) -> None:
    (interpreter.here / "python").unlink()
    code, _, err = artd("3")
    assert code == 1 and "cannot be started" in err


def test_no_runtime(artd: Any, interpreter: Interpreter) -> None:
    interpreter.config.write_text("")
    code, _, err = artd("3")
    assert code == 1 and "artd runtime install megatron --cpu" in err


def test_too_little_space(artd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb.os, "statvfs", lambda _: SimpleNamespace(f_bavail=4_999_999, f_frsize=1))
    code, _, err = artd("3")
    assert code == 1 and "the result takes 4.8 MiB" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted(number: int, past: Past, interpreter: Interpreter, scratch: Path) -> None:
    """The trainer's part ends with the command, and the scratch folder goes."""
    interpreter.first(f'echo $$ >"{interpreter.here}/pid"; exec sleep 600')
    command = [sys.executable, "-m", "artd.cli.main", "replay-job", "3", "--data-dir", str(past.data)]
    env = os.environ | {"ARTD_CONFIG": str(interpreter.config), "TMPDIR": str(scratch)}
    pid = interpreter.here / "pid"
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        end = time.monotonic() + SOON_S
        while not (pid.exists() and pid.read_text().strip()):
            assert time.monotonic() < end and child.poll() is None
            time.sleep(0.01)
        child.send_signal(number)
        assert child.wait(SOON_S) == 130
    wait_until(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists(), what="the trainer's end")
    assert not list(scratch.iterdir())
