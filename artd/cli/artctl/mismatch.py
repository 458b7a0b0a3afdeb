"""`artctl mismatch RUN[@STEP]`: scores the same tokens with engine and trainer, with router replay and without.

Nothing of the probe is trained (`split` eval). The trainer scores with the fp32 weights of the committed checkpoint, whose
sha256 is checked. docs/metrics.md has the formulas. Exit codes: 0, 1 failed, 3 the daemon does not run, 5 no such run or
checkpoint, 6 the step is not served.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from artd.cli import daemon_probe, read, show
from artd.cli.outcome import FAILED, OK, USAGE, CliError, shared_options
from artd.cli.package_code import committed_code, copy_code
from artd_schema.codec import UNREADABLE, digest
from artd_schema.data.manifest import MANIFEST_FILE, CheckpointManifest
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.engines import engine_kind
from artd_schema.run.spec import RunSpec
from artd_schema.wire.score import ScoreRequest
from artd_schema.wire.worker import CheckpointRef

from . import export

if TYPE_CHECKING:
    from artd.cli.mismatch.metrics import Mismatch
    from artd.cli.mismatch.probe import Prompt, Sample

TOKENS, MAX_TOKENS, TOP = 4096, 64, 20
PASSES = {"replay": "replay on", "live": "replay off"}
"""Scoring pass -> heading of its column. A dense model has only the last pass."""
_ROUND = 64
"""About how many samples one round of requests gives."""


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "mismatch", help="how far trainer and engine disagree on fresh tokens", parents=[shared_options()]
    )
    parser.add_argument(
        "checkpoint", metavar="[RUN][@STEP]", nargs="?", default="",
        help="a step that is served; without STEP: the newest; without RUN: the run that is not finished",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help="sample at least so many (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help="tokens of one answer at most (default: %(default)s)",
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines, each a text or a list of token ids; "
                        "default: the checkpoint's canary prompts")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if min(args.tokens, args.max_tokens) < 1:
        raise CliError(USAGE, "--tokens and --max-tokens are at least 1", "artctl mismatch --help")
    data = daemon_probe.data_dir(args)
    database = read.Database(data)
    try:
        row, spec = export.find(database, args.checkpoint)
        about = database.rows(read.MODEL, run=row["run"])[0]
    finally:
        database.close()
    daemon_probe.need_running(data)
    routes = msgspec.json.decode(about["routes"], type=RouteShape) if about["routes"] else None
    prompts = _prompts(args.prompts) if args.prompts else _canary(data / row["dir"], row["sha"])
    try:
        floor = engine_kind(msgspec.convert(spec, RunSpec).engine.kind).floor
    except ValueError as error:  # msgspec's errors and UnknownEngine are ValueErrors
        raise CliError(
            FAILED, f"the spec of run {row['run']} cannot be read: {error}", "use the artd that made it"
        ) from None
    samples = _samples(args, data, f"{row['run']}@{row['step']}", prompts, routes, about["vocab_size"], floor)
    measured = _measure(args, data, row, spec, samples, routes)
    _show(args, data, row, samples, measured)
    return OK


def _canary(folder: Path, sha: str) -> list[Prompt]:
    """Return the canary prompts of a committed checkpoint. Raises CliError when its manifest is missing or not the committed
    one."""
    path = folder / MANIFEST_FILE
    try:
        raw = path.read_bytes()
        if digest(raw) != sha:
            raise CliError(FAILED, f"{path} is not the one that was committed", "probe another step")
        return [list(ids) for ids in msgspec.json.decode(raw, type=CheckpointManifest).canary.prompts]
    except (OSError, *UNREADABLE) as error:
        raise CliError(FAILED, f"{path} cannot be read: {error}", "probe another step") from None


def _prompts(path: Path) -> list[Prompt]:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        found = [msgspec.json.decode(line, type=str | list[int]) for line in lines]
    except (OSError, *UNREADABLE) as error:
        raise CliError(
            USAGE, f"{path}: {error}", 'one prompt a line, as JSON: "text" or [1, 2, 3], a list of token ids'
        ) from None
    if not found or not all(found):
        raise CliError(USAGE, f"{path} holds no prompt, or an empty one", "one prompt a line, as JSON")
    return found


def _samples(
    args: argparse.Namespace,
    data: Path,
    model: str,
    prompts: list[Prompt],
    routes: RouteShape | None,
    vocab: int,
    floor: float,
) -> list[Sample]:
    from artd.cli.mismatch import probe as mismatch_probe

    wanted = -(-args.tokens // (args.max_tokens * len(prompts)))
    plan = mismatch_probe.Plan(
        model=model, prompts=prompts, samples=min(wanted, max(1, _ROUND // len(prompts))), tokens=args.tokens,
        max_tokens=args.max_tokens, seed=args.seed, top=min(TOP, vocab - 1), routes=routes, floor=floor,
    )  # fmt: skip
    return mismatch_probe.generate(data, plan)


def _measure(
    args: argparse.Namespace, data: Path, row: read.Row, spec: dict[str, Any], samples: list[Sample],
    routes: RouteShape | None,
) -> dict[str, Mismatch]:  # fmt: skip
    """Score the samples with the trainer. Returns {scoring pass: its measures}. Raises CliError."""
    from artd.cli import in_trainer
    from artd.cli.mismatch import files

    ref = CheckpointRef(
        **{name: row[name] for name in ("run", "step", "epoch", "lineage", "sha")}, dir=str(data / row["dir"])
    )
    family = committed_code(data, row).family
    request = ScoreRequest(spec=msgspec.convert(spec, RunSpec), checkpoint=ref, routes=routes, family=family)
    with tempfile.TemporaryDirectory(prefix="artd-mismatch-") as name:
        files.write(Path(name), request, samples)
        code = [copy_code(data, family, Path(name))] if family else []
        in_trainer.call(
            data, getattr(args, "config", None), "artd_workers.trainer.tools.score", [name], "scoring", code
        )
        try:
            return files.compare_all(Path(name), samples)
        except ValueError as error:
            raise CliError(FAILED, f"the scores cannot be compared: {error}", "artctl logs trainer") from None


def _show(
    args: argparse.Namespace, data: Path, row: read.Row, samples: list[Sample], measured: dict[str, Mismatch]
) -> None:
    if args.json:
        passes = {name: msgspec.to_builtins(column) for name, column in measured.items()}
        about = {"run": row["run"], "step": row["step"], "epoch": row["epoch"], "sequences": len(samples)}
        show.document("mismatch", data, **about, passes=passes)
        return
    some = next(iter(measured.values()))
    print(f"{row['run']}@{row['step']}: {some.tokens} sampled tokens in {len(samples)} answers, temperature 1")
    headings = [PASSES[name] for name in PASSES if name in measured] if len(measured) > 1 else ["mismatch"]
    columns = [measured[name] for name in PASSES if name in measured]
    show.table(("", *headings), [(label, *(form(column) for column in columns)) for label, form in rows(some.top)])


def rows(top: int) -> list[tuple[str, Any]]:
    """Return (label, function that formats a Mismatch) of each line of the table."""
    return [
        ("MAE, nats", lambda m: f"{m.mae:.3e}"),
        ("max, nats", lambda m: f"{m.max:.3e}"),
        ("mean_abs_pct", lambda m: f"{m.mean_abs_pct:.3f} %"),
        ("top-1 agreement", lambda m: f"{m.top1:.4f}"),
        (f"top-{top} overlap", lambda m: f"{m.top_overlap:.4f}"),
        (f"top-{top} KL, nats", lambda m: f"{m.top_kl:.3e}"),
    ]
