"""The history checker finds each kind of broken promise, and nothing in a history that kept all."""

from __future__ import annotations

from typing import Any

import pytest

from artd_schema.data.manifest import BatchManifest, Canary, CheckpointManifest, PackedTrajectory
from tests.soak.history import SIGNED, Evidence, judge
from tests.soak.journal import Acked, Broken, Journal, Meant, Replied, read


def name(*parts: object) -> str:
    return "-".join(map(str, parts)).ljust(64, "0")


def checkpoint(step: int, **changes: Any) -> CheckpointManifest:
    fields: dict[str, Any] = {
        "run": "r", "step": step, "epoch": step, "lineage": 0, "parent": name("c", step - 1) if step else "",
        "batch": name("b", step) if step else "", "base_digest": "", "spec_digest": "", "instance": "", "job": step,
        "fence": 1, "files": (), "canary": Canary(prompts=(), logprobs=(), max_abs=0.0, mean_abs=0.0),
    }  # fmt: skip
    return CheckpointManifest(**(fields | changes))


def packed(number: int, rows: tuple[int, ...] = (0,), digest: str = "") -> PackedTrajectory:
    return PackedTrajectory(
        id=number, digest=digest or name("d", number), group=1, reward=0.0, advantage=0.0, rows=rows
    )


def batch(step: int, *members: PackedTrajectory) -> BatchManifest:
    return BatchManifest(
        packer="", run="r", step=step, seed=0, base_digest="", row_length=1, rows=1, tensors={}, token_digest="",
        trajectories=members, groups=(), logical_tokens=1, physical_tokens=1, trainable_tokens=1, scale_rewards=False,
    )  # fmt: skip


def reply(step: int, weights: str, verified: bool = True) -> Replied:
    tokens = tuple(map(ord, weights[:SIGNED] + "$"))
    return Replied(response="x", model=f"r@{step}", prompt=(1,), tokens=tokens, logprobs=(), verified=verified, at=0.0)


def submitted(number: int) -> tuple[Meant, Acked]:
    key = f"k{number}"
    return (
        Meant(key=key, group="g", reward=0.0, digest=name("d", number)),
        Acked(key=key, trajectory=number, at=0.0),
    )


def kept(**changes: Any) -> Evidence:
    """Two steps that trained trajectories 1, 2 and 3; number 4 is meant and was never answered."""
    journal = [line for number in (1, 2, 3) for line in submitted(number)]
    journal += [Meant(key="k4", group="g", reward=0.0), reply(0, name("c", 0)), reply(2, name("c", 2))]
    fields: dict[str, Any] = {
        "journal": journal, "newest": name("c", 2), "told": frozenset({name("c", 1)}),
        "manifests": {name("c", step): checkpoint(step) for step in range(3)},
        "batches": {name("b", 1): batch(1, packed(1), packed(2)), name("b", 2): batch(2, packed(3))},
    }  # fmt: skip
    return Evidence(**(fields | changes))


def test_a_history_that_kept_every_promise():
    assert judge(kept()) == []


def with_lines(*lines: Any) -> Evidence:
    return kept(journal=[*kept().journal, *lines])


def with_batch(step: int, *members: PackedTrajectory) -> Evidence:
    return kept(batches=kept().batches | {name("b", step): batch(step, *members)})


def with_checkpoint(at: int, **changes: Any) -> Evidence:
    return kept(manifests=kept().manifests | {name("c", at): checkpoint(**({"step": at} | changes))})


def without(step: int) -> Evidence:
    return kept(manifests={sha: made for sha, made in kept().manifests.items() if made.step != step})


VIOLATED = {
    "an acknowledged one is gone": ("lost", with_batch(2), "k3 was acknowledged as trajectory 3"),
    "it was left out of its batch": ("lost", with_batch(2, packed(3, rows=())), "no step trained"),
    "another body": ("lost", with_batch(2, packed(3, digest=name("other"))), "another body"),
    "a key with two trajectories": ("lost", with_lines(Acked(key="k3", trajectory=9, at=1.0)), "then 9"),
    "a trajectory with two keys": ("lost", with_lines(Meant(
        key="k9", group="g", reward=0.0), Acked(key="k9", trajectory=3, at=1.0)), "is k3 and k9"),
    "what a client saw": ("lost", with_lines(Broken(what="no such response")), "no such response"),
    "trained by two steps": ("trained twice", with_batch(2, packed(3), packed(1)), "by the steps [1, 2]"),
    "a batch trained twice": ("trained twice", with_checkpoint(2, batch=name("b", 1)), "by 2 steps"),
    "the same body twice": ("trained twice", with_batch(2, packed(3), packed(7, digest=name("d", 1))), "same body"),
    "trained, and nobody meant it": ("trained twice", with_batch(2, packed(3), packed(7), packed(8)), "nobody meant"),
    "the newest is unknown": ("gap", kept(newest=name("c", 7)), "never seen"),
    "a step is gone": ("gap", without(1), "which was never seen"),
    "the first step is gone": ("gap", without(0), "step 1 goes back"),
    "a number left out": ("gap", with_checkpoint(
        2, step=3, parent=name("c", 1), batch=name("b", 2)), "the steps [3, 1, 0]"),
    "step 0 has a batch": ("gap", with_checkpoint(0, batch=name("b", 1)), "step 0"),
    "a step without a batch": ("gap", with_checkpoint(2, batch=""), "step 2"),
    "an unknown batch": ("gap", with_checkpoint(2, batch=name("b", 9)), "never seen"),
    "committed, the trainer heard": ("gap", kept(told=frozenset({name("c", 9)})), "it is no step"),
    "weights of no checkpoint": ("half-served", with_lines(reply(2, name("half"))), "never committed"),
    "another step's name": ("half-served", with_lines(reply(2, name("c", 1))), "its weights are step 1"),
    "a step that does not exist": ("half-served", with_lines(reply(3, name("c", 2))), "does not exist"),
    "before it was verified": ("half-served", with_lines(reply(2, name("c", 2), False)), "before the engine"),
    "a living trainer's result refused": ("fence", kept(fenced=frozenset({name("c", 9)})), "not killed first"),
}  # fmt: skip


@pytest.mark.parametrize("case", VIOLATED)
def test_a_broken_promise_is_found(case: str):
    kind, evidence, what = VIOLATED[case]
    found = judge(evidence)
    assert kind in {violation.kind for violation in found} and any(what in violation.what for violation in found), found


def test_what_waits_is_not_lost():
    assert judge(kept(batches=with_batch(2).batches, waiting=frozenset({3}))) == []


def test_a_line_that_a_kill_cut_short_counts_for_nothing(tmp_path):
    journal = Journal(tmp_path / "j")
    meant, acked = submitted(1)
    journal.write(meant)
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"type":"Acked","key":')
    assert list(read(journal.path)) == [meant]
    again = Journal(journal.path)
    again.write(acked)
    again.close()
    assert list(read(journal.path)) == [meant, acked]
