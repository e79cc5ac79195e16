"""The network of a benchmark: hosts on one machine with links of a limited rate, and the bytes sent as the kernel counts."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

_BYTES_SENT = 200
"""Offset of tcpi_bytes_sent (u64) in Linux's struct tcp_info."""


def bytes_sent() -> int:
    """Bytes this process's TCP sockets have sent, as the kernel counts them."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # the descriptor of the listing itself
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                data = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(data) >= _BYTES_SENT + 8:
                    total += struct.unpack_from("Q", data, _BYTES_SENT)[0]
    return total


@dataclass(frozen=True)
class Host:
    """Where a process runs: what goes before its command, its environment, and the address it has."""

    address: str
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def hosts(count: int, rate: str | None) -> Iterator[list[Host]]:
    """`count` hosts. Without a rate all are this machine over loopback.

    `rate` as tc takes it (`1gbit`): each is a network namespace on a bridge, its link limited both ways. Needs root, ip and
    tc; raises CalledProcessError where one of their commands fails. All are gone afterwards.
    """
    if rate is None:
        yield [Host("127.0.0.1", environment={"GLOO_SOCKET_IFNAME": "lo"})] * count
        return
    here = f"fx{os.getpid()}"
    switch, names = f"{here}s", [f"{here}h{k}" for k in range(count)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for k, name in enumerate(names):
            port = f"port{k}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", "eth", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{k + 1}/24", "dev", "eth")
            _run("ip", "-n", name, "link", "set", "eth", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _limit(name, "eth", rate)
            _limit(switch, port, rate)
        yield [
            Host(f"10.77.0.{k + 1}", ("ip", "netns", "exec", name), {"GLOO_SOCKET_IFNAME": "eth"})
            for k, name in enumerate(names)
        ]
    finally:
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _limit(namespace: str, device: str, rate: str) -> None:
    """What leaves by a device goes at `rate` at most, in bursts of 64 KiB."""
    tc = ("ip", "netns", "exec", namespace, "tc")
    _run(*tc, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1")
    shape = ("htb", "rate", rate, "ceil", rate, "burst", "64k", "cburst", "64k", "quantum", "60000")
    _run(*tc, "class", "add", "dev", device, "parent", "1:", "classid", "1:1", *shape)
    _run(*tc, "qdisc", "add", "dev", device, "parent", "1:1", "pfifo", "limit", "1000")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
