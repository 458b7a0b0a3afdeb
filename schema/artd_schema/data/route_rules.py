"""The rule book's part on routes: which tokens a turn's rows belong to, and how each token's routes are stored once.

Pure. In a trajectory that passes for training, every token of a sequence has routes from the first turn that computed
it, except the sequence's last token, which was never an input. A turn belongs to the sequence before it if its prompt
repeats that sequence exactly. In the path `turns[1].routes[7]`, 7 counts the turn's prompt and sampled tokens, wherever
its rows begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from .findings import Finding
from .routes import BadRoutes, check_routes, count_rows
from .trajectory import RouteShape, Turn

REMEDY = (
    "expert replay trains a token only through the experts that the engine chose for it: submit responses of artd's "
    "gateway by reference, or give each turn its routes (artd_client.turn), or make the run with expert_replay=false"
)


def refused_routes(turn: Turn) -> Finding | None:
    """Return a finding if a turn has routes, for runs that do not replay them."""
    if not turn.routes:
        return None
    what = "this run replays no experts (its model is dense, or it was made with expert_replay=false): leave routes out"
    return Finding("routes", what)


def routes_finding(turns: Sequence[Turn], shape: RouteShape, trained: bool) -> Finding | None:
    """Return what is wrong with the routes of a trajectory's turns. With `trained` no routes may be missing."""
    for index, turn, covered in _sequences(turns, shape):
        found = (_form(turn, shape) or place_finding(turn, shape) or _ids(turn, shape)) if turn.routes else None
        if trained:
            found = found or gap_finding(turn, covered, REMEDY)
        if found:
            return found.under(f"turns[{index}]")
    return None


def trim_routes(turns: Sequence[Turn], shape: RouteShape) -> list[Turn]:
    """Return checked turns without the rows that an earlier turn of the same sequence has: the first capture wins."""
    return [_from(turn, covered, shape) for _, turn, covered in _sequences(turns, shape)]


def goes_on(turn: Turn, sequence: bytes) -> bool:
    """Return whether a turn continues the sequence (int32 ids) of the turns before it."""
    return turn.prompt_ids.startswith(sequence)


def _sequences(turns: Sequence[Turn], shape: RouteShape) -> Iterator[tuple[int, Turn, int]]:
    """Yield every turn with its index, and the number of its sequence's tokens for which earlier turns have routes."""
    sequence, covered = b"", 0
    for index, turn in enumerate(turns):
        if not goes_on(turn, sequence):
            covered = 0
        yield index, turn, covered
        if turn.routes and turn.routes_start <= covered:
            covered = max(covered, turn.routes_start + len(turn.routes) // shape.row_bytes)
        sequence = turn.prompt_ids + turn.token_ids


# ---- the rules of one turn; paths begin at the turn ------------------------------------------------------------------


def place_fault(rows: int, start: int, tokens: int) -> str:
    """Return what is wrong with a turn's `rows` rows that begin at token `start`, if the turn has `tokens` prompt and
    sampled tokens; "" if nothing is."""
    if start >= 0 and start + rows in (tokens, tokens - 1):
        return ""
    return f"{rows} rows from token {start} of {tokens}: the rows must reach to the last token, or end one before it"


def place_finding(turn: Turn, shape: RouteShape) -> Finding | None:
    """Return what is wrong with the number of a turn's rows, or with the token at which they start."""
    if turn.routes_start < 0:
        return Finding("routes_start", f"is {turn.routes_start}: must be 0 or more")
    try:
        rows = count_rows(turn.routes, shape)
    except BadRoutes as error:
        return Finding("routes", str(error))
    fault = place_fault(rows, turn.routes_start, _tokens(turn))
    return Finding("routes", f"has {fault}") if fault else None


def gap_finding(turn: Turn, covered: int, remedy: str) -> Finding | None:
    """Return a finding for the first token of a turn without routes. `covered` is the number of its sequence's tokens
    for which earlier turns have routes."""
    if covered >= _tokens(turn) - 1 or (turn.routes and turn.routes_start <= covered):
        return None
    why = f"this turn's begin at token {turn.routes_start}" if turn.routes else "this turn has none"
    return Finding(f"routes[{covered}]", f"no routes for this token of the turn: {why}; {remedy}")


def _ids(turn: Turn, shape: RouteShape) -> Finding | None:
    try:
        check_routes(turn.routes, shape)
    except BadRoutes as error:
        return Finding(f"routes[{turn.routes_start + error.row}]", str(error))
    return None


def _form(turn: Turn, shape: RouteShape) -> Finding | None:
    left = _tokens(turn) - turn.routes_start
    what = _other_form(len(turn.routes), (left, left - 1), shape) if turn.routes_start >= 0 else ""
    return Finding("routes", what) if what else None


def _other_form(size: int, wanted: Sequence[int], shape: RouteShape) -> str:
    """Explain routes of `size` bytes that have the right number of rows but another shape; "" if there is no
    explanation. `wanted` has the right numbers of rows."""
    rows = [count for count in wanted if count > 0]
    if any(size == count * shape.row_bytes for count in rows):
        return ""
    if shape.width == 1 and any(size == 2 * count * shape.row_bytes for count in rows):
        return (
            f"has ids of two bytes each, which models of more than 256 experts have; this one has {shape.experts}: give "
            f"experts={shape.experts}"
        )
    each = shape.topk * shape.width
    if any(size % (count * each) == 0 and size > count * shape.row_bytes for count in rows):
        return f"has more layers than the {shape.layers} MoE layers of this model: leave out the layers without experts"
    return ""


def _from(turn: Turn, covered: int, shape: RouteShape) -> Turn:
    known = min(covered - turn.routes_start, len(turn.routes) // shape.row_bytes)
    if known <= 0:
        return turn
    left = turn.routes[known * shape.row_bytes :]
    return msgspec.structs.replace(turn, routes=left, routes_start=turn.routes_start + known if left else 0)


def _tokens(turn: Turn) -> int:
    """Return the number of prompt and sampled tokens."""
    return (len(turn.prompt_ids) + len(turn.token_ids)) // 4
