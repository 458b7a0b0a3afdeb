"""Pushes that fail in every way: the harness reports the phase and ends the engine in time, and the next spawn serves.

`fails` is one failure with everything that must follow, seen from outside; `CASES` names the failures. A case begins with an
engine that serves a verified step, and leaves one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from artd.supervise import procfs
from artd_schema.data.manifest import FileEntry, WeightTable
from artd_schema.wire import worker as w
from tests.awake import SOON_S, Awake

from .bench import Bench
from .spawn import Flaw, Spawn, manifest, reference
from .speech import Speech

END_S = 30.0
"""Seconds between the failure of a call and the end of every process, on a busy machine."""
NOTICED_S = 15.0
"""Seconds until the harness has noticed, on a busy machine, that the engine behind a living server is dead."""

BEFORE = ("fence", "open", "stage")
"""Phases of a merged push before the engine asks for the hold."""


@dataclass(frozen=True)
class Failure:
    """way: of the push; phase: in which the harness must say that it failed; at: the call that goes wrong; how: how
    (`spoiled` has the words; a death strikes the server, or its workers; silence: the daemon's, that the gateway holds); flaw: of the trainer's side instead; damage: of the checkpoint's files instead."""

    way: str
    phase: str
    at: str = ""
    how: str = ""
    flaw: Flaw = ""
    damage: str = ""

    def __str__(self) -> str:
        words = (self.way, self.phase, self.at.strip("/").replace("/", "."), self.how, self.flaw, self.damage)
        return "-".join(word for word in words if word)


def failures(speech: Speech, way: str, every: bool = False) -> Iterator[Failure]:
    """What can go wrong with a push of this way. every: at each call, else at the last of each phase."""
    phases, methods = speech.pushes[way], speech.methods
    for phase, calls in phases.items():
        for call in calls if every else calls[-1:]:
            yield from (Failure(way, phase, call, how) for how in ("error", "hang", "death"))
    if way in ("disk", "lora"):
        yield Failure(way, "verify", methods["score"][-1], "wrong")
        yield from (Failure(way, "fence", damage=damage) for damage in ("manifest", "table"))
        yield from (Failure(way, "transfer", damage=damage) for damage in ("tensor", "short table"))
        if way == "lora":
            yield Failure(way, "transfer", damage="config")
    else:
        moved = "stage" if way == "staged" else "transfer"
        met = "open" if "open" in phases else "transfer"
        yield from (Failure(way, moved, flaw=flaw) for flaw in ("dies", "stalls"))
        yield Failure(way, "transfer", flaw="wrong")  # a staged push sums what it has swapped in
        yield from (Failure(way, met, flaw=flaw) for flaw in ("short", "absent"))
    if way == "staged":
        yield Failure(way, "stage", methods["direct_stage"][-1], "never done")
    if way == "disk":
        yield Failure(way, "load", methods["finish"][-1], "held")
        yield Failure(way, "hold", how="silence")
        yield Failure(way, "hold", how="death in fence")
        yield Failure(way, "hold", how="death in hold")
        yield from (Failure(way, phase, phases[phase][-1], "workers' death") for phase in ("transfer", "verify"))


def deep(failure: Failure) -> bool:
    """Whether the engine itself is what fails, or has to notice: the others are the relay's answers, or the harness's to see."""
    return failure.how.endswith("death") or bool(failure.flaw) or failure.damage in ("tensor", "short table")


def fails(bench: Bench, failure: Failure) -> None:
    """One failure: told with its phase, the engine unknown and ended in time, the newest committed step served again."""
    spawn = bench.engine()
    before, step = bench.served, (bench.served + 1) % 3  # one that this spawn has never had
    feed = bench.kind.feed(spawn.root, failure.way) if failure.way in bench.kind.ways else None
    limit = within = bench.kind.deadline_s if hangs(failure) else bench.kind.patience_s
    if failure.how == "workers' death":  # the server would let the call wait until its deadline
        limit, within = 3 * bench.kind.patience_s, NOTICED_S
    try:
        with damaged(bench, step, failure.damage) as ref, spoiled(bench, spawn, failure):
            seen = len(spawn.calls())
            push = bench.order(step, feed, deadline_s=limit, checkpoint=ref)
            if feed is not None and failure.flaw != "absent":
                feed.send(push, failure.flaw)
            with Awake() as took:
                spawn.daemon.send(push)
                strike(spawn, failure, seen)
                unknown(spawn, push, failure.phase)
            routes = [call["route"] for call in spawn.calls()[seen:]]
            (drop,), (pause,) = bench.kind.speech.methods["abort_all"], bench.kind.speech.methods["pause"]
            assert drop not in routes, "it was asked to end, with a grace, in place of being ended"
            assert failure.phase not in (*BEFORE, "hold") or pause not in routes
    finally:
        if feed is not None:
            feed.close()
    assert took.seconds <= within + push.drain_s + END_S, f"it took {took.seconds:.1f} s until the engine was gone"
    newer = bench.replace(step)
    assert newer.serves(step)
    assert not newer.serves(before, newer.name(step))


def hangs(failure: Failure) -> bool:
    """Whether it may take until the push's deadline. A trainer's side that dies is seen at once by some ways only."""
    return (
        failure.how in ("hang", "never done", "silence")
        or failure.flaw in ("dies", "stalls", "absent")
        or (failure.flaw == "short" and failure.way in ("gloo", "stock"))
    )


def unknown(spawn: Spawn, push: w.Push, phase: str) -> None:
    """The harness says that the push failed in this phase, that the engine is down, and nothing of it lives."""
    daemon = spawn.daemon
    failed = daemon.expect(w.PushFailed, push.deadline_s + push.drain_s + SOON_S)
    assert (failed.push, failed.fence, failed.phase) == (push.push, push.fence, phase), failed
    assert failed.error
    assert daemon.wait() == 1
    mine = [message for message in daemon.received if getattr(message, "fence", 0) == push.fence]
    asked = w.Pausing(push=push.push, fence=push.fence)
    assert mine == ([failed] if push.mode == "lora" or phase in BEFORE else [asked, failed]), mine
    assert [type(message) for message in daemon.received[-1:]] == [w.Down]
    assert spawn.living() == []
    assert not Path(spawn.config.dir).exists()


# ---- how a push is made to fail ---------------------------------------------------------------------------------------


@contextmanager
def spoiled(bench: Bench, spawn: Spawn, failure: Failure) -> Iterator[None]:
    """The relay's and the daemon's part of the failure. A wrong score is one just beyond the canary's bound."""
    bound, speech = manifest(bench.kind.checkpoint(0)).canary.max_abs, bench.kind.speech
    hold = {"hold": str(spawn.root / "go")}
    faults = {"error": 500, "hang": "hang", "death": hold, "workers' death": hold, "held": {"say": speech.held},
              "wrong": {"shift": 2 * bound, "key": speech.score},
              "never done": {"say": speech.fine}}  # fmt: skip
    spawn.daemon.holds = failure.phase != "hold"
    if failure.how == "death in fence":
        (spawn.root / "engine.fenced").write_text("stop")
    with spawn.faults({failure.at: faults[failure.how]} if failure.at else {}):
        yield


def strike(spawn: Spawn, failure: Failure, seen: int) -> None:
    """Kill when the push has come to the place. seen: calls before the push."""
    if failure.how == "death in fence":
        # A harness that is stopped cannot see how its server ends: it finds out at its next call.
        until(lambda: procfs.read_stat(spawn.daemon.process.pid).state == "T", spawn, failure)
        spawn.kill_server()
        os.kill(spawn.daemon.process.pid, signal.SIGCONT)
    elif failure.how == "death in hold":
        until(lambda: isinstance(spawn.daemon.received[-1], w.Pausing), spawn, failure)
        spawn.kill_server()
    elif failure.how.endswith("death"):
        until(lambda: failure.at in [one["route"] for one in spawn.calls()[seen:]], spawn, failure)
        if failure.how == "death":
            spawn.kill_server()
        else:
            spawn.kill_workers()
            (spawn.root / "go").touch()


def until(condition: Callable[[], bool], spawn: Spawn, failure: Failure) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, f"{failure}: the push did not come there; {spawn.daemon.received[-3:]}"
        spawn.daemon.hear(0.01)


@contextmanager
def damaged(bench: Bench, step: int, damage: str) -> Iterator[w.CheckpointRef]:
    """The checkpoint, or a copy of it that is not what the trainer made. A short table is one that was committed so."""
    folder = bench.kind.checkpoint(step)
    if not damage:
        yield reference(folder, step)
        return
    copy = Path(shutil.copytree(folder, bench.root / "damaged"))
    try:
        ref = reference(copy, step)
        match damage:
            case "manifest":
                spoil(copy / "manifest.json", b"toy", b"tox")
            case "table":
                spoil(copy / "weights.json", b"float", b"doubl")
            case "tensor":
                file = copy / "adapter_model.safetensors"
                raw = bytearray(file.read_bytes())
                raw[-2] ^= 0x40
                file.write_bytes(raw)
            case "config":
                spoil(copy / "adapter_config.json", b"{", b"{ ")  # still what it says, but not what was committed
            case "short table":
                ref = reference(shortened(copy), step)
        yield ref
    finally:
        shutil.rmtree(copy)


def spoil(file: Path, old: bytes, new: bytes) -> None:
    raw = file.read_bytes()
    assert old in raw
    file.write_bytes(raw.replace(old, new, 1))


def shortened(folder: Path) -> Path:
    """Leave the last tensor out of the weight table, in all that says what it is."""
    table = msgspec.json.decode((folder / "weights.json").read_bytes(), type=WeightTable)
    raw = msgspec.json.encode(msgspec.structs.replace(table, tensors=table.tensors[:-1]))
    (folder / "weights.json").write_bytes(raw)
    found = manifest(folder)
    entry = FileEntry("weights.json", len(raw), hashlib.sha256(raw).hexdigest())
    files = tuple(entry if file.name == entry.name else file for file in found.files)
    (folder / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(found, files=files)))
    return folder
