"""What people expect of any command line: colours, width, one program, errors for programs, suggestions, completion, watching."""

from __future__ import annotations

import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from artd.cli import ctl, main, terminal, watch
from artd.cli.artctl import completion
from artd.cli.artctl.act import ACTS
from artd.cli.verbs import STEERING
from tests.cli.conftest import Call, FakeDaemon
from tests.cli.rows import Made

ARTCTL = [sys.executable, "-m", "artd.cli.ctl"]


def on_a_terminal(data: Path, *words: str, columns: int = 60, **env: str) -> str:
    """What a verb prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    given = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "ARTD_DATA_DIR": str(data)} | env
    given.pop("NO_COLOR", None)
    given |= env
    try:
        subprocess.run(
            [*ARTCTL, *words], stdout=theirs, stderr=theirs, stdin=theirs, env=given, timeout=60, check=False
        )
    finally:
        os.close(theirs)
    out = b""
    try:
        while block := os.read(ours, 1 << 16):
            out += block
    except OSError:
        pass  # the terminal has no other end any more
    finally:
        os.close(ours)
    return out.decode().replace("\r\n", "\n")


def plain(text: str) -> list[str]:
    return ["".join(step for step in terminal._STEP.findall(line) if len(step) == 1) for line in text.splitlines()]


@pytest.mark.parametrize(
    "words", [("status",), ("trajectories",), ("jobs",), ("checkpoints",), ("metrics",)], ids=" ".join
)
def test_lines_fit_the_terminal(made: Made, words: tuple[str, ...]) -> None:
    cut = plain(on_a_terminal(made.data, *words))
    assert max(map(len, cut)) <= 60 and len(cut) > 1
    if words != ("metrics",):
        assert max(map(len, plain(on_a_terminal(made.data, *words, "--wide")))) > 60


def test_a_pipe_gets_whole_lines(made: Made, artctl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, artctl("status")[1].splitlines())) > 60


def test_colours_as_asked_for(made: Made, artctl: Call) -> None:
    green = "\x1b[32m"
    assert green in on_a_terminal(made.data, "jobs")
    assert "\x1b" not in on_a_terminal(made.data, "jobs", NO_COLOR="1")
    assert "\x1b" not in on_a_terminal(made.data, "jobs", "--color", "never")
    assert "\x1b" not in artctl("jobs")[1] and green in artctl("jobs", "--color", "always")[1]
    assert green in artctl("--color", "always", "jobs")[1]


def test_cutting_counts_what_is_seen() -> None:
    assert terminal.cut("\x1b[31mabcdef\x1b[0m", 4) == "\x1b[31mabc\x1b[0m…"
    assert terminal.cut("abcd", 4) == "abcd" and terminal.cut("abcdef", 0) == "abcdef"
    assert terminal.fit([10, 30, 5], [4, 8, 5], 40) == [10, 21, 5]
    assert terminal.fit([10, 30, 5], [10, 30, 5], 44) == [10, 30]


@pytest.mark.parametrize(("called", "verb"), [(main.main, "runs"), (ctl.main, "version"), (ctl.main, "runs")])
def test_both_names_run_every_verb(called: Callable[[list[str]], int], verb: str, made: Made) -> None:
    assert called([verb] if verb == "version" else [verb, "--data-dir", str(made.data)]) == 0


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help"], ["help", "samples"]):
        with pytest.raises(SystemExit) as ended:
            ctl.main(words)
        assert ended.value.code == 0
    assert "usage: artctl samples" in capsys.readouterr().out


def test_no_mistyped_word_proposes_a_change(artctl: Call) -> None:
    assert set(ACTS) == STEERING
    for word in (
        "ps",
        "finsh",
        "delte",
        "discrd",
        "cancle",
        "rollbak",
        "retr",
        "paus",
        "resme",
        "stp",
        "watch",
        "describe",
        "plot",
    ):
        code, _, err = artctl(word)
        assert code == 2
        proposed = err.partition("did you mean ")[2].partition("?")[0].split()
        assert not proposed or proposed[0] not in STEERING | {"stop", "restore", "gc"}, (word, proposed)
    assert "did you mean workers?" in artctl("ps")[2] and "did you mean status --watch?" in artctl("watch")[2]


@pytest.mark.parametrize(
    ("words", "code"),
    [(("job", "77"), 5), (("jobs", "--state", "x"), 2), (("pause", "nope"), 5), (("stauts",), 2)],
    ids=str,
)
def test_errors_are_documents_for_programs(words: tuple[str, ...], code: int, made: Made, artctl: Call) -> None:
    found, out, err = artctl(*words, "--json")
    told = json.loads(out)
    assert (found, told["code"], told["schema"]) == (code, code, "artctl.error/1")
    assert err.startswith(f"error: {told['error']}") and told["next"].startswith("artctl ")


def test_a_rollback_may_leave_the_run_out(made: Made, artctl: Call) -> None:
    assert artctl("rollback", "@2")[0] == 3  # the daemon does not run: the run was found
    assert artctl("rollback", "nope@2")[0] == 5


def test_watching_draws_again_until_ctrl_c(made: Made, artctl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    naps = []

    def sleep(period: float) -> None:
        naps.append(period)
        if len(naps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    code, out, _ = artctl("status", "--watch", "0.5")
    assert code == 130 and naps == [0.5, 0.5] and out.count("not running") == 2 and "\x1b" not in out
    assert artctl("status", "--watch", "--json")[0] == artctl("status", "--watch", "0")[0] == 2


def test_top_measures_the_daemon_and_its_workers(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    code, out, _ = artctl("top", "--json")
    [me] = json.loads(out)["workers"]
    assert code == 0 and (me["name"], me["pid"], me["job"]) == ("daemon", os.getpid(), None)
    assert me["rss"] > 1 << 20 and me["processes"] == 1 and me["threads"] >= 1 and me["cpu"] >= 0
    lines = artctl("top", "--once")[1].splitlines()
    columns = ["name", "pid", "cpu", "memory", "processes", "threads", "job", "state", "serving"]
    assert lines[2].split() == columns and lines[3].startswith("daemon")


# ---- completion -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sam", ["samples"]),
        ("samples ", ["old", "toy"]),
        ("samples t", ["toy"]),
        ("samples --ran", ["--random"]),
        ("jobs --state q", ["queued", "quarantined"]),
        ("jobs --run o", ["old"]),
        ("job ", ["4", "3", "2", "1"]),
        ("show --tokens ep", ["epoch"]),
        ("export toy", ["toy", "toy@2"]),
        ("discard-group toy g", ["g4", "g3", "g2", "g1", "g0"]),
        ("logs tr", ["trainer-2"]),
        ("job 4 5", []),
        ("nonsense x", []),
    ],
)
def test_completion(line: str, expected: list[str], made: Made) -> None:
    (made.data / "logs").mkdir()
    (made.data / "logs/trainer-2.log").write_text("")
    made.group(1, "g;touch pwned", "open")
    made.group(1, "g$(touch pwned)", "open")
    verb, _, rest = line.partition(" ")
    words = [verb, *(["--data-dir", str(made.data), *rest.split(" ")] if rest or line.endswith(" ") else [])]
    assert sorted(completion.candidates(words)) == sorted(expected)


def test_a_tab_complains_of_nothing(data: Path) -> None:
    assert completion.candidates(["samples", "--data-dir", str(data), ""]) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_of_its_shell(shell: str, artctl: Call, tmp_path: Path) -> None:
    code, out, _ = artctl("completion", shell)
    assert code == 0 and "artctl" in out and "completion --words" in out
    if shutil.which(shell):
        (tmp_path / "script").write_text(out)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_bash_completes(made: Made, tmp_path: Path, artctl: Call) -> None:
    made.group(2, "g$(touch pwned)", "open")
    (tmp_path / "script").write_text(artctl("completion", "bash")[1])
    binary = tmp_path / "artctl"
    binary.write_text(f'#!/bin/sh\nexec {shlex.join(ARTCTL)} "$@"\n')
    binary.chmod(0o755)
    asked = f'source {tmp_path}/script; COMP_WORDS=(artctl discard-group toy g); COMP_CWORD=3; _artd_complete {binary}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, env={**os.environ, "ARTD_DATA_DIR": str(made.data)},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert sorted(done.stdout.split()) == ["g0", "g1", "g2", "g3", "g4"] and not (tmp_path / "pwned").exists()
