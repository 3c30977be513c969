"""The links of a whole machine or cluster, measured between processes started for the purpose.

With a Ray cluster at hand (`RAY_ADDRESS`) one process on each of its nodes is asked; without, a
second process on this machine. All of them end with the survey.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
from multiprocessing.connection import Connection
from typing import Any

import torch

from m2flow.runtime.links.measure import measure
from m2flow.runtime.links.peers import PayloadServer, PeerAddress, Peers
from m2flow.runtime.links.shared_memory import SharedPool
from m2flow.runtime.links.table import LinkTable

START_SECONDS = 120.0


def survey() -> LinkTable:
    """Measure the links between this process and one other on each node."""
    authkey = secrets.token_bytes(16)
    return _on_ray(authkey) if os.environ.get("RAY_ADDRESS") else _on_this_machine(authkey)


class _Lane:
    """The other end: it answers test payloads only."""

    def __init__(self, authkey: bytes, node: str | None = None, host: str = "127.0.0.1") -> None:
        torch.set_num_threads(1)
        self._pool = SharedPool(f"m2flow-survey-{os.getpid()}-")
        self._server = PayloadServer(_refuse, self._pool, authkey, host, node=node)

    def address(self) -> PeerAddress:
        return self._server.address

    def close(self) -> None:
        self._server.close()
        self._pool.close()


def _refuse(key: Any) -> Any:
    raise KeyError(key)


def _on_this_machine(authkey: bytes) -> LinkTable:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, authkey), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(START_SECONDS):
            raise TimeoutError(f"the other process did not start in {START_SECONDS:g} s")
        peers = Peers(None, authkey)
        table = measure(peers, [here.recv()])
        peers.close()
        return table
    finally:
        here.close()  # which ends the other process
        process.join(5)
        process.kill()


def _serve(connection: Connection, authkey: bytes) -> None:
    lane = _Lane(authkey)
    connection.send(lane.address())
    connection.poll(None)  # until the asker closes its end, or dies
    lane.close()


def _on_ray(authkey: bytes) -> LinkTable:
    import ray
    from ray.util import get_node_ip_address
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class RayLane(_Lane):
        def __init__(self, authkey: bytes) -> None:
            node = ray.get_runtime_context().get_node_id()
            super().__init__(authkey, node, get_node_ip_address())

    started_here = not ray.is_initialized()
    if started_here:
        ray.init(log_to_driver=False, logging_level="ERROR")
    try:
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        remote = ray.remote(num_cpus=0)(RayLane)
        lanes = [
            remote.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(authkey)
            for node in nodes
        ]
        addresses = ray.get([lane.address.remote() for lane in lanes], timeout=START_SECONDS)
        peers = Peers(ray.get_runtime_context().get_node_id(), authkey)
        table = measure(peers, addresses)
        peers.close()
        ray.get([lane.close.remote() for lane in lanes], timeout=10)
        return table
    finally:
        if started_here:
            ray.shutdown()
