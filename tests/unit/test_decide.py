"""core.decide: the pure decisions, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from artd.core.decide import (
    MAX_ATTEMPTS,
    MAX_DEATHS,
    Ending,
    Group,
    JobView,
    PushView,
    RunView,
    WorkerView,
    after_failure,
    batch_to_pack,
    is_stalled,
    job_to_claim,
    plan_push,
)

GROUPS = tuple(Group(i, 4) for i in range(1, 6))
RUN = RunView(state="active", step=2, groups_per_step=3, flush=False, job="", sealed=GROUPS, open_groups=0)


def test_a_full_batch_takes_the_oldest_groups():
    assert batch_to_pack(RUN) == GROUPS[:3]
    assert batch_to_pack(replace(RUN, flush=True)) == GROUPS[:3]


@pytest.mark.parametrize("changes", [{"state": "paused"}, {"state": "finished"}, {"job": "train"}, {"step": -1}])
def test_nothing_is_packed(changes):
    assert batch_to_pack(replace(RUN, **changes)) == ()
    assert batch_to_pack(replace(RUN, flush=True, **changes)) == ()


def test_fewer_groups_are_packed_by_flush_alone():
    few = replace(RUN, sealed=GROUPS[:2])
    assert batch_to_pack(few) == ()
    assert batch_to_pack(replace(few, flush=True)) == GROUPS[:2]


def test_stalled_means_that_nothing_can_come():
    few = replace(RUN, sealed=GROUPS[:2])
    assert is_stalled(few, 3) and is_stalled(few, 9)
    assert not is_stalled(few, 2)  # it is there already
    assert not is_stalled(RUN, 3)  # a batch is due
    for changes in ({"open_groups": 1}, {"job": "train"}, {"state": "paused"}, {"step": -1}, {"flush": True}):
        assert not is_stalled(replace(few, **changes), 3), changes


JOB = JobView(id=7, kind="train", not_before=100, cancel=False)
TRAINER = WorkerView("trainer", "ready", 3)


def test_the_oldest_due_job_is_claimed():
    later = replace(JOB, id=8)
    assert job_to_claim([JOB, later], TRAINER, "active", False, 100) == JOB
    assert job_to_claim([replace(JOB, not_before=101), later], TRAINER, "active", False, 100) == later
    assert job_to_claim([], TRAINER, "active", False, 100) is None


def test_no_job_is_claimed():
    assert job_to_claim([JOB], TRAINER, "active", False, 99) is None
    assert job_to_claim([JOB], None, "active", False, 100) is None
    assert job_to_claim([JOB], TRAINER, "paused", False, 100) is None
    assert job_to_claim([JOB], TRAINER, "active", True, 100) is None
    for state in ("busy", "starting", "backoff", "broken", "draining", "stopped"):
        assert job_to_claim([JOB], replace(TRAINER, state=state), "active", False, 100) is None


def test_a_paused_run_still_gets_its_first_checkpoint():
    init = replace(JOB, kind="init")
    assert job_to_claim([init], TRAINER, "paused", False, 100) == init


@pytest.mark.parametrize("failure", ["interrupted", "killed"])
def test_an_ordered_end_costs_nothing(failure):
    assert after_failure(failure, 3, 1) == Ending("queued", 3, 1, 0, False)


def test_a_job_that_fills_the_disk_waits_and_costs_nothing():
    assert after_failure("full", 3, 1) == Ending("queued", 3, 1, 30_000, False)


def test_transient_failures_back_off_and_end_in_quarantine():
    delays = []
    attempts = 0
    while True:
        ending = after_failure("transient", attempts, 0)
        attempts = ending.attempts
        if ending.pause:
            break
        delays.append(ending.delay_ms)
    assert delays == [2000, 4000, 8000, 16000] and attempts == MAX_ATTEMPTS and ending.state == "quarantined"


def test_the_second_death_is_quarantine():
    first = after_failure("died", 0, 0)
    assert first == Ending("queued", 1, 1, 0, False)
    second = after_failure("died", first.attempts, first.deaths)
    assert (second.state, second.deaths, second.pause) == ("quarantined", MAX_DEATHS, True)


def test_a_permanent_failure_is_quarantine_at_once():
    assert after_failure("permanent", 0, 0) == Ending("quarantined", 1, 0, 0, True)


ENGINE = WorkerView("engine", "ready", 1)


def pushes(*states, checkpoint=5):
    return [PushView(i, checkpoint, state, 0) for i, state in enumerate(states, 1)]


def test_nothing_is_pushed_before_there_is_a_checkpoint():
    plan = plan_push(ENGINE, None, [], 0)
    assert (plan.supersede, plan.create, plan.send) == ((), None, None)


def test_a_prepared_push_is_sent_when_the_engine_is_ready():
    assert plan_push(ENGINE, 5, pushes("prepared"), 0).send == 1
    for engine in (None, replace(ENGINE, state="starting"), replace(ENGINE, state="backoff")):
        assert plan_push(engine, 5, pushes("prepared"), 0).send is None
    waiting = [PushView(1, 5, "prepared", 10)]
    assert plan_push(ENGINE, 5, waiting, 9).send is None and plan_push(ENGINE, 5, waiting, 10).send == 1


def test_only_the_newest_checkpoint_is_pushed():
    plan = plan_push(ENGINE, 6, [*pushes("prepared", checkpoint=5), PushView(2, 6, "prepared", 0)], 0)
    assert plan.supersede == (1,) and plan.send == 2


def test_one_push_at_a_time():
    under_way = [PushView(1, 5, "sending", 0), PushView(2, 6, "prepared", 0), PushView(3, 5, "prepared", 0)]
    plan = plan_push(ENGINE, 6, under_way, 0)
    assert plan.send is None and plan.create is None and plan.supersede == (3,)


def test_an_engine_that_lost_its_weights_gets_the_newest_again():
    assert plan_push(ENGINE, 5, [], 0).create == 5
    assert plan_push(ENGINE, 6, pushes("live", checkpoint=5), 0).create == 6


def test_a_live_push_of_the_newest_needs_nothing():
    plan = plan_push(ENGINE, 5, pushes("live"), 0)
    assert (plan.supersede, plan.create, plan.send) == ((), None, None)
