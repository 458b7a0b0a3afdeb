"""The request and the answer of a scoring process: a folder with `request.json`, `sequences.safetensors`,
`scores.safetensors`.

The command line writes the first two, `python -m artd_workers.trainer.tools.score FOLDER` the last. Tensors are
little-endian, in the order of the sequences. N sequences have T tokens together, of which M are scored: each sequence's
tokens from its `prompts` on. Temperature 1, natural logarithms.

sequences: `tokens` I32 [T]; `lengths` I32 [N], summing to T; `prompts` I32 [N], 1 <= prompt < length; `candidates` I32
[M, K], ids that are scored besides the token itself; with `ScoreRequest.routes` also `routes` U8 or U16 [T, layers,
topk], where the row of a sequence's last token is ignored, because that token is never an input.

scores: for each pass P, `P.logprobs` F32 [M], `P.candidates` F32 [M, K], `P.top_ids` I32 [M, K] (best first) and
`P.top_logprobs` F32 [M, K].
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from artd_schema.data.trajectory import RouteShape
from artd_schema.packages import PackageCode
from artd_schema.run.spec import RunSpec

from .worker import CheckpointRef

REQUEST, SEQUENCES, SCORES = "request.json", "sequences.safetensors", "scores.safetensors"
Pass = Literal["live", "replay"]
LIVE: Pass = "live"
"""The trainer's own routers choose the experts (there is nothing to choose in a dense model)."""
REPLAY: Pass = "replay"
"""Every token goes through the experts that `routes` names."""


class ScoreRequest(Struct, frozen=True, kw_only=True):
    """What to score, and with which weights.

    `spec` is the run's: it names the base model, what is trained, and threads. `checkpoint` has the weights, None =
    those of step 0. `routes` is the shape of the tensor `routes`; with None there is none, and only `live` is scored.
    `family` is the package's code that plans the model, None = artd's own.
    """

    spec: RunSpec
    checkpoint: CheckpointRef | None = None
    routes: RouteShape | None = None
    family: PackageCode | None = None
