"""The other reading verbs: tables, filters, events, logs; names that do not exist."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from artd.cli import ctl, read
from artd.cli.artctl import events, logs
from artd.store import readonly
from tests.awake import SOON_S
from tests.cli.conftest import Call
from tests.cli.rows import Made


def _env(data: Path) -> dict[str, str]:
    return {**os.environ, "ARTD_DATA_DIR": str(data), "PYTHONUNBUFFERED": "1"}


def test_tables_are_aligned_and_leave_out_empty_columns(made: Made, artctl: Call) -> None:
    code, out, _ = artctl("jobs")
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == [
        "id",
        "run",
        "kind",
        "step",
        "state",
        "attempts",
        "fence",
        "took",
        "created",
        "loss",
    ]
    assert lines[1].split()[:5] == ["4", "toy", "train", "3", "running"]
    assert lines[2].split()[-1] == "0.25"
    column = lines[0].index("state")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)


def test_filters(made: Made, artctl: Call) -> None:
    def ids(*words: str) -> list[int]:
        return [row["id"] for row in json.loads(artctl(*words, "--json")[1])[words[0]]]

    assert ids("jobs", "--state", "succeeded") == [3, 2, 1]
    assert ids("jobs", "--run", "old") == [1]
    assert ids("jobs", "-n", "2") == [4, 3]
    assert ids("trajectories", "--group", "g2") == [2]
    assert ids("trajectories", "--state", "discarded", "--run", "toy") == [3]
    assert ids("pushes", "--state", "live") == [2]
    assert ids("checkpoints", "--state", "retired") == [1]
    assert artctl("jobs", "--state", "cancelled")[1] == "no jobs that match\n"


@pytest.mark.parametrize(
    "words", [("jobs", "-n", "0"), ("jobs", "-n", "-1"), ("events", "-n", "0"), ("logs", "trainer", "-n", "-1"),
              ("runs", "-n", "x"), ("events", "--after", "-1")],
    ids=" ".join,
)  # fmt: skip
def test_a_number_of_rows_that_means_nothing_is_usage(made: Made, artctl: Call, words: tuple[str, ...]) -> None:
    """Never "no jobs yet" where there are some, nor every row where SQLite takes a negative limit for none."""
    code, out, err = artctl(*words)
    assert (code, out) == (2, "") and f"{words[-1]!r} is not a whole number" in err


def test_nothing_is_served_while_the_daemon_is_down(made: Made, artctl: Call) -> None:
    assert json.loads(artctl("runs", "--json")[1])["runs"][0]["served"] == -1


def test_served_with_the_daemon_up(made: Made, daemon: object, artctl: Call) -> None:
    assert json.loads(artctl("runs", "--json")[1])["runs"][0]["served"] == 2


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("jobs", "--run", "toi"), 5, "there is no run 'toi' (did you mean toy?); the newest are old, toy"),
        (("job", "77"), 5, "there is no job 77; the newest is 4"),
        (("events", "--run", "x"), 5, "there is no run 'x'"),
        (("logs", "trainr"), 5, "there is no log 'trainr'"),
        (("stauts",), 2, "unknown verb 'stauts' (did you mean status?)"),
        (("jobs", "--state", "quarantine"), 2, "unknown state 'quarantine' (did you mean quarantined?)"),
        (("job", "four"), 2, "is not a whole number of 1 or more"),
        (("jobs", "--jsn"), 2, "unrecognized arguments: --jsn\nnext: artctl jobs --help"),
        ((), 2, "VERB"),
    ],
)
def test_errors(words: tuple[str, ...], code: int, says: str, made: Made, artctl: Call) -> None:
    found, out, err = artctl(*words)
    assert (found, out) == (code, "")
    assert err.startswith("error: ") and says in err and "next: artctl" in err


def test_a_key_that_is_not_there(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["key", "remove", "nobody", "--data-dir", str(data)]) == 5
    assert capsys.readouterr().err == f"error: there is no key 'nobody'\nnext: artctl key list --data-dir {data}\n"


@pytest.mark.parametrize("verb", ["runs", "jobs", "workers", "events", "job"])
def test_no_database(verb: str, artctl: Call, data: Path) -> None:
    code, out, err = artctl(verb, *(["1"] if verb == "job" else []))
    assert (code, out) == (3, "") and f"next: artd start --detach --data-dir {data}" in err


def test_a_damaged_database_is_told(made: Made, artctl: Call) -> None:
    made.connection.close()
    for path in made.data.glob("artd.db*"):
        path.write_bytes(b"x" * 8192)
    code, _, err = artctl("runs")
    assert code == 1 and "cannot be read" in err


def test_reads_leave_the_database_alone(made: Made, artctl: Call) -> None:
    made.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    made.connection.close()
    before = (made.data / "artd.db").read_bytes()
    for verb in ("status", "runs", "trajectories"):
        artctl(verb)
    assert (made.data / "artd.db").read_bytes() == before
    connection = read.Database(made.data)._connection
    with pytest.raises(Exception, match="readonly"):
        connection.execute("DELETE FROM event")
    connection.execute("PRAGMA query_only = 0")  # the second guard: the file itself is open for reading alone
    with pytest.raises(Exception, match="readonly"):
        connection.execute("DELETE FROM event")


def test_without_shared_memory_an_idle_database_is_read_as_it_is(
    made: Made, artctl: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.connection.close()  # the last writer: -wal and -shm are gone
    assert not (made.data / "artd.db-wal").exists()
    opened = readonly._open

    def without_shm(uri: str, timeout_s: float, shared: bool) -> sqlite3.Connection:
        if "immutable" not in uri:
            raise sqlite3.OperationalError("unable to open database file")
        return opened(uri, timeout_s, shared)

    monkeypatch.setattr(readonly, "_open", without_shm)
    assert artctl("runs")[0] == 0
    (made.data / "artd.db-wal").write_bytes(b"x" * 64)  # somebody may be writing: the file alone is not the truth
    code, _, err = artctl("runs")
    assert code == 1 and "cannot be read" in err


def test_a_database_of_another_version_is_told(made: Made, artctl: Call) -> None:
    made.connection.execute("ALTER TABLE run DROP COLUMN reason")
    code, _, err = artctl("runs")
    assert code == 1 and "no such column" in err and "use the artd that made it" in err


# ---- events ---------------------------------------------------------------------------------------------------------------


def test_events_oldest_first_with_after_and_limit(made: Made, artctl: Call) -> None:
    def ids(*words: str) -> list[int]:
        return [row["id"] for row in json.loads(artctl("events", *words, "--json")[1])["events"]]

    assert ids() == [1, 2, 3, 4]
    assert ids("-n", "2") == [3, 4]
    assert ids("--after", "1", "-n", "2") == [2, 3]
    assert ids("--run", "old") == []
    lines = artctl("events")[1].splitlines()
    assert lines[2].split(None, 3)[3] == "step.committed toy 2 sha=555555555555 loss=0.25"


def test_following_events_until_interrupted(made: Made) -> None:
    made.connection.execute("DELETE FROM event WHERE id > 1")
    command = [sys.executable, "-m", "artd.cli.ctl", "events", "-f", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_env(made.data)) as child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["id"] == 1
        new = made.event("push.live", "3")
        row = json.loads(child.stdout.readline())
        assert (row["id"], row["schema"], row["kind"]) == (new, "artctl.event/1", "push.live")
        child.send_signal(signal.SIGINT)
        assert child.wait(SOON_S) == 130


def test_a_reader_that_goes_away_is_no_error(made: Made) -> None:
    made.connection.execute("BEGIN")
    for number in range(3000):
        made.event("run.flushed", str(number))
    made.connection.execute("COMMIT")
    command = f"{sys.executable} -m artd.cli.ctl events -n 3000 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=_env(made.data), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---- logs -----------------------------------------------------------------------------------------------------------------


def _log(made: Made, name: str, text: str) -> Path:
    path = made.data / "logs" / f"{name}.log"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_logs_tail_and_near_names(made: Made, artctl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    _log(made, "trainer-2", "".join(f"line {n}\n" for n in range(50_000)))
    assert artctl("logs", "trainer", "-n", "3")[1] == "line 49997\nline 49998\nline 49999\n"
    assert len(artctl("logs", "trainer", "-n", "40000")[1].splitlines()) == 40_000
    assert artctl("logs", "trainer", "-n", "0")[1] == ""
    monkeypatch.setattr(logs, "_BLOCK", 4)
    _log(made, "trainer-2", "aaaaaa\nbbbbbb\ncc\n")
    assert artctl("logs", "trainer", "-n", "2")[1] == "bbbbbb\ncc\n"
    code, _, err = artctl("logs", "traner")
    assert code == 5 and "did you mean trainer?" in err


def test_logs_of_the_engine_hold_its_servers_words(made: Made, artctl: Call) -> None:
    _log(made, "engine-2-0", "harness up\n")
    _log(made, "engine-2-0-server", "vLLM up\nhalf a line")
    assert artctl("logs", "engine")[1] == "engine | harness up\nserver | vLLM up\n"
    found = json.loads(artctl("logs", "engine", "--json")[1])
    assert found["lines"] == [
        {"source": "engine-2-0", "line": "harness up"},
        {"source": "engine-2-0-server", "line": "vLLM up"},
    ]


def test_following_goes_on_over_rotation(made: Made) -> None:
    path = _log(made, "engine-2-0", "one\n")
    [source, _] = logs.sources(made.data, "engine")
    assert source.tail(10) == ["one"]
    with path.open("a") as file:
        file.write("two\nthr")
        file.flush()
        assert source.news() == ["two"]
        file.write("ee\n")
    assert source.news() == ["three"]
    path.rename(path.with_suffix(".1"))
    assert source.news() == []
    path.write_text("four is longer than all before\n")
    assert source.news() == ["four is longer than all before"]
    path.write_text("")
    assert source.news() == []
    path.write_text("5\n")
    assert source.news() == ["5"]


def test_logs_follow(made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = _log(made, "trainer-2", "one\n")
    naps = 0

    def sleep(_seconds: float) -> None:
        nonlocal naps
        naps += 1
        if naps == 2:
            raise KeyboardInterrupt
        path.write_text("one\ntwo\n")

    monkeypatch.setattr(logs.time, "sleep", sleep)
    assert ctl.main(["logs", "trainer", "-f", "--data-dir", str(made.data)]) == 130
    assert capsys.readouterr().out == "one\ntwo\n"


def test_many_readers_at_once_do_not_disturb_a_writer(made: Made) -> None:
    stop = threading.Event()
    made.connection.close()
    errors: list[BaseException] = []

    def write() -> None:
        other = Made.__new__(Made)
        other.connection = sqlite3.connect(made.data / "artd.db", isolation_level=None, timeout=0.5)
        try:
            while not stop.is_set():
                other.event("run.flushed", "x")
        except BaseException as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert ctl.main(["events", "-n", "1", "--json", "--data-dir", str(made.data)]) == 0
    stop.set()
    writer.join()
    assert errors == []
    assert events.POLL_S < 1
