"""`artctl completion SHELL`: a script for bash, zsh or fish that completes verbs, options, and names of runs, jobs, steps and logs.

The script asks `artctl completion --words ...` at each TAB, so it never gets old. Asking opens the database read-only, and says nothing
where there is none.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from artd.cli import daemon_probe, read
from artd.cli.outcome import OK, USAGE, CliError, command_parser, shared_options
from artd.cli.verbs import all_verbs, chosen_verb
from artd_schema.paths import LOGS

NEWEST = 50
_HARMLESS = re.compile(r"[\w@%+=:,./-]+")
"""What a shell takes as one plain word: a group may have any name, and a completed word is typed for the user."""
SCRIPTS = {
    "bash": """_artd_complete() {
  mapfile -t COMPREPLY < <("$1" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _artd_complete artctl artd
""",
    "zsh": """#compdef artctl artd
_artd_complete() {
  local -a found
  found=("${(@f)$("${words[1]}" completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  compadd -a found || _files
}
compdef _artd_complete artctl artd
""",
    "fish": """for name in artctl artd
  complete -c $name -f -a '(set -l w (commandline -opc) (commandline -ct); $w[1] completion --words $w[2..-1] 2>/dev/null)'
end
""",
}
HOW = """artctl completion bash >> ~/.bashrc; artctl completion zsh > "${fpath[1]}/_artctl"; artctl completion fish >
~/.config/fish/completions/artctl.fish"""


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "completion", help="a script that completes words in a shell", parents=[shared_options()], epilog=HOW
    )
    parser.add_argument("shell", metavar="SHELL", nargs="?", choices=tuple(SCRIPTS), help="bash, zsh or fish")
    parser.add_argument("--words", nargs=argparse.REMAINDER, help="print what the last of these words may become")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.words is not None:
        print("\n".join(candidates(args.words or [""])))
        return OK
    if args.shell is None:
        raise CliError(USAGE, "which shell? There is bash, zsh and fish", "artctl completion bash")
    print(SCRIPTS[args.shell], end="")
    return OK


def candidates(words: list[str]) -> list[str]:
    """Return what the last word may become, after the words before it."""
    *before, last = words
    verb = chosen_verb(before)
    if not verb:
        return [each for each in (*all_verbs(), "help") if each.startswith(last)]
    parser = command_parser("artctl", "", "", verb)
    [sub] = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    actions = sub.choices[verb]._actions
    taken = next((each for each in actions if before and before[-1] in each.option_strings and each.nargs != 0), None)
    if taken is None and last.startswith("-"):
        found = [name for each in actions for name in each.option_strings if name.startswith("--")]
    else:
        positional = [each for each in actions if not each.option_strings]
        at = _position(before[before.index(verb) + 1 :], actions)
        action = taken or (positional[min(at, len(positional) - 1)] if positional else None)
        found = list(_values(action, before)) if action is not None else []
    return [each for each in found if each.startswith(last) and _HARMLESS.fullmatch(each)]


def _position(words: list[str], actions: list[argparse.Action]) -> int:
    """Return how many positional words stand among `words`."""
    with_value = {name for each in actions if each.nargs != 0 for name in each.option_strings}
    count, skip = 0, False
    for word in words:
        if skip or word.startswith("-"):
            skip = not skip and word in with_value
        else:
            count += 1
    return count


def _values(action: argparse.Action, words: list[str]) -> Iterator[str]:
    """Yield what an argument may be: its choices, or names of the database by its metavar."""
    if action.choices:
        yield from map(str, action.choices)
        return
    asks = _ASKED.get(str(action.metavar))
    if asks is None:
        return
    known = {name: words[words.index(name) + 1] for name in ("--data-dir", "--config") if name in words[:-1]}
    args = argparse.Namespace(data_dir=known.get("--data-dir"), config=known.get("--config"))
    with suppress(CliError):  # a TAB complains of nothing
        data = daemon_probe.data_dir(args)
        yield from asks(data)


def _of_database(ask: Callable[[read.Database], list[str]]) -> Callable[[Path], list[str]]:
    def ask_and_close(data: Path) -> list[str]:
        database = read.Database(data)
        try:
            return ask(database)
        finally:
            database.close()

    return ask_and_close


def _ids(what: str) -> Callable[[Path], list[str]]:
    return _of_database(lambda database: [str(row["id"]) for row in database.page(what, limit=NEWEST)])


def _steps(database: read.Database) -> list[str]:
    rows = database.page("checkpoints", states=("committed",), limit=NEWEST)
    return database.run_names() + [f"{row['run']}@{row['step']}" for row in rows]


def _logs(data: Path) -> list[str]:
    return sorted(path.stem for path in (data / LOGS).glob("*.log"))


_ASKED: dict[str, Callable[[Path], list[str]]] = {
    "RUN": _of_database(lambda database: database.run_names()),
    "RUN@STEP": _of_database(_steps),
    "[RUN][@STEP]": _of_database(_steps),
    "[RUN@]STEP": _of_database(_steps),
    "JOB": _ids("jobs"),
    "TRAJECTORY": _ids("trajectories"),
    "GROUP": _of_database(lambda database: [row["name"] for row in database.page("groups", limit=NEWEST)]),
    "NAME": _logs,
}
"""By the metavar of an argument: what it may be."""
