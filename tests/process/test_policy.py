"""Back-off, breaker, state table, causes of death: no processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import artd
from artd.core.states import TRANSITIONS, IllegalTransition
from artd.supervise.backoff import Backoff, Policy
from artd.supervise.postmortem import explain, read_tail, signal_of
from artd.supervise.spawn import Child
from artd.supervise.states import follow
from artd.supervise.supervisor import Supervisor

CALM = Policy(deaths=1000)


def delays(backoff: Backoff, deaths: int, up_s: float = 1.0) -> list[float | None]:
    now, found = 0.0, []
    for _ in range(deaths):
        found.append(backoff.record_death(now, now + up_s))
        now += up_s
    return found


def test_first_respawn_at_once_then_doubling_up_to_the_cap() -> None:
    assert delays(Backoff(CALM, lambda: 0.5), 9) == [0, 1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(("number", "factor"), [(0.0, 0.8), (0.5, 1.0), (0.999999, 1.2)])
def test_jitter_is_a_fifth_either_way(number: float, factor: float) -> None:
    assert delays(Backoff(CALM, lambda: number), 4) == pytest.approx([0, factor, 2 * factor, 4 * factor], rel=1e-5)


def test_jitter_stays_below_the_cap() -> None:
    assert max(delay or 0 for delay in delays(Backoff(CALM, lambda: 0.999), 12)) == 60


def test_two_minutes_up_forget_the_row_of_deaths() -> None:
    backoff = Backoff(CALM, lambda: 0.5)
    assert delays(backoff, 3) == [0, 1, 2]
    assert backoff.record_death(10.0, 10.0 + 119.9) == 4
    assert backoff.record_death(200.0, 200.0 + 120.0) == 0


def test_five_deaths_in_ten_minutes_break() -> None:
    assert delays(Backoff(Policy(), lambda: 0.5), 5) == [0, 1, 2, 4, None]


def test_five_deaths_in_more_than_ten_minutes_do_not() -> None:
    assert None not in delays(Backoff(Policy(), lambda: 0.5), 20, up_s=151.0)
    assert None in delays(Backoff(Policy(), lambda: 0.5), 20, up_s=149.0)


def test_the_operator_closes_the_breaker() -> None:
    backoff = Backoff(Policy(), lambda: 0.5)
    delays(backoff, 5)
    backoff.reset()
    assert delays(backoff, 5) == [0, 1, 2, 4, None]


def test_transitions_of_the_design() -> None:
    legal = TRANSITIONS["process"]
    drawn = ["stopped starting", "starting ready", "ready busy", "busy ready", "ready draining", "draining stopped"]
    drawn += ["starting backoff", "ready backoff", "busy backoff", "draining backoff", "backoff starting"]
    drawn += ["backoff broken", "broken starting"]
    assert {tuple(pair.split()) for pair in drawn} <= legal
    for state, to in {("stopped", "ready"), ("broken", "ready"), ("starting", "busy"), ("backoff", "ready")}:
        with pytest.raises(IllegalTransition, match=f"process: '{state}' may not become '{to}'"):
            follow(state, to)


@pytest.mark.parametrize(
    ("code", "number"), [(0, 0), (1, 0), (128, 0), (137, 9), (143, 15), (-9, 9), (255, 0), (130, 2)]
)
def test_signal_of(code: int, number: int) -> None:
    assert signal_of(code) == number


@pytest.mark.parametrize(
    ("code", "tail", "oom_kills", "cause", "words"),
    [
        (137, "", 1, "out of memory", "killed by SIGKILL; out of memory"),
        (137, "", 0, "", "killed by SIGKILL"),
        (139, "", 1, "", "killed by SIGSEGV"),
        (1, "Traceback\nMemoryError", 0, "out of memory", "ended with exit status 1; out of memory"),
        (
            1,
            "RuntimeError: ... (Cannot allocate memory)",
            0,
            "out of memory",
            "ended with exit status 1; out of memory",
        ),
        (
            134,
            "terminate called after throwing an instance of 'std::bad_alloc'",
            0,
            "out of memory",
            "killed by SIGABRT",
        ),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", 0, "out of memory", "exit status 1; out of memory"),
        (1, "OSError: [Errno 28] No space left on device", 0, "disk full", "exit status 1; disk full"),
        (1, "SafetensorError: ENOSPC", 0, "disk full", "exit status 1; disk full"),
        (1, "KeyError: 'NoMemoryErrorHere'", 0, "", "ended with exit status 1"),
        (-9, "", 0, "", "its guardian was killed by SIGKILL"),
        (128 + 40, "", 0, "", "killed by signal 40"),
        (0, "", 0, "", "ended with exit status 0"),
    ],
)
def test_causes(code: int, tail: str, oom_kills: int, cause: str, words: str) -> None:
    status = explain(code, tail, oom_kills)
    assert (status.code, status.cause) == (code, cause)
    assert words in status.text
    assert cause in status.text


def test_what_the_supervisor_knows_comes_first() -> None:
    status = explain(137, "", 3, "worker 'engine' was not ready 120 s after its start")
    assert status.cause == ""
    assert status.text == "worker 'engine' was not ready 120 s after its start; killed by SIGKILL"
    assert explain(None, "", 0, "could not be started: [Errno 28] No space left on device").cause == "disk full"


def test_tail_of_a_log_that_was_truncated_or_removed(tmp_path) -> None:
    log = tmp_path / "log"
    assert read_tail(log) == ""
    log.write_bytes(b"a\n\xff\n" * 100)
    assert read_tail(log, 0, 2) == "a\n\ufffd"
    assert read_tail(log, 10_000, 2) == "a\n\ufffd", "the log was cut since: show what is there"


def test_nothing_is_offered_that_the_daemon_does_not_ask_for() -> None:
    """What tests alone need is theirs: see helpers.py."""
    root = Path(artd.__file__).parent
    asked = "".join(path.read_text() for path in root.rglob("*.py"))
    used = "".join((root / "supervise" / name).read_text() for name in ("spawn.py", "worker.py"))
    offered = [{name for name in vars(kind) if not name.startswith("_")} for kind in (Supervisor, Child)]
    assert offered[0] == set(re.findall(r"\bsupervisor\.(\w+)\(", asked))
    assert not offered[1] - set(re.findall(r"(?<=child\.)\w+|(?<=self\.)\w+", used))
