"""The rules that a trajectory's routes keep, and how a token's routes come to be stored once.

Owner of: nothing; pure. Invariants: in whatever passes for training, the experts of every token of a sequence are told by
the turn that ran it first, but for its last token, which was never an input; a turn belongs to the sequence before it
when its prompt repeats that sequence exactly, as in packing. The path `turns[1].routes[7]` is token 7 of the turn's prompt
and sampled tokens, wherever its rows begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from artd_schema import routes
from artd_schema.trajectory import RouteShape, Turn

from .fields import InvalidField

REMEDY = (
    "expert replay trains a token only through the experts that the engine chose for it: submit responses of artd's "
    "gateway by reference, or give each turn its routes (artd_client.turn), or make the run with expert_replay=false"
)


def refuse_routes(path: str) -> InvalidField:
    """What is said of routes given to a run that does not replay them."""
    return InvalidField(
        path,
        "this run replays no experts (its model is dense, or it was made with expert_replay=false): leave routes out",
    )


def check_turn_routes(turns: Sequence[Turn], shape: RouteShape, trained: bool) -> None:
    """Check the routes of a trajectory's turns; trained: none may be missing. Errors: InvalidField."""
    for index, turn, covered in _sequences(turns, shape):
        path = f"turns[{index}]"
        if turn.routes:
            _rows(turn, path, shape)
        if trained:
            _no_gap(turn, path, covered)


def trim_routes(turns: Sequence[Turn], shape: RouteShape) -> list[Turn]:
    """Checked turns without the rows that an earlier turn of the same sequence holds: the first capture wins."""
    return [_from(turn, covered, shape) for _, turn, covered in _sequences(turns, shape)]


def _sequences(turns: Sequence[Turn], shape: RouteShape) -> Iterator[tuple[int, Turn, int]]:
    """Every turn with its number, and how many tokens of its sequence the turns before it have routes for."""
    sequence, covered = b"", 0
    for index, turn in enumerate(turns):
        if not turn.prompt_ids.startswith(sequence):
            covered = 0
        yield index, turn, covered
        if turn.routes and turn.routes_start <= covered:
            covered = max(covered, turn.routes_start + len(turn.routes) // shape.row_bytes)
        sequence = turn.prompt_ids + turn.token_ids


def _rows(turn: Turn, path: str, shape: RouteShape) -> None:
    start, tokens = turn.routes_start, _tokens(turn)
    if start < 0:
        raise InvalidField(f"{path}.routes_start", f"is {start}: must be 0 or more")
    if told := _other_form(len(turn.routes), (tokens - start, tokens - start - 1), shape):
        raise InvalidField(f"{path}.routes", told)
    try:
        rows = routes.check_routes(turn.routes, shape)
    except routes.BadRoutes as error:
        where = "" if len(turn.routes) % shape.row_bytes else f"[{start + error.row}]"
        raise InvalidField(f"{path}.routes{where}", str(error)) from None
    if start + rows not in (tokens, tokens - 1):
        raise InvalidField(
            f"{path}.routes",
            f"has {rows} rows from token {start} of {tokens}: the rows must reach to the last token, or end one before it",
        )


def _other_form(size: int, wanted: Sequence[int], shape: RouteShape) -> str:
    """What routes of `size` bytes are that have as many rows as they should, but not of this shape; "" when they are, or when
    nobody can tell. wanted: numbers of rows that would do."""
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


def _no_gap(turn: Turn, path: str, covered: int) -> None:
    if covered >= _tokens(turn) - 1 or (turn.routes and turn.routes_start <= covered):
        return
    why = f"this turn's begin at token {turn.routes_start}" if turn.routes else "this turn has none"
    raise InvalidField(f"{path}.routes[{covered}]", f"no routes for this token of the turn: {why}; {REMEDY}")


def _from(turn: Turn, covered: int, shape: RouteShape) -> Turn:
    known = min(covered - turn.routes_start, len(turn.routes) // shape.row_bytes)
    if known <= 0:
        return turn
    left = turn.routes[known * shape.row_bytes :]
    return msgspec.structs.replace(turn, routes=left, routes_start=turn.routes_start + known if left else 0)


def _tokens(turn: Turn) -> int:
    """Prompt and sampled tokens."""
    return (len(turn.prompt_ids) + len(turn.token_ids)) // 4
