"""A link of known rate and delay between two network namespaces, run as a first process of its own.

    unshare --net --mount --pid --mount-proc --fork --kill-child \
        python shaped_link.py MEGABYTES_PER_SECOND DELAY_MS

Makes two namespaces with a network, an address and a /dev/shm of their own each, prints their
process numbers as one line of JSON, and carries packets between them until standard input ends. A
`c` that is read there cuts the link, and what it would carry is lost without a word; `m` mends it.
Whatever runs in the namespaces ends with this process: it is the first of its process namespace.

The rate is a token bucket set with `tc`, in each direction. The delay, one way, is kept here, since
`tc`'s own (netem) is missing from many kernels: the link is a pair of tun devices, and a packet
read from one is written to the other when it is due, within half a millisecond on an idle machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque

ADDRESSES = ("10.77.0.1", "10.77.0.2")
MTU = 9000
"""Bytes: jumbo frames, as on a cluster's network; a packet costs this process about 10 us."""

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
GRAIN = 0.0005
"""Seconds between looks at the packets that wait."""


def main() -> None:
    rate, delay = float(sys.argv[1]), float(sys.argv[2]) / 1e3
    holders = [hold_namespaces() for _ in ADDRESSES]
    ends = [open_tun(f"node{number}") for number in range(2)]
    for number, (holder, address) in enumerate(zip(holders, ADDRESSES, strict=True)):
        device = f"node{number}"
        run(f"ip link set {device} netns {holder.pid}")
        inside = f"nsenter --target {holder.pid} --net --mount"
        run(f"{inside} ip link set lo up")
        run(f"{inside} ip link set {device} mtu {MTU} txqueuelen 4000 up")
        run(f"{inside} ip address add {address}/24 dev {device}")
        # tc's "mbps" is 10^6 bytes a second. What would wait longer than 100 ms is dropped.
        run(f"{inside} tc qdisc add dev {device} root tbf rate {rate}mbps burst 64kb latency 100ms")
        run(f"{inside} mount -t tmpfs tmpfs /dev/shm")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans come to this process, and are reaped
    print(json.dumps([holder.pid for holder in holders]), flush=True)
    carry(ends[0], ends[1], delay)


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)


def hold_namespaces() -> subprocess.Popen[str]:
    """A process in namespaces of its own, and nothing else to do."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", "echo there; exec sleep infinity"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    if holder.stdout.readline() != "there\n":
        sys.exit("no network namespaces here")
    return holder


def open_tun(name: str) -> int:
    """A tun device: what is sent to it can be read here, and the other way round."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return end


def carry(one: int, other: int, delay: float) -> None:
    """Carry packets both ways, each `delay` seconds late, until standard input ends."""
    waiting: dict[int, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}
    across, whole = {one: other, other: one}, True
    while True:
        if any(waiting.values()):
            time.sleep(GRAIN)
        else:
            select.select([one, other, sys.stdin], [], [])
        if select.select([sys.stdin], [], [], 0)[0]:
            word = os.read(sys.stdin.fileno(), 1)
            if not word:
                return
            whole = word == b"m"
        for end, packets in waiting.items():
            due = time.monotonic() + delay
            while (packet := read_packet(end)) is not None:
                if whole:
                    packets.append((due, packet))
            now = time.monotonic()
            while packets and packets[0][0] <= now:
                os.write(across[end], packets.popleft()[1])


def read_packet(end: int) -> bytes | None:
    try:
        return os.read(end, MTU + 64)
    except BlockingIOError:
        return None


if __name__ == "__main__":
    main()
