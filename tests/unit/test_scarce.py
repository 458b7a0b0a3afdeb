"""Without a file descriptor left: services and proofs of death try again, other errors end them."""

from __future__ import annotations

import errno

import pytest

from artd import services
from artd.net.descriptors import is_scarce, reserve
from artd.services import patient
from artd.supervise.spawn import _look

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_a_service_that_lacks_descriptors_is_tried_again(monkeypatch, number):
    monkeypatch.setattr(services, "SCARCE_S", 0.01)
    failures, done = [OSError(number, "too many open files")] * 2, []

    async def work(argument):
        if failures:
            raise failures.pop()
        done.append(argument)

    await patient(work, 7)
    assert done == [7]


async def test_any_other_error_ends_it():
    async def work():
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        await patient(work)


async def test_a_look_for_survivors_waits_for_a_descriptor():
    failures = [OSError(errno.EMFILE, "/proc")]

    def look():
        if failures:
            raise failures.pop()
        return []

    assert await _look(look) == [] and not failures


async def test_clients_never_get_all_descriptors():
    for limit in (256, 512, 1024, 4096, 20_000, 1 << 20):
        assert 60 <= limit - reserve(limit) < limit
    assert not is_scarce(OSError(errno.EACCES, "")) and not is_scarce(ValueError())
