"""CURVE keys in a data folder, and one of them damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from artd.net.keys import BadKey, Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """`a` is damaged; `b` may connect."""
    made = Keys(tmp_path)
    for name in "ab":
        made.allow(name, zmq.curve_keypair()[0].decode())
    (tmp_path / "keys" / "clients" / "a.key").write_text("no key\n")
    return made


def test_a_damaged_key_lets_nobody_in_and_keeps_nobody_out(keys: Keys, tmp_path: Path) -> None:
    whole = Keys(tmp_path / "other")
    whole.allow("b", zmq.curve_keypair()[0].decode())
    text = (tmp_path / "keys" / "clients" / "b.key").read_bytes()
    (tmp_path / "other" / "keys" / "clients" / "b.key").write_bytes(text)
    public = whole.clients()["b"].encode()
    assert keys.allowed(public)
    assert not keys.allowed(b"no key")
    assert not keys.allowed(zmq.curve_keypair()[0])


def test_a_damaged_key_is_named_and_can_be_removed(keys: Keys) -> None:
    with pytest.raises(BadKey, match=r"a\.key holds no key"):
        keys.clients()
    with pytest.raises(BadKey, match="a key 'a' exists already"):
        keys.allow("a", zmq.curve_keypair()[0].decode())
    keys.remove("a")
    assert list(keys.clients()) == ["b"]


def test_a_file_that_cannot_be_read_is_no_removed_key_and_keeps_nobody_else_out(keys: Keys, tmp_path: Path) -> None:
    folder = tmp_path / "keys" / "clients"
    public = zmq.curve_keypair()[0]
    keys.remove("b")
    keys.allow("b", public.decode())
    (folder / "a.key").unlink()
    (folder / "a.key").symlink_to("a.key")  # stat fails, and not with ENOENT
    assert keys.name(public) == "b"
    with pytest.raises(OSError, match=r"a\.key"):
        keys.name(zmq.curve_keypair()[0])
    assert [keys.is_removed(name) for name in ("a", "b", "c")] == [False, False, True]
    (folder / "a.key").unlink()
    (folder / "a.key").symlink_to("nothing")  # removed between the listing and the look
    assert keys.name(zmq.curve_keypair()[0]) == ""
