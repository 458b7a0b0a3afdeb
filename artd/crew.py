"""What the workers of one run are started with: its base model, its engines, the code of packages, an interpreter for each kind."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from artd.core.fleet import engines_of, share_of
from artd.models.base_model import PinnedBase
from artd.runtimes import registry
from artd.store.store import Store
from artd.store.views import stored_spec
from artd.supervise.packages import Packages
from artd.training.run_code import tell_changes
from artd_schema.data.base import BaseModel
from artd_schema.packages import RunCode
from artd_schema.run.engines import UnknownEngine, engine_kind
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import WorkerId, trainer_name

from . import config

TRAINER_RUNTIME = "megatron"


@dataclass(frozen=True)
class Crew:
    """The workers of a run. `workers` are their names, `engine` is the kind of the run's engines, `replicas` their number."""

    workers: tuple[str, ...]
    base: PinnedBase
    engine: str
    code: RunCode
    replicas: int = 1


async def load_crew(store: Store, root: Path, packages: Packages, run: int) -> Crew:
    """Return the crew of a run whose spec can be read. Report it if the run continues with other code than before.
    `root` is the data folder."""
    (row,) = await store.read("SELECT name, spec, base_manifest FROM run WHERE id = ?", (run,))
    spec = stored_spec(row)
    pinned = msgspec.json.decode(row["base_manifest"], type=BaseModel)
    code = packages.of_run(spec.loss.kind, pinned.architecture)
    await tell_changes(store, root, run, code)
    names = (trainer_name(run), *engines_of(run, spec))
    return Crew(names, PinnedBase(spec.model, pinned), spec.engine.kind, code, spec.engine.replicas)


def find_interpreter(settings: config.Runtimes, kind: w.WorkerKind, engine: str) -> tuple[str, list[str]]:
    """Return the Python of a worker and the folders for its PYTHONPATH. `engine` is the kind of the run's engines, whatever the worker.
    Raises RuntimeMissing."""
    if kind == "gateway":
        return sys.executable, []
    own: config.Interpreter = getattr(settings, kind)
    if own.python:
        return own.python, list(own.pythonpath)
    found = registry.find(TRAINER_RUNTIME if kind == "trainer" else _runtime_of(engine))
    return str(found.python), [*found.site_paths, *own.pythonpath]


def visible_gpus(gpus: config.Gpus, worker: WorkerId, crew: Crew | None) -> dict[str, str]:
    """Return the CUDA_VISIBLE_DEVICES of a worker where the settings name GPUs for its kind. The engines of a run divide theirs."""
    chosen: tuple[int, ...] = getattr(gpus, worker.kind, ())
    if worker.kind == "engine":
        chosen = share_of(chosen, worker.replica, crew.replicas if crew else 1)
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, chosen))} if chosen else {}


def _runtime_of(engine: str) -> str:
    """Return the runtime of an engine's kind. Raises RuntimeMissing for the run of another artd, whose engines this one does not have."""
    try:
        return engine_kind(engine).runtime
    except UnknownEngine as error:
        raise registry.RuntimeMissing(str(error)) from None
