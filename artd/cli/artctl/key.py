"""`artctl key`: manages the keys in DATA/keys of clients that connect from other machines.

It works with the daemon up or down; a change counts from the next connection on. Exit codes: 0, 1 failed, 5 no such key, 6 the
folder is not artd's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from artd.cli import daemon_probe, show
from artd.cli.outcome import CONFLICT, FAILED, NOT_FOUND, OK, CliError, shared_options

if TYPE_CHECKING:
    from artd.net.keys import Keys


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("key", help="keys of clients on other machines (remote.bind)", parents=[shared_options()])
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    add = verbs.add_parser("add", help="allow a client", parents=[shared_options()])
    add.add_argument("name", metavar="NAME", help="what you call the client")
    add.add_argument("--public", metavar="KEY", help="its public key, if it has a pair already; else a pair is made")
    add.add_argument("--out", metavar="FILE", type=Path, help="where the new pair goes (default: NAME.key_secret)")
    remove = verbs.add_parser("remove", help="refuse a client from now on", parents=[shared_options()])
    remove.add_argument("name", metavar="NAME", help="one of `artctl key list`")
    listing = verbs.add_parser("list", help="clients that may connect", parents=[shared_options()])
    listing.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    verbs.add_parser("server", help="the daemon's own public key", parents=[shared_options()])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from artd.datadir import folder
    from artd.net.keys import BadKey, Keys, NoKey

    data = daemon_probe.data_dir(args)
    keys = Keys(data)
    try:
        folder.take(data)  # before the first start, too
        if args.what == "add":
            _add(keys, args)
        elif args.what == "remove":
            keys.remove(args.name)
            print(f"{args.name} cannot connect any more; a connection that it has stays until it closes")
        elif args.what == "server":
            print(keys.server()[0])
        elif args.json:
            rows = [{"name": name, "public": public} for name, public in keys.clients().items()]
            show.document("key", data, server=keys.server()[0], clients=rows)
        else:
            for name, public in keys.clients().items():
                print(f"{name}\t{public}")
            if not keys.clients():
                print("no client of another machine is allowed yet: artctl key add NAME", file=sys.stderr)
    except NoKey as error:
        raise CliError(NOT_FOUND, str(error), f"artctl key list{daemon_probe.data_dir_option(data)}") from None
    except folder.Refused as error:
        raise CliError(CONFLICT, str(error), error.next) from None
    except (BadKey, OSError) as error:
        raise CliError(FAILED, str(error)) from None
    return OK


def _add(keys: Keys, args: argparse.Namespace) -> None:
    if args.public:
        keys.allow(args.name, args.public)
        print(f"{args.name} may connect; the daemon's public key: {keys.server()[0]}")
        return
    out = (args.out or Path(f"{args.name}.key_secret")).absolute()
    keys.create(args.name, out)
    print(
        f"{args.name} may connect with {out}: give it to that client alone; the daemon's public key: {keys.server()[0]}"
    )
