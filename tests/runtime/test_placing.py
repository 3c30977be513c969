"""Which machines lanes are on, once some have gone and others have joined."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import SimpleNamespace

import pytest
import ray

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.runtime.driver import placing

LANES = (LaneSpec(0), LaneSpec(1, node=1), LaneSpec(2, node=1), LaneSpec(3, node=3))


NOTHING: Mapping[str, float] = {}
CORES, FEW, GPUS = {"CPU": 64.0}, {"CPU": 64.0, "GPU": 4.0}, {"CPU": 64.0, "GPU": 8.0}


def eight_gpus_on(machines: int) -> list[LaneSpec]:
    """The lanes of `Nxgpu:8`."""
    both = enumerate(product(range(machines), range(8)))
    return [LaneSpec(lane, "gpu", node=node, gpu=gpu) for lane, (node, gpu) in both]


def cluster(monkeypatch: pytest.MonkeyPatch, machines: Mapping[str, Mapping[str, float]]) -> None:
    """Machines of these names that live, of which `h` is the launcher's, and one that does not."""
    nodes = [
        {
            "NodeID": name,
            "Alive": name != "0",
            "Resources": has,
            "NodeManagerHostname": f"host-{name}",
            "NodeManagerAddress": f"10.0.0.{ord(name)}",
        }
        for name, has in {"0": GPUS, **machines}.items()
    ]
    here = SimpleNamespace(get_node_id=lambda: "h")
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(ray.state, "available_resources_per_node", lambda: machines)


@pytest.mark.parametrize(
    ("count", "there", "found"),
    [
        (2, {"a": CORES, "b": GPUS, "h": GPUS}, "hba"),
        (2, {"a": GPUS, "b": GPUS, "h": GPUS}, "hab"),
        (3, {"a": CORES, "b": FEW, "c": GPUS, "d": GPUS, "h": GPUS}, "hcdab"),
        (3, {"a": CORES, "b": FEW, "c": GPUS, "h": GPUS}, "hcab"),  # none fits number 2
    ],
)
def test_a_number_has_a_machine_with_what_its_lanes_need(
    count: int,
    there: Mapping[str, Mapping[str, float]],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's ids say nothing about a machine: one without GPUs once had the number of one with."""
    cluster(monkeypatch, there)
    assert "".join(placing.nodes_for(eight_gpus_on(count))) == found


def test_lanes_that_need_much_choose_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones with cores alone would take the machine with GPUs that comes first."""
    cluster(monkeypatch, {"a": GPUS, "b": CORES, "h": CORES})
    cores = [LaneSpec(number, node=number, cores=(0,)) for number in (0, 1)]
    gpu = LaneSpec(2, "gpu", node=2, gpu=0)
    assert "".join(placing.nodes_for([*cores, gpu])) == "hba"


def test_too_few_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, {"a": GPUS, "h": GPUS})
    with pytest.raises(UserError, match=r"needs more machines .*\(got 3\); expected at most 2"):
        placing.nodes_for(eight_gpus_on(3))


def test_a_machine_that_lacks_something_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, {"a": FEW, "h": GPUS})
    lanes = eight_gpus_on(2)
    nodes = placing.nodes_for(lanes)
    match = r"need 8 GPUs, the Ray cluster has 4 free on the machine host-a \(10.0.0.97\)"
    with pytest.raises(UserError, match=match):
        placing.check_room(lanes, lambda: nodes, {}, 0.0)


def test_a_machine_without_gpus_takes_the_place_of_none_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = eight_gpus_on(2)
    cluster(monkeypatch, {"a": CORES, "h": GPUS})
    assert placing.nodes_left(lanes, "hba") == ["h", "b", "a"], "it stays gone"
    cluster(monkeypatch, {"a": CORES, "c": GPUS, "h": GPUS})
    assert placing.nodes_left(lanes, "hba") == ["h", "c", "a"]


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ("abcd", "abcd"),
        ("acd", "accd"),  # nobody is on c
        ("ad", "abcd"),
        ("ade", "aecd"),
        ("ae", "aecd"),  # one has joined for two that have gone
        ("aef", "aecf"),
    ],
)
def test_a_machine_on_which_no_lane_is_takes_the_place_of_one_that_is_gone(
    there: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, dict.fromkeys(there, NOTHING))
    assert "".join(placing.nodes_left(LANES, "abcd")) == found
