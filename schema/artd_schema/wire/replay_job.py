"""The request of `artd replay-job` to the trainer's interpreter, and the answer: one JSON object each.

The request names committed things by sha256 only, so an answer without `error` is about exactly the bytes that the job read and
wrote.
"""

from __future__ import annotations

from msgspec import Struct

from .worker import CheckpointRef, Run
from .worker_config import TrainerConfig


class ReplayRequest(Struct, frozen=True, kw_only=True):
    """A job to be done again.

    `config`: of the trainer that did the job. `run`: the job as it was sent, except that `dir` is a scratch folder (absolute,
    not there yet). `committed`: the checkpoint that the job made.
    """

    config: TrainerConfig
    run: Run
    committed: CheckpointRef


class ReplayRow(Struct, frozen=True, kw_only=True):
    """One comparison.

    - `part`: `metrics`, `canary`, `batch`, `replay`, `manifest`, `files`, or the file of the checkpoint that contains
      it.
    - `committed`, `replayed`: the two values, their sha256 in hex or their 64-bit checksums (null: absent).
    - `equal`: whether they are equal bit for bit. null for a clock's reading, which no run repeats, and for a sha256
      beside a checksum, which cannot be
      compared.
    - `close`: whether they are equal, or within the tolerance that is allowed if the environments differ.
    - `difference`: |a - b| of two numbers; the largest |a - b| of logprobs; of tensors |a - b| in the 2-norm over the
      larger of |a| and |b|; of a file the
      largest of its tensors; null if there is nothing to subtract.
    """

    part: str
    name: str
    committed: str | int | float | None
    replayed: str | int | float | None
    equal: bool | None
    close: bool
    difference: float | None = None


class EnvironmentRow(Struct, frozen=True, kw_only=True):
    """A part of the environment in which the two runs differ. `name` is dotted, as in the manifest. "" = not recorded."""

    name: str
    committed: str
    replayed: str


class ReplayReport(Struct, frozen=True, kw_only=True):
    """The result of a replay. `environment` is empty if the bits must be equal. `threads` is torch's number of threads
    in the committed run. `seconds` is the time that the trainer worked. `error` says why there is nothing to compare
    (damaged files, a failed step), else it is ""."""

    rows: tuple[ReplayRow, ...] = ()
    environment: tuple[EnvironmentRow, ...] = ()
    threads: int = 0
    seconds: float = 0.0
    error: str = ""
