"""The sample-book: who sampled each token and computed its cache, from vLLM's steps alone. No vLLM, no engine.

`Scheduler` is vLLM's as far as the book sees it: names of fields and their meaning are those of `SchedulerOutput` in vLLM 0.25.1
and 0.32.0 (read in both; the real one: `tests.conformance.methods`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artd_workers.engines.vllm.tokens.sample_book import SampleBook, watch


@dataclass
class Seq:
    """One sequence, and for each of its tokens the label that sampled it and the label of its entry in the cache."""

    prompt: int
    sampled: list[str] = field(default_factory=list)
    cache: list[str] = field(default_factory=list)
    state: str = "new"

    @property
    def tokens(self) -> int:
        return self.prompt + len(self.sampled)


@dataclass
class Scheduler:
    book: SampleBook
    name: str = ""
    seqs: dict[str, Seq] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def push(self, name: str, mode: str) -> None:
        self.name = name
        if mode == "recompute":
            for seq in self.seqs.values():
                seq.cache.clear()
                seq.state = "lost" if seq.state == "running" else seq.state
        self.book.label(name, mode != "keep")

    def lose(self, name: str) -> None:
        """Preempted for want of memory."""
        self.seqs[name].cache.clear()
        self.seqs[name].state = "lost"

    def end(self, name: str) -> None:
        self.ended.add(name)
        del self.seqs[name]

    def step(self, only: Sequence[str] | None = None, chunk: int = 1 << 30, hit: Sequence[str] = ()) -> None:
        """One step of these sequences. hit: entries of the cache that one which comes back finds there already."""
        new: list[Any] = []
        cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[], num_output_tokens=[])
        scheduled = [name for name in self.seqs if only is None or name in only]
        for name in scheduled:
            seq = self.seqs[name]
            if seq.state == "new":
                new.append(
                    SimpleNamespace(req_id=worker(name), prompt_token_ids=[1] * seq.prompt, num_computed_tokens=0)
                )
                continue
            if seq.state == "lost":
                cached.resumed_req_ids.add(worker(name))
                seq.cache = list(hit[: seq.tokens - 1])
            cached.req_ids.append(worker(name))
            cached.num_computed_tokens.append(len(seq.cache))
            cached.num_output_tokens.append(len(seq.sampled))
        gone, self.ended = {worker(name) for name in self.ended}, set()
        self.book.step(SimpleNamespace(finished_req_ids=gone, scheduled_new_reqs=new, scheduled_cached_reqs=cached))
        for name in scheduled:
            seq = self.seqs[name]
            seq.state = "running"
            seq.cache += [self.name] * min(chunk, seq.tokens - len(seq.cache))
            if len(seq.cache) == seq.tokens:
                seq.sampled.append(self.name)


def worker(name: str) -> str:
    """The worker's name of a choice `REQUEST#INDEX`."""
    request, _, index = name.partition("#")
    return f"{index}_generate-tokens-{request}-0123abcd" if index != "0" else f"generate-tokens-{request}-0123abcd"


def told(book: SampleBook, name: str) -> tuple[list[list[Any]], list[list[Any]]]:
    (found,) = book.take([name]).values()
    return [list(run) for run in found["policy"]], [list(run) for run in found["cache"]]


def expand(runs: Sequence[tuple[int, str]], count: int) -> list[str]:
    return [[label for start, label in runs if start <= token][-1] for token in range(count)]


@pytest.fixture
def rig() -> Scheduler:
    made = Scheduler(SampleBook())
    made.push("pol@1", "drain")
    made.seqs["r#0"] = Seq(prompt=5)
    return made


@pytest.mark.parametrize(("mode", "cache"), [("keep", [[0, "pol@1"], [3, "pol@2"]]), ("recompute", [[0, "pol@2"]])])
def test_a_request_in_flight_breaks_where_the_push_met_it(rig: Scheduler, mode: str, cache: Any) -> None:
    for _ in range(4):
        rig.step()
    rig.push("pol@2", mode)
    rig.step()
    assert told(rig.book, "r#0") == ([[0, "pol@1"], [4, "pol@2"]], cache)


