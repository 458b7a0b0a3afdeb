"""Lists the TCP and UDP sockets on which a set of processes listens, from /proc only."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path

LISTEN = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""State of a socket that takes what strangers send (an unconnected one, for UDP)."""


def listening(pids: Iterable[int]) -> list[tuple[str, str, int]]:
    """(protocol, address, port) of every listening socket of these processes."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = []
    for table, state in LISTEN.items():
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.append((table, str(_address(address)), int(port, 16)))
    return found


def beyond_loopback(pids: Iterable[int]) -> list[tuple[str, str, int]]:
    """Those of `listening` that another machine could reach."""
    return [entry for entry in listening(pids) if not ipaddress.ip_address(entry[1]).is_loopback]


def _sockets(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for handle in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{handle}")):
                    found.append(match[1])
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    words = struct.pack(f"={len(text) // 8}I", *(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))
    found = ipaddress.ip_address(words)
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found
