"""`python -m tests.daemon.mortal POINT --data-dir D --config C`: a daemon that kills itself at one point, with SIGKILL.

Points, by step: `publish:N` before a staged result is renamed, `commit:N` between the rename and COMMIT, `committed:N`
after COMMIT and before the trainer is told, `packed:N` before a packed batch is committed, `live:N` before a push is
said to be live, `recover` at boot, before anything is requeued. Everything else is the real daemon.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from artd import commit, config, daemon, push, recover
from artd.packing import service


def before(owner: Any, name: str, dies: Callable[..., bool]) -> None:
    """Kill this process when `owner.name` is called with arguments for which `dies`."""
    real = getattr(owner, name)

    def wrapped(*args: Any, **more: Any) -> Any:
        if dies(*args, **more):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, dies: Callable[..., bool]) -> None:
    """The same, but only once the call has returned."""
    real = getattr(owner, name)

    async def wrapped(*args: Any, **more: Any) -> Any:
        result = await real(*args, **more)
        if dies(result):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


def arm(point: str) -> None:
    name, _, number = point.partition(":")
    step = int(number or 0)
    if name == "publish":
        before(commit, "publish", lambda data, staged, manifest: manifest.step == step)
    elif name == "commit":
        before(commit, "commit", lambda c, now, data, relative, sha, manifest, *_: manifest.step == step)
    elif name == "committed":
        dispatch = daemon.Dispatch
        after(dispatch, "_finish", lambda answer: getattr(getattr(answer, "checkpoint", None), "step", None) == step)
    elif name == "packed":
        before(service.Packer, "_commit", lambda self, c, groups, result, manifest, *_: manifest.step == step)
    elif name == "live":
        before(push.Pusher, "_go_live", lambda self, c, message: self._sending.message.checkpoint.step == step)
    elif name == "recover":
        before(recover, "sweep", lambda *_: True)
    else:
        raise SystemExit(f"no point {point!r}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("point")
    parser.add_argument("--data-dir")
    parser.add_argument("--config")
    args = parser.parse_args()
    arm(args.point)
    return daemon.main(config.load(args.config, args.data_dir))


if __name__ == "__main__":
    sys.exit(main())