def test_what_the_engine_kept_although_it_was_told_to_drop_it_is_told(rig: Scheduler) -> None:
    """A reset that did nothing: the sequence goes on where it was."""
    for _ in range(4):
        rig.step()
    rig.name = "pol@2"
    rig.book.label("pol@2", True)
    rig.step()
    assert told(rig.book, "r#0")[1] == [[0, "pol@1"], [3, "pol@2"]]


def test_before_the_push_after_it_and_at_its_prefill(rig: Scheduler) -> None:
    rig.step()
    rig.end("r#0")
    rig.seqs["half#0"] = Seq(prompt=9)
    rig.step(chunk=4)
    rig.seqs["waits#0"] = Seq(prompt=3)
    rig.push("pol@2", "keep")
    rig.step()
    rig.step()
    assert told(rig.book, "r#0") == ([[0, "pol@1"]], [[0, "pol@1"]])
    assert told(rig.book, "half#0") == ([[0, "pol@2"]], [[0, "pol@2"]]), "no token was sampled before"
    assert told(rig.book, "waits#0") == ([[0, "pol@2"]], [[0, "pol@2"]])


def test_one_that_ended_in_the_last_step_before_a_push_has_no_break(rig: Scheduler) -> None:
    """The worker hears of its end with the next step."""
    rig.step()
    rig.end("r#0")
    rig.push("pol@2", "keep")
    assert told(rig.book, "r#0") == ([[0, "pol@1"]], [[0, "pol@1"]])
    rig.step()
    assert rig.book.known == 0 and rig.book.take(["r#0"]) == {}


def test_two_pushes_without_a_step_between_are_one(rig: Scheduler) -> None:
    for _ in range(3):
        rig.step()
    rig.push("pol@2", "recompute")
    rig.push("pol@3", "keep")
    rig.step(hit=["pol@3"] * 7)
    assert told(rig.book, "r#0") == ([[0, "pol@1"], [3, "pol@3"]], [[0, "pol@3"]])


def test_what_is_preempted_after_a_push_is_computed_by_the_new_weights(rig: Scheduler) -> None:
    """Even though it was kept across the push; what it finds of its own is as old as it was."""
    rig.seqs["half#0"] = Seq(5)
    for _ in range(4):
        rig.step()
    rig.push("pol@2", "keep")
    rig.step()
    for name in ("r#0", "half#0"):
        rig.lose(name)
    rig.step(only=["r#0"])
    rig.step(only=["half#0"], hit=["pol@1"] * 7)
    assert told(rig.book, "r#0") == ([[0, "pol@1"], [4, "pol@2"]], [[0, "pol@2"]])
    assert told(rig.book, "half#0")[1] == [[0, "pol@1"], [2, "pol@2"]]


def test_a_cache_that_was_dropped_before_is_no_dropped_cache_now(rig: Scheduler) -> None:
    for _ in range(4):
        rig.step()
    rig.push("pol@2", "recompute")
    rig.step()
    rig.push("pol@3", "keep")
    rig.step()
    rig.lose("r#0")
    rig.step(hit=["pol@2"] * 8)
    assert told(rig.book, "r#0")[1] == [[0, "pol@2"], [3, "pol@3"]]


def test_what_another_one_put_into_the_dropped_cache_is_new(rig: Scheduler) -> None:
    """Two greedy siblings: the second finds what the first has just computed again, its sampled tokens included."""
    for _ in range(3):
        rig.step()
    rig.push("pol@2", "recompute")
    rig.step(hit=["pol@2"] * 7)
    assert told(rig.book, "r#0")[1] == [[0, "pol@2"]]


