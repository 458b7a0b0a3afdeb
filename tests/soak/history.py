"""The history checker: checks, from outside artd, that promises made outside artd were kept.

`judge` compares what clients wrote down (journals) and what workers were told (notes) with the chain of checkpoint manifests
and their batch manifests. It is pure, and knows no row of artd's database. It proves: acknowledged => trained (or still
waiting, where the caller says so), under its digest; trained at most once; steps contiguous; served => committed, as the step
that the reply named, and verified before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from artd_schema.data.manifest import BatchManifest, CheckpointManifest

from .journal import Acked, Broken, Line, Meant, Replied

KINDS = ("lost", "trained twice", "gap", "half-served", "fence", "survivor", "other weights", "stuck")
SIGNED = 32  # characters of the sha that a fake engine says


@dataclass(frozen=True)
class Violation:
    """kind: one of KINDS."""

    kind: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """journal: of all clients. manifests, batches: by sha, everything that was ever seen on disk; newest: sha of the newest
    checkpoint. told: checkpoints that a trainer was told are committed; fenced: results of a living trainer that were refused;
    waiting: trajectories that need not be trained yet; signed: whether engines say which weights they hold."""

    journal: Sequence[Line]
    manifests: Mapping[str, CheckpointManifest]
    batches: Mapping[str, BatchManifest]
    newest: str
    told: frozenset[str] = frozenset()
    fenced: frozenset[str] = frozenset()
    waiting: frozenset[int] = frozenset()
    signed: bool = True


@dataclass
class Trained:
    """Trajectory -> steps that trained it, and the digest under which they did."""

    steps: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    digests: dict[int, str] = field(default_factory=dict)


def judge(evidence: Evidence) -> list[Violation]:
    """Every broken promise; empty when all were kept."""
    line = list(chain(evidence.newest, evidence.manifests))
    found = list(_gaps(line, evidence))
    trained = _trained(line, evidence.batches)
    found += _twice(line, trained)
    found += _acked(evidence, trained)
    found += _served(line, evidence)
    found += _told(line, evidence)
    found += [Violation("lost", entry.what) for entry in evidence.journal if isinstance(entry, Broken)]
    return found


def chain(newest: str, manifests: Mapping[str, CheckpointManifest]) -> Iterator[tuple[str, CheckpointManifest]]:
    """The newest checkpoint, its parent, and so on, as far as manifests are known."""
    seen: set[str] = set()
    while newest in manifests and newest not in seen:
        seen.add(newest)
        yield newest, manifests[newest]
        newest = manifests[newest].parent


def _gaps(line: Sequence[tuple[str, CheckpointManifest]], evidence: Evidence) -> Iterator[Violation]:
    if not line:
        yield Violation("gap", f"the newest checkpoint {evidence.newest[:12]!r} was never seen")
        return
    oldest = line[-1][1]
    if oldest.parent:
        yield Violation("gap", f"step {oldest.step} goes back to {oldest.parent[:12]}, which was never seen")
    steps = [manifest.step for _, manifest in line]
    if steps != list(range(len(steps)))[::-1]:
        yield Violation("gap", f"the chain of parents has the steps {steps}")
    for sha, manifest in line:
        if bool(manifest.batch) != (manifest.step > 0):
            yield Violation("gap", f"step {manifest.step} ({sha[:12]}) was trained on batch {manifest.batch[:12]!r}")
        elif manifest.batch and manifest.batch not in evidence.batches:
            yield Violation("gap", f"batch {manifest.batch[:12]} of step {manifest.step} was never seen")


def _trained(line: Iterable[tuple[str, CheckpointManifest]], batches: Mapping[str, BatchManifest]) -> Trained:
    trained = Trained()
    for _, manifest in line:
        if (batch := batches.get(manifest.batch)) is not None:
            for member in batch.trajectories:
                if member.rows:
                    trained.steps[member.id].append(manifest.step)
                    trained.digests[member.id] = member.digest
    return trained


def _twice(line: Iterable[tuple[str, CheckpointManifest]], trained: Trained) -> Iterator[Violation]:
    for sha, count in Counter(manifest.batch for _, manifest in line if manifest.batch).items():
        if count > 1:
            yield Violation("trained twice", f"batch {sha[:12]} was trained by {count} steps")
    for number, steps in trained.steps.items():
        if len(steps) > 1:
            yield Violation("trained twice", f"trajectory {number} was trained by the steps {sorted(steps)}")
    owner: dict[str, int] = {}
    for number, digest in trained.digests.items():
        if owner.setdefault(digest, number) != number:
            yield Violation(
                "trained twice", f"trajectories {owner[digest]} and {number} are the same body {digest[:12]}"
            )


def _acked(evidence: Evidence, trained: Trained) -> Iterator[Violation]:
    meant = {entry.key: entry for entry in evidence.journal if isinstance(entry, Meant)}
    names: dict[str, int] = {}
    keys: dict[int, str] = {}
    for entry in evidence.journal:
        if not isinstance(entry, Acked):
            continue
        if names.setdefault(entry.key, entry.trajectory) != entry.trajectory:
            yield Violation("lost", f"{entry.key} was trajectory {names[entry.key]}, then {entry.trajectory}")
        if keys.setdefault(entry.trajectory, entry.key) != entry.key:
            yield Violation("lost", f"trajectory {entry.trajectory} is {keys[entry.trajectory]} and {entry.key}")
    for key, number in names.items():
        if number not in trained.steps:
            if number not in evidence.waiting:
                yield Violation("lost", f"{key} was acknowledged as trajectory {number}, which no step trained")
        elif meant[key].digest not in ("", trained.digests[number]):
            yield Violation("lost", f"{key}: trajectory {number} was trained with another body than was submitted")
    if strangers := {number for number in trained.steps if number not in keys}:
        unanswered = len(meant) - len(names)
        if len(strangers) > unanswered:
            yield Violation(
                "trained twice", f"trajectories {sorted(strangers)[:5]} were trained, but nobody meant them"
            )


def _served(line: Sequence[tuple[str, CheckpointManifest]], evidence: Evidence) -> Iterator[Violation]:
    committed = {sha[:SIGNED]: manifest.step for sha, manifest in line}
    for entry in evidence.journal:
        if not isinstance(entry, Replied):
            continue
        step = int(entry.model.rpartition("@")[2])
        if step not in committed.values():
            yield Violation("half-served", f"{entry.response} came from {entry.model}, a step that does not exist")
        if not evidence.signed:
            continue
        weights = "".join(map(chr, entry.tokens)).rstrip("$")
        if weights not in committed:
            yield Violation(
                "half-served", f"{entry.response} came from weights {weights!r}, which were never committed"
            )
        elif committed[weights] != step:
            yield Violation(
                "half-served", f"{entry.response} says {entry.model}, its weights are step {committed[weights]}"
            )
        elif entry.verified is False:
            yield Violation("half-served", f"{entry.response} came from step {step} before the engine had verified it")


def _told(line: Iterable[tuple[str, CheckpointManifest]], evidence: Evidence) -> Iterator[Violation]:
    committed = {sha for sha, _ in line}
    for sha in sorted(evidence.told - committed):
        yield Violation("gap", f"a trainer was told that {sha[:12]} is committed, and it is no step")
    for sha in sorted(evidence.fenced):
        yield Violation("fence", f"the result {sha[:12]} was refused while its trainer lived: it was not killed first")
