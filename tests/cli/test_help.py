"""`--help` of every verb: what it is for, and a word on everything that it takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from artd.cli import ctl, main


def verbs(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and, below it, one for each verb."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from verbs(each)


ALL = [each for made in (main.parser(), ctl.parser()) for each in verbs(made)]


@pytest.mark.parametrize("parser", ALL, ids=lambda parser: parser.prog)
def test_everything_is_explained(parser: argparse.ArgumentParser) -> None:
    assert parser.description and parser.description[0].isupper()
    takes = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    assert not [action.dest for action in takes if not action.help]
    assert parser.format_help()