def test_choices_are_kept_apart_and_other_routes_are_not_kept(rig: Scheduler) -> None:
    rig.seqs |= {"n#0": Seq(4), "n#1": Seq(4), "n#11": Seq(4)}
    rig.step(only=["n#1"])
    rig.push("pol@2", "keep")
    rig.step()
    new = SimpleNamespace(req_id="cmpl-7-0-0123abcd", prompt_token_ids=[1], num_computed_tokens=0)
    none = SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[], num_output_tokens=[])
    known = rig.book.known
    rig.book.step(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=[new], scheduled_cached_reqs=none))
    assert rig.book.known == known
    assert told(rig.book, "n#1")[0] == [[0, "pol@1"], [1, "pol@2"]]
    assert told(rig.book, "n#0")[0] == told(rig.book, "n#11")[0] == [[0, "pol@2"]]


def test_what_is_taken_is_gone_and_what_nobody_asks_for_is_bounded() -> None:
    rig = Scheduler(SampleBook(ended=3))
    rig.push("pol@1", "drain")
    for number in range(9):
        rig.seqs[f"r{number}#0"] = Seq(2)
        rig.step()
        rig.end(f"r{number}#0")
    rig.step()
    assert rig.book.known == 3
    assert list(rig.book.take([f"r{n}#0" for n in range(9)])) == ["r6#0", "r7#0", "r8#0"]
    assert rig.book.known == 0 and rig.book.take(["r8#0", "never#0"]) == {}


def test_one_that_begins_twice_is_not_known(rig: Scheduler) -> None:
    """A runner that says so of one which comes back (vLLM's other runner does) was not looked at."""
    rig.step()
    rig.seqs["r#0"].state = "new"
    rig.step()
    assert rig.book.take(["r#0"]) == {}


def test_every_step_of_the_runner_is_seen_before_it_runs() -> None:
    seen: list[Any] = []
    runner = SimpleNamespace(execute_model=lambda *args, **kwargs: seen.append(("ran", args, kwargs)) or "output")
    book = SampleBook()
    book.step = lambda scheduled: seen.append(("saw", scheduled))
    watch(runner, book)
    assert runner.execute_model("scheduled", "tensors", more=1) == "output"
    assert seen == [("saw", "scheduled"), ("ran", ("scheduled", "tensors"), {"more": 1})]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sets(st.integers(0, 3)), st.integers(1, 6), st.integers(0, 9)),
        st.tuples(st.just("push"), st.sampled_from(["keep", "recompute", "drain"])),
        st.tuples(st.just("lose"), st.integers(0, 3)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, prompts=st.lists(st.integers(1, 8), min_size=4, max_size=4))
def test_whatever_happens_it_says_what_was(events: list[Any], prompts: list[int]) -> None:
    """Steps of any of them in chunks, pushes of every kind, and losses that bring a part of the own cache back."""
    rig = Scheduler(SampleBook())
    rig.push("0", "drain")
    names = [f"r{number}#0" for number in range(4)]
    rig.seqs = {name: Seq(prompt) for name, prompt in zip(names, prompts, strict=True)}
    kept: dict[str, list[str]] = {name: [] for name in names}
    for number, (kind, *rest) in enumerate(events, 1):
        if kind == "push":
            if rest[0] == "drain":  # what runs is aborted; here it has ended
                continue
            rig.push(str(number), rest[0])
            kept = kept if rest[0] == "keep" else {name: [] for name in names}
        elif kind == "lose" and rig.seqs[names[rest[0]]].state == "running":
            kept[names[rest[0]]] = list(rig.seqs[names[rest[0]]].cache)
            rig.lose(names[rest[0]])
        elif kind == "step":
            for one in sorted(rest[0]):
                rig.step(only=[names[one]], chunk=rest[1], hit=kept[names[one]][: rest[2]])
    for name in names:
        seq = rig.seqs[name]
        told = list(rig.book.take([name]).values())
        assert len(told) == (seq.state != "new")
        for found in told:
            assert expand(found["policy"], len(seq.sampled)) == seq.sampled
            entries = seq.cache[seq.prompt :]
            assert expand(found["cache"], len(entries)) == entries
