"""`ProfileTiming`: what a profile says of time, as the simulated driver asks for it.

Lengths of items and turns of loops are drawn from the profile's distributions, for each by (seed,
stage, step, item) alone: plans that are compared see the same draws. A streaming stage whose
profile knows `round` and `lengths` shares its lane among the items at work; any other follows its
`seconds` and `done`, and which of its items are done first is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from m2flow.engine.messages import (
    Event,
    ExportWeights,
    InstallWeights,
    LaneCommand,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.engine.plan import Plan, StagePlan
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode
from m2flow.plan.profile import Profile, StageCost
from m2flow.plan.units import Bytes, Items
from m2flow.simulation.timing import Admitted, Timing

HANDED_ON = 4
"""A stage that knows lengths hands its items on once they are 1 / HANDED_ON of those at work: many
at a time while many are, and one by one in the tail, as this project's generator does."""

PIECES = 16
"""A stage whose lengths are not known hands its items on in so many pieces."""

LENGTH, TURNS, ORDER, WEIGHT = 1, 2, 3, 4
"""What is drawn."""

UNIT_VARIANCE = math.sqrt(12)
"""Times a number drawn evenly from an interval of length 1: its standard deviation is 1."""

MANY_ITEMS = 1024
"""In a call of more items the unlike ones make up for each other."""

LEAST_WEIGHT = 0.2
"""No call takes less than so much of what it takes in the mean."""

_MASK = (1 << 64) - 1


def drawn(seed: int, what: int, stage: int, step: int, item: int) -> float:
    """A number in [0, 1) that depends on nothing else (SplitMix64, Steele et al. 2014)."""
    x = seed & _MASK
    for part in (what, stage, step, item):
        x = (x + 0x9E3779B97F4A7C15 * (part + 2)) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return (x >> 11) / (1 << 53)


