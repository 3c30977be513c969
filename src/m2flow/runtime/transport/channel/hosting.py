"""Where a channel may live: a thread here, a process of its own, or a Ray actor.

Each way gives the channel's address; the first two also what ends the host.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from m2flow.errors import UserError
from m2flow.runtime.transport.channel.errors import ChannelLost
from m2flow.runtime.transport.channel.host import ChannelAddress, Host

START_SECONDS = 60.0
"""Longest that a host may take to start."""

END_SECONDS = 5.0
"""Longest that a host's process may take to end by itself."""

NAMESPACE = "m2flow-channels"
"""The Ray namespace in which channels have their names."""

Ended = Callable[[], None]


def in_thread(
    name: str, max_items: int, max_bytes: int, listen: str | None
) -> tuple[ChannelAddress, Ended]:
    """Serve from a thread of this process, until it ends."""
    host = Host(name, max_items, max_bytes, listen)
    host.start()
    return host.address, host.stop


def in_process(
    name: str, max_items: int, max_bytes: int, listen: str | None
) -> tuple[ChannelAddress, Ended]:
    """Serve from a process that ends when this one does: when its standard input is closed."""
    code = "from m2flow.runtime.transport.channel.hosting import serve_here; serve_here()"
    path = os.pathsep.join(path for path in sys.path if path)  # so that m2flow is found there too
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    pickle.dump((name, max_items, max_bytes, listen), process.stdin)
    process.stdin.flush()
    try:
        if not select.select([process.stdout], [], [], START_SECONDS)[0]:
            process.kill()
        address = pickle.load(process.stdout)
    except EOFError:
        raise ChannelLost(f"channel {name!r}: its process ended with {process.wait()}") from None

    def end() -> None:
        atexit.unregister(end)
        with process:  # closes both pipes
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    atexit.register(end)
    return address, end


def serve_here() -> None:
    """Be the host's process: settings come on standard input, the address leaves on output."""
    host = Host(*pickle.load(sys.stdin.buffer))
    pickle.dump(host.address, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    host.serve(ends_with=sys.stdin.fileno())


def node_address() -> str | None:
    """This node's address in the Ray cluster, if this process is in one of several nodes."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    alive = sum(node["Alive"] for node in ray.nodes())
    return str(ray.util.get_node_ip_address()) if alive > 1 else None


class HostActor:
    """The Ray actor that hosts one channel."""

    def __init__(self, name: str, max_items: int, max_bytes: int) -> None:
        self._host = Host(name, max_items, max_bytes, node_address())
        self._host.start()

    def address(self) -> ChannelAddress:
        """Where it is."""
        return self._host.address


def start_actor(name: str, max_items: int, max_bytes: int) -> ChannelAddress:
    """Start an actor that outlives the job which starts it."""
    import ray

    settings = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    try:
        actor = ray.remote(HostActor).options(**settings).remote(name, max_items, max_bytes)
    except ValueError as error:
        if "already" not in str(error):
            raise
        raise UserError(
            "a channel of that name is on the cluster already",
            key="name",
            value=name,
            hint="Channel.find(name) gives a handle to it",
        ) from None
    return _address_of(actor)


def find_actor(name: str) -> ChannelAddress:
    """The address of a channel that `start_actor` has started."""
    import ray

    try:
        return _address_of(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        raise UserError(
            "no channel of that name is on the cluster",
            key="name",
            value=name,
            hint="Channel.on_ray(name) makes one",
        ) from None


def end_actor(name: str) -> None:
    """End the actor; it is no error if it has ended."""
    import ray

    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        return


def _address_of(actor: Any) -> ChannelAddress:
    import ray

    address: ChannelAddress = ray.get(actor.address.remote(), timeout=START_SECONDS)
    return address
