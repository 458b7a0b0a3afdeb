"""What a run must do, said a second time and as simply as it can be: lists and dicts, no rows, no crash, no fence to check.

Owner of: the model's own state. Invariants: shares no code with `artd.core`; what it answers is what the daemon must answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FOLLOWS = {
    "run": {"active": "paused finished", "paused": "active finished"},
    "trajectory_group": {
        "open": "sealed discarded", "sealed": "packed discarded", "packed": "trained sealed discarded"
    },
    "trajectory": {"queued": "packed discarded", "packed": "trained queued discarded"},
    "batch": {"packed": "trained abandoned"},
    "job": {
        "queued": "running cancelled", "running": "succeeded queued quarantined cancelled", "quarantined": "queued cancelled"
    },
    "checkpoint": {"committed": "retired"},
    "push": {
        "prepared": "sending superseded", "sending": "live prepared failed superseded", "live": "superseded"
    },
    "serving": {"live": "draining gone", "draining": "gone"},
}  # fmt: skip
"""Entity: state: the states that may follow it (the table of the design)."""


@dataclass
class Group:
    """rewards: by key of its trajectories. state: open, sealed, packed, trained or discarded."""

    name: str
    deadline: int
    rewards: dict[str, float] = field(default_factory=dict)
    state: str = "open"


@dataclass
class Job:
    kind: str
    step: int
    groups: list[Group] = field(default_factory=list)
    state: str = "queued"
    attempts: int = 0
    deaths: int = 0
    not_before: int = 0
    doomed: str = ""  # "cancel" or "discard" once that was asked while it ran


@dataclass
class Reference:
    """One run. now: milliseconds; chain: the jobs whose steps are those of the run now."""

    group_size: int
    groups_per_step: int
    timeout_ms: int
    now: int
    state: str = "active"
    held: set[str] = field(default_factory=set)  # why it is paused
    flush: bool = False
    lineage: int = 0
    groups: dict[str, Group] = field(default_factory=dict)
    homes: dict[str, tuple[str, float]] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=lambda: [Job("init", 0)])
    chain: list[Job] = field(default_factory=list)

    @property
    def step(self) -> int:
        return len(self.chain) - 1

    @property
    def unfinished(self) -> Job | None:
        """The job that is not over."""
        last = self.jobs[-1]
        return last if last.state in ("queued", "running", "quarantined") else None

    # ---- trajectories and groups ----------------------------------------------------------------------------------------

    def submit(self, key: str, name: str, reward: float) -> str:
        """new, again or conflict."""
        if key in self.homes:
            return "again" if self.homes[key] == (name, reward) else "conflict"
        if self.state == "finished":
            return "conflict"
        group = self.groups.setdefault(name, Group(name, self.now + self.timeout_ms))
        if group.state != "open":
            return "conflict"
        self.homes[key] = (name, reward)
        group.rewards[key] = reward
        if len(group.rewards) >= self.group_size:
            self.seal(group)
        return "new"

    def seal(self, group: Group) -> None:
        if group.state == "open":
            different = len(set(group.rewards.values())) > 1
            group.state = "sealed" if different else "discarded"

    def seal_late(self) -> None:
        for group in self.groups.values():
            if group.deadline <= self.now:
                self.seal(group)

    def flush_all(self) -> None:
        for group in self.groups.values():
            self.seal(group)
        self.flush = self.flush or bool(self.groups)

    # ---- jobs -----------------------------------------------------------------------------------------------------------

    def pack(self) -> bool:
        """Whether a batch was due."""
        if self.state != "active" or self.unfinished or self.step < 0:
            return False
        waiting = [group for group in self.groups.values() if group.state == "sealed"]
        enough = len(waiting) >= self.groups_per_step
        if not enough and not (self.flush and waiting):
            self.flush = False
            return False
        job = Job("train", self.step + 1, waiting[: self.groups_per_step])
        for group in job.groups:
            group.state = "packed"
        self.flush = False
        self.jobs.append(job)
        return True

    def claim(self) -> Job | None:
        """The job that a free trainer gets."""
        job = self.unfinished
        if job is None or job.state != "queued" or job.not_before > self.now:
            return None
        if self.state == "finished" or (self.state != "active" and job.kind != "init"):
            return None
        job.state = "running"
        return job

    def commit(self, job: Job) -> bool:
        """Whether the result of the running job becomes a step."""
        if job.doomed:
            self._abandon(job, job.doomed)
            return False
        job.state = "succeeded"
        self.chain.append(job)
        for group in job.groups:
            group.state = "trained"
        return True

    def fail(self, job: Job, how: str) -> None:
        """how: transient, permanent, interrupted, full, died, killed."""
        if job.doomed:
            self._abandon(job, job.doomed)
            return
        job.state = "queued"
        if how in ("interrupted", "killed", "full"):
            job.not_before = self.now + 30_000 * (how == "full")
            return
        job.attempts += 1
        job.deaths += how == "died"
        if how == "permanent" or job.deaths == 2 or job.attempts == 5:
            job.state, job.not_before = "quarantined", self.now
            self.hold("quarantine")
        else:
            job.not_before = self.now + (0 if how == "died" else 1000 * min(2**job.attempts, 300))

    def end(self, job: Job, how: str) -> bool:
        """how: cancel or discard. Whether the operator is obeyed."""
        if job.kind == "init":
            return False
        if job.state in ("succeeded", "cancelled"):
            return job.state == "cancelled" and job.doomed == how
        if job.doomed and job.doomed != how:
            return False
        was, job.doomed = job.state, how
        if was != "running":
            self._abandon(job, how)
        if how == "cancel":
            self.hold("cancel")
        if was == "quarantined":
            self.lift("quarantine")
        return True

    def hold(self, cause: str) -> None:
        if self.state != "finished":
            self.held.add(cause)
            self.state = "paused"

    def lift(self, cause: str) -> None:
        self.held.discard(cause)
        if self.state == "paused" and not self.held:
            self.state = "active"

    def _abandon(self, job: Job, how: str) -> None:
        job.state, job.doomed = "cancelled", how
        for group in job.groups:
            group.state = "sealed" if how == "cancel" and self.state != "finished" else "discarded"

    def retry(self, job: Job) -> bool:
        if job.state != "quarantined" or self.state == "finished":
            return False
        job.state, job.attempts, job.deaths, job.not_before = "queued", 0, 0, 0
        self.lift("quarantine")
        return True

    def reboot(self, seen: int) -> None:
        """seen: when the daemon last wrote; from then to now no deadline came nearer."""
        for group in self.groups.values():
            group.deadline += self.now - seen
        for job in self.jobs:
            if job.state == "queued" and job.not_before:
                job.not_before = self.now + max(0, job.not_before - seen)

    # ---- the run --------------------------------------------------------------------------------------------------------

    def steer(self, target: str) -> bool:
        """target: active, paused or finished."""
        if self.state == "finished" and target != "finished":
            return False
        self.state = target
        job = self.unfinished
        if target == "finished" and job:
            if job.state == "running":
                job.doomed = job.doomed or "cancel"
            else:
                self._abandon(job, "cancel")
        if target == "finished":
            for group in self.groups.values():
                group.state = "discarded" if group.state in ("open", "sealed") else group.state
        self.held = {"operator"} | self.held if target == "paused" else set()
        return True

    def rollback(self, step: int, kept: set[int]) -> bool:
        """kept: steps whose files are there."""
        if self.state == "finished" or self.unfinished or not 0 <= step < self.step or step not in kept:
            return False
        del self.chain[step + 1 :]
        self.lineage += 1
        return True