class ProfileTiming(Timing):
    """A `Timing` for one plan.

    Args:
        graph, plan: what is played.
        profile: what is known of time.
        seed: of all draws.
        first_step: the number that the first step played has in the draws.

    Raises:
        UserError: the profile has no price for the lanes of a replica.
    """

    def __init__(
        self, graph: FlowGraph, plan: Plan, profile: Profile, seed: int = 0, first_step: int = 0
    ) -> None:
        self.graph, self.plan, self.profile = graph, plan, profile
        self.has_links = bool(profile.links)
        self._seed, self._first_step = seed, first_step
        self._lanes = {lane.id: lane for lane in plan.lanes}
        self._costs = [self._costs_of(node) for node in graph.nodes]
        self._gangs = {
            worker: {lane: len(gang) for gang in spot.replicas for lane in gang}
            for worker, spot in plan.placements.items()
        }
        self._stages = [profile.stage(node.name) for node in graph.nodes]
        self._in_pieces = {
            index
            for index, costs in enumerate(self._costs)
            if self._stages[index].lengths and any(cost.round for cost in costs.values())
        }
        self._maker = cache(self._maker_of)
        self._visits_left: dict[tuple[int, int, int], int] = {}
        self._deviation = cache(self._deviation_of)
        self._price = cache(self._publish_price)

    def _costs_of(self, node: StageNode) -> dict[int, StageCost]:
        """What a stage takes, by lane."""
        found: dict[int, StageCost] = {}
        spot = self.plan.placements[node.worker]
        wanted = self.plan.stages.get(node.name, StagePlan()).max_running
        for gang in spot.replicas:
            kind = self._lanes[gang[0]].kind
            cost = self.profile.cost(node.name, spot.layout, len(gang), kind, wanted)
            found |= dict.fromkeys(gang, cost)
        return found

    def _drawn(self, what: int, node: StageNode, step: int, item: int) -> float:
        return drawn(self._seed, what, node.index, step + self._first_step, item)

    def length(self, node: StageNode, step: int, item: int) -> float:
        """The drawn length of an output item; 1 where nothing is known of lengths."""
        lengths = self._stages[node.index].lengths
        return 1.0 if lengths is None else lengths.at(self._drawn(LENGTH, node, step, item))

    def said_length(self, producer: int, step: int, item: int) -> float:
        """Return the length that a flow declares for an item; it is taken to be true.

        It is the length with which the item, or what it descends from, was made; else the longest
        of those that a reader will make of it.
        """
        maker, expands = self._maker(producer)
        if maker is not None:
            return self.length(maker, step, item // expands)
        for node in self.graph.nodes:
            if producer in node.inputs and self._stages[node.index].lengths is not None:
                made = range(item * node.expands, (item + 1) * node.expands)
                return max(self.length(node, step, output) for output in made)
        return 0.0

    # --- what the driver asks ---------------------------------------------------------------------

    def dispatch(self, command: LaneCommand) -> float:
        return self.profile.dispatch

    def call(
        self,
        node: StageNode,
        step: int,
        lanes: Sequence[int],
        shares: Sequence[Sequence[int]],
    ) -> float:
        cost = self._costs[node.index][lanes[0]]
        items = [item for share in shares for item in share]
        seconds = cost.call(Items(len(items)))
        if not cost.spread or not 0 < len(items) <= MANY_ITEMS:
            return seconds
        above = sum(self._deviation(node.index, step, item) for item in items) / len(items)
        return seconds * max(LEAST_WEIGHT, 1.0 + cost.spread * above)

    def elsewhere(self, node: StageNode, lane: int) -> float:
        return self._costs[node.index][lane].elsewhere

    def _deviation_of(self, index: int, step: int, item: int) -> float:
        """By how many standard deviations an input item takes more than the mean item.

        An item that descends from one with a length takes as much more as the item is longer: long
        answers come late, and take long in every later stage too.
        """
        node = self.graph.nodes[index]
        maker, expands = self._maker(node.inputs[0])
        lengths = None if maker is None else self._stages[maker.index].lengths
        if maker is None or lengths is None or not lengths.deviation:
            return UNIT_VARIANCE * (self._drawn(WEIGHT, node, step, item) - 0.5)
        return (self.length(maker, step, item // expands) - lengths.mean) / lengths.deviation

    def _maker_of(self, producer: int) -> tuple[StageNode | None, int]:
        """Find the stage that gave a producer's items, or what they descend from, their lengths,
        and how many of these items descend from each that the stage made."""
        expands = 1
        while producer != SOURCE:
            node = self.graph.nodes[producer]
            if self._stages[producer].lengths is not None:
                return node, expands
            producer, expands = node.inputs[0], expands * node.expands
        return None, expands

    def admit(self, node: StageNode, step: int, lane: int, items: Sequence[int]) -> Admitted:
        layout, count = self._costs[node.index][lane], len(items)
        outputs = [item * node.expands + k for item in items for k in range(node.expands)]
        if layout.round is not None and node.index in self._in_pieces:
            pause = layout.admit.at(count) if layout.admit else 0.0
            lengths = [self.length(node, step, output) for output in outputs]
            return Admitted(pause, lengths)
        seconds = layout.call(Items(count))
        if layout.done is None:
            return Admitted(0.0, [seconds] * len(outputs))
        ranks = [(self.length(node, step, x), self._drawn(ORDER, node, step, x)) for x in outputs]
        needs = [0.0] * len(outputs)
        for place, n in enumerate(sorted(range(len(ranks)), key=ranks.__getitem__), start=1):
            piece = math.ceil(place * PIECES / len(outputs)) / PIECES
            needs[n] = seconds * layout.done.at(max(place / len(outputs), piece))
        return Admitted(0.0, needs)

    def round(self, node: StageNode, lane: int, running: int) -> float:
        pace = self._costs[node.index][lane].round
        return 1.0 if pace is None or node.index not in self._in_pieces else pace.at(running)

    def slots(self, node: StageNode, lane: int) -> int | None:
        return self._costs[node.index][lane].slots if node.index in self._in_pieces else None

    def control(self, events: Sequence[Event]) -> float:
        reported = sum(not isinstance(event, StepSubmitted | Tick) for event in events)
        return reported * self.profile.event_overhead

    def hands_on(self, node: StageNode, finished: int, running: int) -> bool:
        return node.index not in self._in_pieces or finished * HANDED_ON >= running

    def finish(self, node: StageNode, command: RunFinish) -> float:
        replicas = len(self.plan.placements[node.worker].replicas)
        return self._costs[node.index][command.lanes[0]].finish_seconds(replicas)

    def publish(self, command: ExportWeights | InstallWeights, lane: int) -> float:
        """The whole price is the install's: lanes that take weights do so side by side."""
        if isinstance(command, ExportWeights):
            return 0.0
        return self._price(command.source, command.target, lane)

    def _publish_price(self, source: str, target: str, lane: int) -> float:
        placements = self.plan.placements
        common = lane in self._gangs[source]
        place = "same" if common else self._place(placements[source].lanes, lane)
        first = placements[source].replicas[0]
        sources = self._gangs[source].get(lane, len(first))
        taking = self._gangs[target][lane]
        kinds = (self._lanes[lane if common else first[0]].kind, self._lanes[lane].kind)
        return self.profile.publish_seconds(source, target, place, sources, taking, kinds)

    def _place(self, sources: Sequence[int], target: int) -> str:
        here = self._lanes[target].node
        return "node" if any(self._lanes[lane].node == here for lane in sources) else "cluster"

    def move(self, worker: str, what: str, lane: int) -> float:
        name, kind = self.plan.placements[worker].layout, self._lanes[lane].kind
        cost = self.profile.worker(worker, self._gangs[worker][lane], kind, name)
        return 0.0 if cost is None else cost.onload if what == "onload" else cost.offload

    def transfer(self, producer: int, source: int, target: int, items: int) -> float:
        link = self.profile.links.get(self._place((source,), target))
        size = Bytes(self._stages[producer].output_bytes * items)
        return 0.0 if link is None else link.seconds(size)

    def item_bytes(self, node: StageNode) -> int:
        return self._stages[node.index].output_bytes

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        """Items leave after as many visits of members as their turns say, halves of turns too."""
        assert node.loop is not None
        loop, key = self.graph.loops[node.loop], (node.loop, step, item)
        left = self._visits_left.pop(key, None)
        if left is None:
            first = self.graph.nodes[loop.members[0]]
            turns, wanted = self._stages[first.index].turns, float(loop.max_turns or 1)
            if turns is not None:
                wanted = turns.at(self._drawn(TURNS, first, step, item))
            left = max(1, round(wanted * len(loop.members)))
        if left > 1:
            self._visits_left[key] = left - 1
        return left == 1
