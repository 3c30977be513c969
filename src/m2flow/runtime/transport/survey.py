"""The links of a whole machine or cluster, measured between processes started for the purpose.

With a Ray cluster at hand (`RAY_ADDRESS`) one process on each of its nodes is asked, on a GPU where
one is free; without, a second process on this machine, on the same GPU as this one, and a third on
another GPU if there is one. All of them end with the survey.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from m2flow.runtime.transport.gpu import devices_here
from m2flow.runtime.transport.measure import completed, measure
from m2flow.runtime.transport.peers import PayloadServer, PeerAddress, Peers, this_node
from m2flow.runtime.transport.shared_memory import SharedPool
from m2flow.runtime.transport.table import LinkTable

START_SECONDS = 120.0


def survey() -> LinkTable:
    """Measure the links between this process and others, and say which do not exist here."""
    authkey = secrets.token_bytes(16)
    return _on_ray(authkey) if os.environ.get("RAY_ADDRESS") else _on_this_machine(authkey)


class _Lane:
    """The other end: it answers test payloads only."""

    def __init__(
        self, authkey: bytes, node: str | None = None, host: str = "127.0.0.1", gpu: int = 0
    ) -> None:
        torch.set_num_threads(1)
        self._pool = SharedPool(f"m2flow-survey-{os.getpid()}-")
        devices = devices_here("the other process", node or this_node(), host, gpu)
        self._server = PayloadServer(_refuse, self._pool, authkey, host, node=node, devices=devices)

    def address(self) -> PeerAddress:
        return self._server.address

    def close(self) -> None:
        self._server.close()
        self._pool.close()


def _refuse(key: Any) -> Any:
    raise KeyError(key)


def _peers(authkey: bytes, node: str | None, host: str) -> Peers:
    devices = devices_here("the survey", node or this_node(), host)
    return Peers(node, authkey, name="the survey", devices=devices)


def _measured(peers: Peers, addresses: Sequence[PeerAddress]) -> LinkTable:
    try:
        return completed(measure(peers, addresses), any_gpu=peers.devices is not None)
    finally:
        peers.close()


def _on_this_machine(authkey: bytes) -> LinkTable:
    others = [_Other(authkey, gpu) for gpu in range(min(2, max(1, torch.cuda.device_count())))]
    try:
        peers = _peers(authkey, None, "127.0.0.1")
        return _measured(peers, [other.address() for other in others])
    finally:
        for other in others:
            other.end()


class _Other:
    """Another process on this machine.

    Args:
        authkey: what its askers know.
        gpu: the number of the GPU it stands on, if there are any.
    """

    def __init__(self, authkey: bytes, gpu: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, authkey, gpu), daemon=True)
        self._process.start()
        there.close()

    def address(self) -> PeerAddress:
        if not self._here.poll(START_SECONDS):
            raise TimeoutError(f"the other process did not start in {START_SECONDS:g} s")
        address: PeerAddress = self._here.recv()
        return address

    def end(self) -> None:
        self._here.close()  # which ends the process
        self._process.join(5)
        self._process.kill()


def _serve(connection: Connection, authkey: bytes, gpu: int) -> None:
    lane = _Lane(authkey, gpu=gpu)
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
        free = ray.state.available_resources_per_node()
        lanes = [
            remote.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                num_gpus=1 if free.get(node, {}).get("GPU", 0) >= 1 else 0,
            ).remote(authkey)
            for node in nodes
        ]
        addresses = ray.get([lane.address.remote() for lane in lanes], timeout=START_SECONDS)
        here = ray.get_runtime_context().get_node_id()
        table = _measured(_peers(authkey, here, get_node_ip_address()), addresses)
        ray.get([lane.close.remote() for lane in lanes], timeout=10)
        return table
    finally:
        if started_here:
            ray.shutdown()
