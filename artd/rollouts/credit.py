"""Adds the advantages and weights that a program gives for each token, and checks which kind of trajectory a run
trains. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from artd.core.fields import InvalidField
from artd_schema.data.trajectory import Credit, Given, Turn
from artd_schema.run.losses import EXAMPLES
from artd_schema.run.spec import RunSpec


def add_credits(turns: Sequence[Turn], credits: Sequence[Credit]) -> list[Turn]:
    """Return the turns with the given advantages and weights. Raises InvalidField."""
    if len(credits) != len(turns):
        raise InvalidField("credits", f"{len(credits)} for {len(turns)} turns: give one for each turn")
    return [
        _add(turn, credit, f"credits[{index}]") for index, (turn, credit) in enumerate(zip(turns, credits, strict=True))
    ]


def _add(turn: Turn, credit: Credit, where: str) -> Turn:
    count = len(turn.token_ids) // 4
    columns = {name: _column(getattr(credit, name), count, f"{where}.{name}") for name in ("advantages", "weights")}
    given = msgspec.structs.replace(
        turn.given or Given(), **{name: column for name, column in columns.items() if column}
    )
    return turn if given == Given() else msgspec.structs.replace(turn, given=given)


def _column(values: Sequence[float], count: int, where: str) -> bytes:
    if len(values) not in (0, 1, count):
        raise InvalidField(where, f"{len(values)} values for {count} sampled tokens: give one for each, or one for all")
    try:
        return array("f", list(values) * count if len(values) == 1 else values).tobytes()
    except OverflowError as error:
        raise InvalidField(where, str(error)) from None


def check_kind(spec: RunSpec, turns: Sequence[Turn], split: str) -> None:
    """Check that the run trains this kind of trajectory: only examples or only rollouts, with given advantages or
    without. Raises InvalidField."""
    if split != "train":
        return
    examples, wanted = {turn.example for turn in turns}, spec.loss.kind == EXAMPLES
    if examples != {wanted}:
        raise InvalidField(
            "turns",
            "this run trains on examples (loss.kind='sft'): use run.submit_example, or split='eval'"
            if wanted
            else f"this run trains on rollouts (loss.kind={spec.loss.kind!r}), not on examples: make a run with loss.kind='sft'",
        )
    given = spec.advantages.baseline == "given" if spec.advantages else False
    for index, turn in enumerate(turns):
        if bool(turn.advantages) != (given and bool(turn.token_ids)):
            raise InvalidField(
                f"turns[{index}].advantages",
                "this run takes each token's advantage from its program (advantages.baseline='given'): give advantages"
                if given
                else "this run makes advantages from rewards: leave them out, or make a run with advantages={'baseline': 'given'}",
            )
