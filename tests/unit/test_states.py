"""core.states against the schema's CHECKs and the supervisor's table."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

import artd
from artd.core.states import TRANSITIONS, IllegalTransition, check, sources

SQL = files("artd_schema").joinpath("sql").joinpath("0001_initial.sql").read_text(encoding="utf-8")


def listed_states() -> dict[str, set[str]]:
    """Table -> states of its CHECK, out of the SQL text."""
    found = {}
    for name, body in re.findall(r"CREATE TABLE (\w+) \((.*?)\n\)", SQL, re.DOTALL):
        match = re.search(r"\bstate TEXT NOT NULL CHECK \(state IN \(([^)]*)\)\)", body)
        if match:
            found[name] = set(re.findall(r"'(\w+)'", match.group(1)))
    return found


def test_every_table_with_states_has_transitions_and_the_other_way_round():
    assert listed_states().keys() == TRANSITIONS.keys()
    assert len(TRANSITIONS) == 10


@pytest.mark.parametrize("entity", sorted(TRANSITIONS))
def test_tables_name_the_states_of_the_checks(entity):
    named = {state for pair in TRANSITIONS[entity] for state in pair}
    assert named == listed_states()[entity]


@pytest.mark.parametrize("entity", sorted(TRANSITIONS))
def test_no_state_leads_to_itself_and_every_state_can_be_left_or_reached(entity):
    assert all(start != end for start, end in TRANSITIONS[entity])


def test_what_the_design_forbids_is_not_there():
    for entity, start, end in [
        ("run", "finished", "active"),
        ("job", "cancelled", "queued"),
        ("job", "succeeded", "queued"),
        ("batch", "trained", "packed"),
        ("batch", "abandoned", "packed"),
        ("trajectory", "trained", "queued"),
        ("trajectory", "trained", "packed"),
        ("checkpoint", "retired", "committed"),
        ("push", "failed", "prepared"),
        ("push", "superseded", "live"),
        ("push", "prepared", "live"),
        ("serving", "gone", "live"),
        ("trajectory_group", "sealed", "open"),
    ]:
        with pytest.raises(IllegalTransition):
            check(entity, start, end)


def test_sources():
    assert sources("job", "running") == ("queued",)
    assert set(sources("job", "queued")) == {"running", "quarantined"}
    with pytest.raises(IllegalTransition, match="no state may move to 'prepared-ish'"):
        sources("push", "prepared-ish")
    check("job", "queued", "running")


def test_only_pauses_pauses_a_run():
    """A pause that stands in `run` alone would have no cause that somebody could lift."""
    sources = {path.name: path.read_text() for path in Path(artd.__file__).parent.rglob("*.py")}
    assert [name for name, text in sources.items() if re.search(r'"run",[^)]*"paused"', text)] == ["runs.py"]
    assert [name for name, text in sources.items() if re.search(r"(?<!def )\bpause_run\(", text)] == ["pauses.py"]
