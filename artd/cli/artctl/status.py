"""`artctl status`: says whether artd is healthy, what it is doing and what to do next, then shows the parts.

Exit codes: 0 healthy, 3 the daemon does not run, 4 something needs an operator.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from artd import __version__
from artd.cli import daemon_probe, show, terminal
from artd.cli.outcome import DEGRADED, NOT_RUNNING, OK, USAGE, CliError, seconds, shared_options
from artd.cli.show import paint
from artd.cli.status.problems import advice
from artd.cli.status.snapshot import Snapshot, content, doing, take
from artd.cli.watch import cut_lines, watch
from artd_schema.run.spec_defaults import spec_value

_CODES = {"ok": OK, "degraded": DEGRADED, "down": NOT_RUNNING}
_DOTS = {"ok": ("●", "green"), "degraded": ("●", "yellow"), "down": ("○", "red")}


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("status", help="health, what is going on, what to do next", parents=[shared_options()])
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.add_argument(
        "-w",
        "--watch",
        type=seconds,
        nargs="?",
        const=2.0,
        metavar="S",
        help="show it again every S seconds (default 2)",
    )
    terminal.wide_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    if args.watch and args.json:
        raise CliError(USAGE, "--watch and --json exclude each other", "artctl events -f --json")
    if args.watch:
        watch(lambda: lines(take(data)), args.watch)
    shot = take(data)
    if args.json:
        show.document("status", shot.data, **content(shot))
    else:
        print("\n".join(cut_lines(lines(shot))))
    return _CODES[shot.health]


def lines(shot: Snapshot) -> Iterator[str]:
    """Yield the lines for a person; the first three are the whole answer."""
    yield _head(shot)
    yield _row("doing", doing(shot))
    yield _row("next", advice(shot))
    for problem in shot.problems if shot.daemon.running else ():
        yield _row("problem", paint(show.one_line(problem.what, 160), "yellow"))
    for warning in shot.warnings:
        yield _row("warning", warning.brief)
    if shot.run:
        yield _row("run", _run(shot))
        yield _row("flow", _flow(shot))
        yield _row("jobs", _jobs(shot))
    for number, text in enumerate(_workers(shot)):
        yield _row("" if number else "workers", text)
    for number, event in enumerate(shot.events[:3]):
        yield _row("" if number else "last", f"{show.clock(event['at'])}  {event_text(event)}")


def _row(title: str, text: str) -> str:
    return f"  {paint(title.ljust(8), 'dim')} {text}"


def _head(shot: Snapshot) -> str:
    dot, colour = _DOTS[shot.health]
    told = shot.daemon.file
    if not shot.daemon.running:
        was = f" (pid {told.pid} is gone{'' if shot.clean else ', not stopped cleanly'})" if told else ""
        return f"{paint(dot, colour)} artd {__version__}  not running{was}   {shot.data}   start: {advice(shot)}"
    since = f" {show.span(show.now_ms() - told.started)}" if told and told.started else ""
    verdict = {"ok": "healthy", "degraded": "degraded"}[shot.health]
    state = "running" if shot.daemon.state == "ready" else shot.daemon.state
    pid = f"   pid {told.pid}" if told else ""
    version = told.version if told else __version__
    return f"{paint(dot, colour)} artd {version}  {paint(verdict, colour)}, {state}{since}   {shot.data}{pid}"


def _run(shot: Snapshot) -> str:
    run = shot.run
    assert run is not None
    parts = [f"{paint(run['name'], 'bold')}  {show.state(run['state'])}"]
    if run["reason"]:
        parts[0] += f" ({show.one_line(run['reason'], 80)})"
    parts.append(f"step {run['step']}" if run["step"] >= 0 else "no step yet")
    if shot.daemon.running:
        parts.append(_serving(run))
    parts.append(spec_value(run["spec"], "rollout_weights_mode"))
    return "   ".join(parts)


def _serving(run: show.Row) -> str:
    if run["served"] < 0:
        return "serving nothing"
    by = f" by {run['serving']} of {run['engines']} engines" if run["engines"] > 1 else ""
    return f"serving @{run['served']}{by}  lag {run['step'] - run['served']}"


def _flow(shot: Snapshot) -> str:
    train, held = shot.groups["train"], shot.groups["eval"]
    parts = [f"{n['groups']} {state} ({n['trajectories']})" for state, n in train.items()]
    if evaluated := sum(n["trajectories"] for n in held.values()):
        parts.append(f"{evaluated} eval trajectories")
    if open_ones := shot.rollouts["open"]:
        parts.append(f"{open_ones} open rollouts")
    if expired := shot.rollouts["expired"]:
        parts.append(f"{expired} rollouts expired, which nobody submitted")
    return "groups (trajectories): " + " · ".join(parts)


def _jobs(shot: Snapshot) -> str:
    jobs = shot.jobs
    parts = [f"{jobs[s]} {s}" for s in ("running", "queued", "retrying", "quarantined", "succeeded")]
    hint = (
        f"  ← artctl jobs --state quarantined{daemon_probe.data_dir_option(shot.data)}" if jobs["quarantined"] else ""
    )
    return " · ".join(parts) + hint


def _workers(shot: Snapshot) -> Iterator[str]:
    labels = [show.worker_label(worker, shot.run) for worker in shot.workers]
    width = max(map(len, labels), default=0)
    for worker, label in zip(shot.workers, labels, strict=True):
        state, name = worker["state"], label.ljust(width)
        if not shot.daemon.running:
            was = "stopped" if state == "stopped" else f"was {state}, gone"
            yield f"{name}  was {state}, still alive (pid {worker['pid']})" if worker["alive"] else f"{name}  {was}"
            continue
        parts = [
            f"{name}  {show.state(state, 8)}",
            f"for {show.span(show.now_ms() - worker['since'])}",
            f"restarts {worker['restarts']}",
        ]
        if worker["serving"]:
            parts.append("serving " + ", ".join(worker["serving"]))
        job = next((j for j in shot.active if j["worker"] == worker["name"] and j["state"] == "running"), None)
        if job:
            parts.append(f"job {job['id']} fence {job['fence']}")
        if worker["kind"] == "gateway" and shot.daemon.file and shot.daemon.file.url:
            parts.append(shot.daemon.file.url)
        yield "   ".join(parts)


def event_text(event: show.Row) -> str:
    """Return an event as one line: `step.committed my-run 3 loss=0.12 reward_mean=0.4`. Nested data gives only well-known
    numbers."""
    told = [event["run"], event["ref"]] if event["run"] != event["ref"] else [event["ref"]]
    parts = [event["kind"], *(word for word in told if word)]
    for key, value in event["data"].items():
        if isinstance(value, dict):
            parts += [f"{name}={value[name]:.4g}" for name in _NUMBERS if isinstance(value.get(name), float)]
        elif value not in ("", None):
            parts.append(f"{key}={_short(key, value)}")
    return show.one_line("  ".join(parts), 150)


_NUMBERS = ("loss", "reward_mean", "train", "verify", "transfer", "load")


def _short(key: str, value: object) -> str:
    if key == "sha":
        return str(value)[:12]
    return f"{value:.4g}" if isinstance(value, float) else show.one_line(str(value), 60)
