"""`/metrics`: the state of a data folder in the text format of Prometheus, read anew for each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from artd import __version__
from artd.cli import read
from artd.cli.artctl.metrics import LAST, STEPS
from artd.cli.artctl.top import measure
from artd.cli.status.snapshot import Snapshot, take
from artd.supervise.guardian import all_stats, descendants

TYPE = CONTENT_TYPE_LATEST
NEWEST_EVENT = "SELECT coalesce(max(id), 0) AS id FROM event"


class Collector:
    """Turns a snapshot into families of metrics. Names and labels: docs/dashboard.md."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def collect(self) -> Iterator[Metric]:
        """Yield every family. A folder without a database has only those of the daemon."""
        shot = take(self._data)
        yield from _of_daemon(shot)
        if not shot.database:
            return
        yield from _of_workers(shot)
        database = read.Database(self._data)
        try:
            yield CounterMetricFamily("artd_events", "Events written", value=database.rows(NEWEST_EVENT)[0]["id"])
            yield from _of_runs(shot, database)
        finally:
            database.close()


def render(data: Path) -> bytes:
    """Return the whole page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(data))
    return generate_latest(registry)


def _of_daemon(shot: Snapshot) -> Iterator[Metric]:
    up = GaugeMetricFamily("artd_up", "1 while a daemon runs on the folder", labels=["version"])
    up.add_metric([shot.daemon.file.version if shot.daemon.file else __version__], float(shot.daemon.running))
    yield up
    yield GaugeMetricFamily("artd_healthy", "1 while the daemon runs without a problem", value=shot.health == "ok")
    yield GaugeMetricFamily("artd_problems", "Problems that need somebody", value=len(shot.problems))
    yield GaugeMetricFamily("artd_disk_free_bytes", "Free space of the data folder", value=shot.disk_free)


def _of_workers(shot: Snapshot) -> Iterator[Metric]:
    labels = ["worker", "kind", "run"]
    alive = GaugeMetricFamily("artd_worker_up", "1 while the worker's process lives", labels=labels)
    restarts = CounterMetricFamily("artd_worker_restarts", "Restarts of the worker", labels=labels)
    memory = GaugeMetricFamily("artd_worker_resident_bytes", "Memory of the worker and its children", labels=labels)
    stats = list(all_stats())
    for worker in shot.workers:
        values = [worker["name"], worker["kind"], worker["run"] or ""]
        alive.add_metric(values, float(worker["alive"]))
        restarts.add_metric(values, worker["restarts"])
        if worker["alive"]:
            kin = [worker["pid"], *(one.pid for one in descendants([worker["pid"]], stats))]
            memory.add_metric(values, measure(kin).rss)
    yield from (alive, restarts, memory)


def _of_runs(shot: Snapshot, database: read.Database) -> Iterator[Metric]:
    step = GaugeMetricFamily("artd_run_step", "Newest committed step", labels=["run"])
    served = GaugeMetricFamily("artd_run_served_step", "Newest step that an engine serves, -1: none", labels=["run"])
    state = GaugeMetricFamily("artd_run_state", "1 for the state that the run is in", labels=["run", "state"])
    measured = GaugeMetricFamily("artd_step_metric", "Metrics of the newest step", labels=["run", "name"])
    seconds = GaugeMetricFamily("artd_step_seconds", "Durations of the newest step", labels=["run", "phase"])
    for run in shot.runs or ([shot.run] if shot.run else []):
        name = run["name"]
        step.add_metric([name], run["step"])
        served.add_metric([name], run["served"])
        state.add_metric([name, run["state"]], 1)
        for row in database.rows(STEPS, run=name, first=0, last=LAST, limit=1):
            for metric, value in row["metrics"].items():
                measured.add_metric([name, metric], value)
            for phase, value in row["seconds"].items():
                seconds.add_metric([name, phase], value)
    yield from (step, served, state, measured, seconds)
    yield from _of_counts(shot)


def _of_counts(shot: Snapshot) -> Iterator[Metric]:
    name = shot.run["name"] if shot.run else ""
    groups = GaugeMetricFamily("artd_groups", "Groups by state", labels=["run", "split", "state"])
    inside = GaugeMetricFamily(
        "artd_trajectories", "Trajectories by their group's state", labels=["run", "split", "state"]
    )
    jobs = GaugeMetricFamily("artd_jobs", "Jobs by state", labels=["run", "state"])
    for split, states in shot.groups.items():
        for one, counted in states.items():
            groups.add_metric([name, split, one], counted["groups"])
            inside.add_metric([name, split, one], counted["trajectories"])
    for one, count in shot.jobs.items():
        jobs.add_metric([name, one], count)
    yield from (groups, inside, jobs)
