"""Reads the daemon's settings: a flag overrides the environment, which overrides artd.toml, which overrides the default.

An unknown key is an error that names file and key. Paths in a file are relative to it. Every setting's default is here and
nowhere else.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from artd.supervise.environment import DROP
from artd_schema import paths

Level = Literal["debug", "info", "warning", "error"]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Lease = Annotated[float, Meta(ge=0.2)]
Days = Annotated[float, Meta(ge=0)]
Gib = Annotated[float, Meta(ge=0, le=1e9)]


class ConfigError(Exception):
    """The configuration cannot be used; the text names the place, the key and a right value."""


class Gateway(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address that rollout programs connect to. `port` 0 means any free one (`artctl status` and `run.base_url` show it).
    `beyond_loopback` allows a host that other machines reach, where the bearer token travels unencrypted."""

    host: str = "127.0.0.1"
    port: Port = 0
    beyond_loopback: bool = False


class Remote(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address for clients on other machines. `bind` is a TCP endpoint such as `tcp://0.0.0.0:7440`; "" means none. It is
    always encrypted, and only the keys of `artctl key` may connect."""

    bind: Annotated[str, Meta(pattern=r"^(tcp://.+:[0-9]+)?$")] = ""


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a daemon.

    `max_message_mib` limits all frames of one message together. `under_way_mib` limits messages that clients and the gateway
    have sent and the daemon has not answered; above it the daemon reads no further message. `max_body_kib` limits a trajectory
    body in a database row; a larger one becomes a file. With less free disk space than `min_free_mib` the daemon answers `busy`;
    `reserve_mib` is the size of a file that it removes when the disk is full. The daemon ends and restarts a worker that is
    silent for `lease_s` seconds, a trainer whose job makes no progress for `stall_s`, and an engine that computes no token for
    `engine_stall_s` while it has requests; 0 means never for the latter two. A log that is larger than `log_mib` starts anew; 0
    means never.
    """

    max_message_mib: Positive = 64
    under_way_mib: Positive = 256
    max_body_kib: Positive = 64
    min_free_mib: Positive = 256
    reserve_mib: Annotated[int, Meta(ge=0)] = 64
    lease_s: Lease = 30.0
    stall_s: Seconds = 3600.0
    engine_stall_s: Seconds = 300.0
    log_mib: Annotated[int, Meta(ge=0)] = 64


class Retention(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The days after which contents are deleted, while their rows stay; 0 means never.

    `trajectories_days` applies to bodies of trained and discarded trajectories, `batches_days` to tensors of batches that no kept
    checkpoint was trained on, `exchanges_days` to responses that no trajectory uses. Above `exchanges_gib` GiB of such responses
    the oldest go earlier. `events_days` applies to events, whose rows go too.
    """

    trajectories_days: Days = 30.0
    batches_days: Days = 30.0
    exchanges_days: Days = 7.0
    exchanges_gib: Gib = 50.0
    events_days: Days = 90.0


class Interpreter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's interpreter that replaces the installed runtime. The folders of `pythonpath` follow artd's own code."""

    python: str = ""
    pythonpath: tuple[str, ...] = ()


class Runtimes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    trainer: Interpreter = Interpreter()
    engine: Interpreter = Interpreter()


Index = Annotated[int, Meta(ge=0)]


class Gpus(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPUs that trainer and engine see, by the driver's numbers. Empty means those that the daemon sees."""

    trainer: tuple[Index, ...] = ()
    engine: tuple[Index, ...] = ()


class Environment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The variables of the daemon's environment that no worker gets: names, or patterns with `*`. `keep` lists exceptions."""

    drop: tuple[str, ...] = DROP
    keep: tuple[str, ...] = ()


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a daemon. `data_dir` is absolute after `load`. `drain_s` is the number of seconds that workers get to
    end."""

    data_dir: str = ""
    log_level: Level = "info"
    drain_s: Seconds = 60.0
    gateway: Gateway = Gateway()
    remote: Remote = Remote()
    limits: Limits = Limits()
    retention: Retention = Retention()
    runtimes: Runtimes = Runtimes()
    gpus: Gpus = Gpus()
    environment: Environment = Environment()


def load(
    config: str | None = None,
    data_dir: str | None = None,
    log_level: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings from flags (the arguments), the environment and the TOML file. Raises ConfigError.

    The file is `config`, else $ARTD_CONFIG, else `$XDG_CONFIG_HOME/artd/artd.toml` where that exists.
    """
    env = os.environ if env is None else env
    path = _file(config, env)
    settings = read(path) if path else Settings()
    changes: dict[str, Any] = {}
    if chosen := log_level or env.get("ARTD_LOG"):
        changes["log_level"] = _level(chosen.lower(), "--log-level" if log_level else "ARTD_LOG")
    chosen = data_dir or env.get("ARTD_DATA_DIR") or settings.data_dir or str(paths.default_data_dir())
    changes["data_dir"] = str(Path(chosen).expanduser().absolute())
    return msgspec.structs.replace(settings, **changes)


def read(path: Path) -> Settings:
    """Read one TOML file; relative paths in it start at its folder. Raises ConfigError."""
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}. Next: make it, or leave out --config") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if unknown := _unknown(content, Settings):
        raise ConfigError(f"{path}: {unknown}")
    try:
        settings = msgspec.convert(content, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_in_words(str(error))}") from None
    if not settings.gateway.beyond_loopback and not is_loopback(settings.gateway.host):
        raise ConfigError(
            f"{path}: gateway.host: {settings.gateway.host!r} can be reached from other machines, and the bearer token would "
            "travel unencrypted. Next: keep 127.0.0.1 and put TLS or ssh in front, or set gateway.beyond_loopback = true"
        )
    return _absolute(settings, path.parent.absolute())


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a listener on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _file(config: str | None, env: Mapping[str, str]) -> Path | None:
    if chosen := config or env.get("ARTD_CONFIG"):
        return Path(chosen).expanduser()
    home = env.get("XDG_CONFIG_HOME", "")
    standard = (Path(home) if home.startswith("/") else Path.home() / ".config") / "artd" / "artd.toml"
    return standard if standard.exists() else None


def _level(value: str, where: str) -> str:
    try:
        return msgspec.convert(value, Level)
    except msgspec.ValidationError:
        raise ConfigError(f"{where}: invalid log level {value!r}: use debug, info, warning or error") from None


def _unknown(content: Mapping[str, Any], kind: Any, prefix: str = "") -> str | None:
    """Return a text on the first key that `kind` does not have, dotted, with the nearest one that it has; None if all exist."""
    known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in content.items():
        if key not in known:
            where = prefix.rstrip(".") or "the file"
            return f"unknown key {prefix}{key!s}{did_you_mean(key, known)}; {where} has {', '.join(known)}"
        inner = known[key]
        nested = isinstance(inner, type) and issubclass(inner, Struct) and isinstance(value, dict)
        if nested and (found := _unknown(value, inner, f"{prefix}{key}.")):
            return found
    return None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _in_words(error: str) -> str:
    """Return msgspec's message with its path in front, dotted as in the file."""
    text, _, path = error.partition(" - at `$.")
    return f"{path.rstrip('`')}: {text}" if path else text


def _absolute(settings: Settings, folder: Path) -> Settings:
    def resolve(text: str) -> str:
        return str(folder / Path(text).expanduser()) if text else ""

    def interpreter(own: Interpreter) -> Interpreter:
        return Interpreter(python=resolve(own.python), pythonpath=tuple(resolve(p) for p in own.pythonpath))

    runtimes = Runtimes(trainer=interpreter(settings.runtimes.trainer), engine=interpreter(settings.runtimes.engine))
    return msgspec.structs.replace(settings, data_dir=resolve(settings.data_dir), runtimes=runtimes)
