"""`artctl status`: the first three lines answer healthy? doing? next?; health follows what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artd.cli import show
from artd.cli.status import snapshot
from artd.datadir import lock
from tests.cli.conftest import Call, FakeDaemon
from tests.cli.rows import SPEC, T0, Made


def test_up_and_healthy(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    code, out, _ = artctl("status")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == f"● artd 9.9.9  healthy, running 1h04m   {made.data}   pid {os.getpid()}"
    assert lines[1].split() == ["doing", "training", "step", "3", "(30s)"]
    assert lines[2].split() == ["next", "nothing", "to", "do"]
    assert "serving @2  lag 0" in out and "serving toy" in out and "http://127.0.0.1:4000" in out
    assert "1 open (2) · 1 sealed (2) · 1 packed (2) · 2 trained (4) · 1 discarded (2) · 3 eval trajectories" in out
    assert "job 4 fence 2" in out
    assert "push.live" in out and "trajectory.submitted" not in out


def test_down_says_how_to_start_and_claims_nothing(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    daemon.die()
    daemon.handle = lock.Lock(())
    code, out, err = artctl("status")
    first = out.splitlines()[0]
    assert (code, err) == (3, "")
    assert first.startswith(f"○ artd 0.1.0  not running (pid {os.getpid()} is gone, not stopped cleanly)")
    assert first.endswith(f"start: artd start --detach --data-dir {made.data}")
    assert "was training step 3" in out and "trainer  was busy, gone" in out
    assert "serving" not in out


def test_without_a_database(artctl: Call, data: Path) -> None:
    code, out, _ = artctl("status")
    assert code == 3 and "not running" in out and "there is no run yet" in out


def test_lock_of_another_daemon_than_daemon_json_means_starting(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    daemon.tell("ready", ticks=1)  # left by a daemon that was killed; the lock names the new one
    code, out, _ = artctl("status")
    assert code == 0 and "healthy, starting" in out and "the daemon is starting" in out


def test_a_quarantined_job_shows_its_retry(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    made.connection.execute(
        "UPDATE job SET state = 'quarantined', worker = NULL, error = 'out of memory\nmore' WHERE id = 4"
    )
    made.connection.execute("UPDATE run SET state = 'paused', reason = 'job 4 is quarantined' WHERE id = 2")
    code, out, _ = artctl("status")
    assert code == 4
    assert f"next     artctl retry 4 --data-dir {made.data}" in out
    assert "job 4 is quarantined: out of memory" in out
    assert "← artctl jobs --state quarantined" in out
    assert out.count("problem") == 1, "the pause that follows from the quarantine is no problem of its own"
    code, out, _ = artctl("job", "4")
    assert code == 0 and f"next      artctl retry 4 --data-dir {made.data}" in out


def test_what_helps_a_quarantined_job_depends_on_how_it_failed(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    made.connection.execute("UPDATE job SET state = 'quarantined', worker = NULL, error = 'NaN' WHERE id = 4")
    made.connection.execute("UPDATE process SET state = 'backoff', error = 'Killed' WHERE kind = 'trainer'")
    sql = "UPDATE attempt SET ended = 1, outcome = ?, evidence = 'first\nlast words' WHERE job_id = 4 AND fence = 2"
    for outcome, best in (("died", "retry"), ("rejected", "retry"), ("transient", "retry"), ("permanent", "discard")):
        made.connection.execute(sql, (outcome,))
        told = json.loads(artctl("status", "--json")[1])
        assert told["next"] == f"artctl {best} 4 --data-dir {made.data}", "a worker that starts by itself comes last"
        document = json.loads(artctl("job", "4", "--json")[1])
        assert document["job"]["next"] == document["choices"][0]["command"] == told["next"]
        assert [row["next"] for row in json.loads(artctl("jobs", "--json")[1])["jobs"]] == [told["next"], "", "", ""]
    lines = artctl("job", "4")[1].splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith("  next ")]
    words = [line.removeprefix("  next").split() for line in lines[first : first + 3]]
    assert [found[1] for found in words] == ["discard", "retry", "cancel"]
    assert "attempt 2 (permanent), last lines of its worker:" in lines and "  | last words" in lines
    assert any(line.split()[:4] == ["2", "g2", "b", "0.5"] for line in lines), "the batch's trajectories"
    made.connection.execute("UPDATE job SET kind = 'init', batch_id = NULL WHERE id = 4")
    commands = [choice["command"] for choice in json.loads(artctl("job", "4", "--json")[1])["choices"]]
    assert [command.split()[1] for command in commands] == ["finish", "retry"], "what is permanent is so at each try"
    made.connection.execute(sql, ("transient",))
    commands = [choice["command"] for choice in json.loads(artctl("job", "4", "--json")[1])["choices"]]
    assert [command.split()[1] for command in commands] == ["retry", "finish"]


def test_a_push_that_paused_its_run_is_told_once(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    made.connection.execute("UPDATE push SET state = 'failed', error = 'canary' WHERE id = 2")
    made.connection.execute("UPDATE run SET state = 'paused', reason = 'push 2 failed 5 times: canary' WHERE id = 2")
    told = json.loads(artctl("status", "--json")[1])
    assert [problem["next"] for problem in told["problems"]] == [f"artctl resume toy --data-dir {made.data}"]
    assert "push 2 failed 5 times" in told["problems"][0]["what"]


def test_a_push_that_is_tried_again_is_told(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    """It fails at every start of the engine, and may do so for minutes before the run is paused."""
    made.connection.execute("UPDATE push SET state = 'prepared', attempts = 2, error = 'verify: canary' WHERE id = 2")
    told = json.loads(artctl("status", "--json")[1])
    assert told["health"] == "degraded"
    (problem,) = told["problems"]
    assert problem["what"] == "push 2 of step 2 failed 2 times and is tried again: verify: canary"
    assert problem["next"].startswith("artctl logs engine")
    made.connection.execute("UPDATE push SET state = 'live', error = '' WHERE id = 2")
    assert json.loads(artctl("status", "--json")[1])["problems"] == []


def test_a_batch_that_cannot_be_packed_is_told(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    def problems() -> list[str]:
        return [problem["what"] for problem in json.loads(artctl("status", "--json")[1])["problems"]]

    def failing(**told: object) -> None:
        value = json.dumps({"step": 4, "error": "the packer ended with status -9: \nmore", "at": 0} | told)
        made.connection.execute("UPDATE run SET packing = ? WHERE name = ?", (value.encode(), told["run"]))

    status = json.loads(artctl("status", "--json")[1])
    name, other = status["run"]["name"], next(n for n in ("toy", "old") if n != status["run"]["name"])
    failing(run=name, tries=1)
    assert problems() == []
    failing(run=name, tries=2)
    assert problems() == ["step 4 cannot be packed: the packer ended with status -9: "]
    made.connection.execute("UPDATE run SET packing = NULL")
    failing(run=other, tries=2)
    assert problems() == []


def test_a_group_that_the_packer_fails_on_is_told_until_somebody_takes_note(
    made: Made, daemon: FakeDaemon, artctl: Call
) -> None:
    name = json.loads(artctl("status", "--json")[1])["run"]["name"]
    told = [{"run": name, "group": "it's", "error": "ValueError: x"}, {"run": "another", "group": "g", "error": "y"}]
    made.connection.execute("INSERT INTO meta (key, value) VALUES ('packer.blamed', ?)", (json.dumps(told),))
    (problem,) = json.loads(artctl("status", "--json")[1])["problems"]
    assert problem["what"] == 'group "it\'s" was discarded, because the packer fails on it: ValueError: x'
    assert f"artctl discard-group {name} 'it'\"'\"'s'" in problem["next"]


@pytest.mark.parametrize(
    ("sql", "what", "advice"),
    [
        (
            "UPDATE process SET state = 'broken', error = 'ended with exit status 1\nx\nKilled' WHERE kind = 'engine'",
            "engine is broken: Killed",
            "logs engine",
        ),
        (
            "UPDATE process SET state = 'broken', error = 'the vLLM server has ended: killed by signal 9\nINFO: bye' WHERE kind = 'engine'",
            "engine is broken: the vLLM server has ended: killed by signal 9",
            "logs engine",
        ),
        (
            "UPDATE run SET state = 'paused', reason = 'no luck' WHERE id = 2",
            "run toy is paused: no luck",
            "resume toy",
        ),
        (
            "UPDATE push SET state = 'failed', error = 'canary' WHERE id = 2",
            "push 2 of step 2 failed: canary",
            "pushes",
        ),
        (
            "UPDATE process SET state = 'stopped', error = 'runtime vllm is not installed. Next: artd runtime install vllm --cpu'"
            " WHERE kind = 'engine'",
            "engine cannot start: runtime vllm is not installed.",
            "artd runtime install vllm --cpu",
        ),
    ],
)
def test_degraded(sql: str, what: str, advice: str, made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    assert artctl("status")[0] == 0
    made.connection.execute(sql)
    code, out, _ = artctl("status", "--json")
    problem = json.loads(out)["problems"][0]
    assert code == 4 and problem["what"] == what and advice in problem["next"]


NO_GPU = """ended with exit status 1
Traceback (most recent call last):
  File "/data/code/abc/artd_workers/trainer/placement.py", line 74, in device_of
ValueError: trainer.device is cuda, and torch sees no GPU here: start artd where there is one, or use cpu"""
NO_CUDA = "the vLLM server of run toy has ended: ended with exit code 1 (first error in its log: RuntimeError: No CUDA GPUs are available)"
TRACE = """ended with exit status 1
  File "/data/code/abc/artd_workers/engines/vllm/engine.py", line 3, in engine.devices
OSError: gone"""


@pytest.mark.parametrize(
    ("worker", "error", "first"),
    [
        ("trainer", NO_GPU, "finish"),
        ("engine", NO_CUDA, "finish"),
        (
            "engine",
            "ended (first error: ValueError: backend TRITON ... kernel does not support current device cpu.)",
            "finish",
        ),
        ("engine", "torch cannot say whether there is a GPU (set engine.device): no", "finish"),
        (
            "engine",
            "out of memory: lower engine.kv_cache_mib, engine.max_num_seqs of the run, or free memory",
            "finish",
        ),
        (
            "trainer",
            "the run takes 4 GPUs for its trainer, and torch sees 2: start artd where there are as many",
            "finish",
        ),
        ("engine", TRACE, "logs"),
        ("trainer", "killed by SIGKILL", "logs"),
        ("gateway", NO_GPU, "logs"),
    ],
)
def test_a_worker_that_its_run_s_spec_breaks_is_not_just_started_again(
    worker: str, error: str, first: str, made: Made, daemon: FakeDaemon, artctl: Call
) -> None:
    made.connection.execute("UPDATE process SET state = 'broken', error = ? WHERE kind = ?", (error, worker))
    told = json.loads(artctl("status", "--json")[1])["next"]
    assert told.split()[1] == first and ("artctl resume toy" in told) == (worker != "gateway")
    assert (f"artctl finish toy --data-dir {made.data} and another run" in told) == (first == "finish")
    made.connection.execute("UPDATE process SET state = 'backoff' WHERE kind = ?", (worker,))
    assert json.loads(artctl("status", "--json")[1])["next"].split()[1] == "logs", "artd tries it again by itself"


def test_what_nobody_needs_is_not_imported(made: Made) -> None:
    """Imports are most of a short command."""
    code = f"import sys; from artd.cli import ctl; ctl.main(['status', '--data-dir', {str(made.data)!r}]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "artd.cli.status.problems" in done.stdout.split() and "msgspec" not in done.stdout.split()


def test_trajectories_that_fit_no_row_are_counted(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    """Short rows are legitimate, and a warning comes only when something was dropped for them."""
    assert json.loads(artctl("status", "--json")[1])["warnings"] == []
    packing = Path(__file__).parents[2] / "artd/packing"
    assert "more than row_length" in (packing / "forest.py").read_text()
    too_long = "sequence 0 has 90 tokens, more than row_length 64"
    for number, reason in enumerate([too_long, too_long, "zero_variance", "an operator's"]):
        made.trajectory(2, 6, f"long{number}", state="discarded", reason=reason)
    made.trajectory(1, 6, "elsewhere", state="discarded", reason=too_long)
    made.trajectory(2, 6, "shortened", state="queued", reason=f"trained without a part of it: {too_long}")
    spec = {**SPEC, "row_length": 64, "engine": {"max_model_len": 256}}
    made.connection.execute("UPDATE run SET spec = ? WHERE id = 2", (json.dumps(spec).encode(),))
    code, out, _ = artctl("status", "--json")
    (warning,) = json.loads(out)["warnings"]
    assert code == 0 and warning.startswith(
        "of the newest 2000 trajectories 3 of run toy were not trained, or not as a whole: "
    )
    assert "row_length 64" in warning and "another run with a row_length of 256 (engine.max_model_len)" in warning
    assert f"artctl trajectories --state discarded --data-dir {made.data}" in warning
    code, out, _ = artctl("status")
    assert (
        code == 0
        and "  warning  3 trajectories do not fit row_length 64 and were not trained as a whole: shorter answers, or"
        in out
    )
    spec["row_length"] = 256
    made.connection.execute("UPDATE run SET spec = ? WHERE id = 2", (json.dumps(spec).encode(),))
    assert "row_length that they fit" in artctl("status")[1], "more than the engine's own length was handed in by value"


def test_a_full_disk_degrades_even_when_the_daemon_cannot_say_so(
    made: Made, daemon: FakeDaemon, artctl: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot.os, "statvfs", lambda _: SimpleNamespace(f_bavail=255, f_frsize=4096))
    code, out, _ = artctl("status")
    assert code == 4 and "0 MiB are free" in out


def test_what_the_daemon_says_of_disk_clock_and_sqlite(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    def meta(key: str, value: str) -> dict[str, Any]:
        made.connection.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, value))
        return dict(json.loads(artctl("status", "--json")[1]))

    assert meta("disk", "the disk is nearly full")["problems"][0]["what"].startswith("the disk is nearly full; ")
    assert meta("disk", "")["health"] == "ok"
    shown = meta("retention", "the clock jumped 1.0 days ahead")
    assert shown["health"] == "degraded" and "artctl gc --resume" in shown["next"]
    meta("retention", "")
    made.connection.execute("UPDATE job SET state = 'queued', worker = NULL WHERE id = 4")
    made.connection.execute("UPDATE job SET waiting = '50 MiB must be free under X' WHERE id = 4")
    shown = dict(json.loads(artctl("status", "--json")[1]))
    assert shown["doing"] == "waiting for disk space: 50 MiB must be free under X" and shown["health"] == "degraded"
    made.connection.execute("UPDATE job SET waiting = iif(id = 3, 'long ago', '')")
    assert json.loads(artctl("status", "--json")[1])["health"] == "ok"
    shown = meta("sqlite", "3.40.1")
    assert shown["daemon"]["sqlite"] == "3.40.1" and shown["health"] == "ok"
    assert "WAL-reset" in shown["warnings"][0] and "warning  SQLite 3.40.1 has the WAL-reset bug" in artctl("status")[1]
    assert meta("sqlite", "3.51.3")["warnings"] == []


def test_an_operators_pause_is_no_problem(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    made.connection.execute("UPDATE run SET state = 'paused', reason = 'operator' WHERE id = 2")
    code, out, _ = artctl("status")
    assert code == 0 and f"next     artctl resume toy --data-dir {made.data}" in out


@pytest.mark.parametrize(
    ("sql", "doing"),
    [
        ("UPDATE job SET state = 'queued', worker = NULL WHERE id = 4", "waiting for the trainer to take a job"),
        ("UPDATE job SET state = 'succeeded', worker = NULL, ended = 1 WHERE id = 4", "waiting for rollouts: 1 of 4 trainable groups, 1 open with 2 of 8 trajectories"),
        ("UPDATE job SET state = 'succeeded', worker = NULL, ended = 1 WHERE id = 4; UPDATE push SET state = 'sending' WHERE id = 2", "pushing step 2 into engine"),
        ("UPDATE job SET state = 'succeeded', worker = NULL, ended = 1 WHERE id = 4; DELETE FROM serving", "waiting for an engine to serve step 2"),
        ("DELETE FROM attempt; DELETE FROM job WHERE id = 4; UPDATE run SET state = 'finished'", "nothing; run toy is finished"),
    ],
)  # fmt: skip
def test_doing(sql: str, doing: str, made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    made.connection.executescript(sql)
    _, out, _ = artctl("status", "--json")
    assert json.loads(out)["doing"] == doing


def test_next_says_how_many_groups_a_run_waits_for(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    made.connection.execute(
        "UPDATE job SET state = 'succeeded', ended = 1, worker = NULL WHERE state IN ('running', 'queued')"
    )
    made.connection.execute("UPDATE push SET state = 'live' WHERE state = 'sending'")
    told = json.loads(artctl("status", "--json")[1])
    assert told["doing"].startswith("waiting for rollouts: ")
    sealed, need = told["doing"].split()[3], told["doing"].split()[5]
    left = int(need) - int(sealed)
    assert left > 0 and told["next"] == f"submit {left} more group{'s' if left > 1 else ''} whose rewards differ"


def test_a_live_worker_of_a_dead_daemon_is_told(made: Made, artctl: Call) -> None:
    from artd_schema.paths import boot_id, process_ticks

    me = os.getpid()
    made.connection.execute(
        "UPDATE process SET boot_id = ?, pid = ?, ticks = ? WHERE kind = 'engine'", (boot_id(), me, process_ticks(me))
    )
    _, out, _ = artctl("status")
    assert "engine   was ready, still alive" in out
    made.connection.execute("UPDATE process SET ticks = ticks + 1 WHERE kind = 'engine'")  # the pid was used again
    assert "engine   was ready, gone" in artctl("status")[1]


def test_colours_need_a_terminal_and_no_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert show.state("ready") == "\x1b[32mready\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert show.state("ready") == "ready"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert show.state("ready") == "ready"


def test_spans() -> None:
    from artd.cli.show import iso, span

    assert [span(ms) for ms in (-5, 850, 12_000, 184_000, 8_040_000, 442_800_000)] == [
        "0ms", "850ms", "12s", "3m04s", "2h14m", "5d03h",
    ]  # fmt: skip
    assert iso(T0) == "2026-01-02T03:04:05.678Z" and iso(None) is None
