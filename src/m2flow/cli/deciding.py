"""What `m2flow plan` decides from: a recipe, lanes that may not exist, and a profile of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.plan import build_plan, isolated_workers, read_plan
from m2flow.plan.account import LaneAccount, accounts
from m2flow.plan.builders import first_that_divides
from m2flow.plan.choose import check_fits, choose
from m2flow.plan.choose.judge import shape, sized
from m2flow.plan.prediction import Candidate, Decision
from m2flow.plan.profile import Profile
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import Cluster, lane_specs, parse_cluster
from m2flow.plan.profile.work import Pricer
from m2flow.plan.units import Items
from m2flow.plan.validate import check_executable
from m2flow.workloads.common.computed import lanes_named
from m2flow.workloads.common.planning import (
    check_plan,
    flow_of,
    lanes_of,
    layouts_of,
    under_limit,
    with_limit,
)
from m2flow.workloads.common.profile_key import profile_key
from m2flow.workloads.common.recipe import AUTO_MODE, Recipe
from m2flow.workloads.common.registry import workload_of
from m2flow.workloads.common.workload import NOTHING_ASSUMED, Assumed

FULL = 8
"""Lanes of a machine that is filled before there is a second one."""

MOST_LANES = 4096
"""Where the search for a larger cluster ends."""


@dataclass(frozen=True)
class Question:
    """What is to be planned.

    Attributes:
        recipe: whose flow; None while it has not been read.
        mode: "auto", a fixed mode, or None for what the other fields imply.
        plan_file: a plan to be judged.
        cluster: lanes that need not exist, such as "16x8xH100".
        assumed: facts that replace the recipe's own on a cluster.
        profile_file: a stored profile; `reuse` takes it even if it is of something else.
    """

    recipe: Recipe | None = None
    mode: str | None = None
    plan_file: Path | None = None
    cluster: str | None = None
    assumed: Assumed = NOTHING_ASSUMED
    profile_file: Path | None = None
    reuse: bool = False


class Planning:
    """A recipe, lanes and a profile: what a decision is taken from."""

    def __init__(self, asked: Question) -> None:
        assert asked.recipe is not None, "the recipe is read by now"
        self.asked, self.recipe = asked, asked.recipe
        if asked.mode == "eager":
            raise UserError(
                "an eager run has one process, and nothing to plan",
                key="--mode",
                value=asked.mode,
                hint="leave out --cluster and --profile to see its plan",
            )
        self.flow = flow_of(self.recipe, asked.assumed.model)
        self.graph: FlowGraph = self.flow.trace()
        self.isolated = isolated_workers(self.flow)
        self.cluster: Cluster | None = None
        if asked.cluster is not None:
            there = parse_cluster(asked.cluster, "--cluster")
            self.cluster = under_limit(there, self.recipe)
        self.layouts = layouts_of(self.recipe, self.flow, self._lanes(self.cluster))
        self.prices: Pricer | None = None
        if self.cluster is not None:
            workload = workload_of(self.recipe)
            self.prices = workload.prices(self.recipe, self.graph, asked.assumed)

    def decision(self) -> Decision:
        """What is chosen: by the planner, or by the person who named a mode or a plan."""
        mine = self._own_plan()
        decision = self.decided(self._lanes(self.cluster), mine)
        if mine is not None:
            return _of_plan(decision, mine)
        if self.asked.mode not in (None, AUTO_MODE):
            decision = self._of_mode(decision, self.recipe.mode)
        plan = replace(decision.chosen.plan, deadline_seconds=self.recipe.deadline_seconds)
        return replace(decision, chosen=replace(decision.chosen, plan=plan))

    def account(self, decision: Decision) -> list[LaneAccount]:
        """Who holds how much on each kind of lane; nothing where that was not computed."""
        if self.cluster is None or self.prices is None or self.asked.profile_file is not None:
            return []
        kinds, plan = self.cluster.kinds.items(), decision.chosen.plan
        works = {kind: self.prices(device, self.cluster.lanes_of(kind)) for kind, device in kinds}
        return accounts(plan, self.graph, works, decision.profile, decision.num_items)

    def _own_plan(self) -> Plan | None:
        if self.asked.plan_file is None:
            return None
        mine = read_plan(self.asked.plan_file)
        if self.cluster is not None:
            mine = self._on_cluster(mine, self.cluster)
        check_plan(mine, self.flow, self.graph, self.recipe.items_per_step)
        if self.cluster is None:
            check_executable(mine)
        return mine

    def _on_cluster(self, mine: Plan, cluster: Cluster) -> Plan:
        """A plan of the user's with the cluster's limits, where it says none.

        Raises:
            UserError: it has lanes that the cluster lacks.
        """
        mine, there = lanes_named(mine, cluster), self._lanes(cluster)
        limits = {lane.kind: lane.memory_bytes for lane in there}
        free = [lane for lane in mine.lanes if lane.reserved_for is None]
        wanted, known = (Counter((x.node, x.kind) for x in some) for some in (free, there))
        for (node, kind), count in sorted((wanted - known).items()):
            raise UserError(
                f"the cluster lacks {count} of the plan's {kind} lanes on machine {node}",
                key="--plan",
                value=f"{len(free)} lanes",
                expected=f"lanes of {cluster}",
            )
        lanes = tuple(
            replace(x, memory_bytes=x.memory_bytes or limits.get(x.kind)) for x in mine.lanes
        )
        return replace(mine, lanes=lanes)

    def _sized(self, mine: Plan, profile: Profile) -> Plan:
        """A plan of the user's with the sizes that it does not say."""
        known = sized(mine, self.graph, profile, self.recipe.items_per_step).placements
        spots = {
            worker: replace(
                spot,
                state_bytes=spot.state_bytes or known[worker].state_bytes,
                working_bytes=spot.working_bytes or known[worker].working_bytes,
            )
            for worker, spot in mine.placements.items()
        }
        return replace(mine, placements=spots)

    def decided(self, lanes: Sequence[LaneSpec], mine: Plan | None = None) -> Decision:
        """The planner's choice for some lanes, with a plan of the user's judged beside its own."""
        try:
            profile = self._profile(self.cluster)
            options = self._layouts(profile, lanes)
            return choose(
                self.graph,
                profile,
                lanes,
                self.recipe.items_per_step,
                max_staleness=self.recipe.max_staleness,
                isolated=self.isolated,
                layouts={worker: some[0] for worker, some in options.items()},
                instead={worker: some[1:] for worker, some in options.items()},
                beside=[] if mine is None else [self._sized(mine, profile)],
            )
        except UserError as error:
            if self.cluster is None or self.asked.profile_file or not self._refusal(self.cluster):
                raise
            raise self._too_small(error) from error

    def _lanes(self, cluster: Cluster | None) -> tuple[LaneSpec, ...]:
        """The cluster's lanes or the recipe's, under the recipe's limit of memory if it has one."""
        if cluster is None:
            return lanes_of(self.recipe)
        return with_limit(lane_specs(cluster), self.recipe)

    def _profile(self, cluster: Cluster | None) -> Profile:
        """Computed for a cluster, read from the file that was named, or measured here before."""
        computed = None
        if cluster is not None:
            assert self.prices is not None
            items = self.recipe.items_per_step
            computed = analytic_profile(self.graph, cluster, self.prices, items)
            if self.asked.profile_file is None:
                return computed
        from m2flow.runtime.profiling.stored import cached, given  # NumPy comes along

        key = profile_key(self.recipe, lanes_of(self.recipe)) if computed is None else computed.key
        if self.asked.profile_file is not None:
            return given(self.asked.profile_file, key, whatever_its_key=self.asked.reuse)
        found = cached(key, self.graph)
        if found is None:
            raise UserError(
                "nothing has been measured for this recipe on these lanes",
                key="--mode",
                value=AUTO_MODE,
                hint="`m2flow profile RECIPE` measures first, --cluster computes",
            )
        return found

    def _layouts(
        self, profile: Profile, lanes: Sequence[LaneSpec]
    ) -> dict[str, tuple[Layout, ...]]:
        """Layouts of workers in the plans of fixed modes: the recipe's, where they have a price.

        Else one of each size, of several the one that is priced first: those that fit every kind of
        lane, or else any, the fewest lanes first, and then the others, the most lanes first.
        """
        found: dict[str, tuple[Layout, ...]] = {}
        sources = {edge.source for edge in self.graph.weight_edges}
        for worker in sorted(self.graph.workers, key=sources.__contains__):
            nodes = [node for node in self.graph.nodes if node.worker == worker]
            costs = [profile.stage(node.name).costs for node in nodes]
            known = [{one.where for one in some} for some in costs]
            priced = dict.fromkeys(one.where for one in costs[0])
            options = [one for one in priced if all(one in some for some in known)]
            wanted = self.layouts.get(worker)
            names = {name for name, *_ in options}
            if wanted and options and wanted.name not in names:
                raise UserError(
                    "has no price on these lanes",
                    key=f"layouts.{worker}",
                    value=wanted.name,
                    expected=" or ".join(sorted(names)),
                )
            if wanted or not options:
                found[worker] = (wanted or ONE_LANE,)
                continue
            others = {name: some[0] for name, some in found.items()}
            fitting = [one for one in options if self._fits(profile, lanes, worker, one, others)]
            kinds = {kind for *_, kind in options}
            everywhere = [one for one in fitting if all((*one[:2], x) in fitting for x in kinds)]
            sizes: dict[int, Layout] = {}
            rising = sorted(everywhere or fitting or options, key=lambda one: one[1])
            falling = sorted(options, key=lambda one: one[1], reverse=True)
            for name, size, _ in (*rising, *falling):
                sizes.setdefault(size, Layout(name, size))
            found[worker] = tuple(sizes.values())
        return {worker: some for worker, some in found.items() if some[0].lanes > 1}

    def _fits(
        self,
        profile: Profile,
        lanes: Sequence[LaneSpec],
        worker: str,
        option: tuple[str, int, str],
        others: Mapping[str, Layout],
    ) -> bool:
        """Whether a worker has room for its calls in a layout, and beside those that it publishes
        to, in the layouts that they have.
        """
        name, size, kind = option
        limits = [one.memory_bytes for one in lanes if one.kind == kind and one.memory_bytes]
        state = profile.worker(worker, size, kind, name)
        if not limits or state is None:
            return True
        most = 0
        for node in self.graph.nodes:
            if node.worker == worker and not node.streaming:  # that takes what it is given
                items = Items(self.recipe.items_per_step * node.fanout)
                cost = profile.cost(node.name, name, size, kind)
                most = max(most, cost.working_bytes(items))
        for edge in self.graph.weight_edges:
            if edge.source == worker and edge.target in others:
                theirs = others[edge.target]
                target = profile.worker(edge.target, theirs.lanes, kind, theirs.name)
                most = max(most, target.state_bytes if target is not None else 0)
        return state.state_bytes + most <= min(limits)

    def _of_mode(self, decision: Decision, mode: str) -> Decision:
        """The decision for the fastest plan of a mode among those that were simulated."""
        every = sorted(
            (one for one in (decision.chosen, *decision.others) if one.plan.mode == mode),
            key=lambda one: one.prediction.seconds,
        )
        if every:
            return _with_choice(decision, every[0])
        lanes = [lane for lane in decision.chosen.plan.lanes if lane.reserved_for is None]
        num_items = self.recipe.items_per_step
        build = partial(build_plan, mode, self.graph, lanes, num_items, self.isolated)
        why = "a plan of this mode does not keep the limits of these lanes"
        options = self._layouts(decision.profile, lanes)
        try:
            first_that_divides(build, options)
        except UserError as error:
            worker = (error.key or "").removeprefix("layouts.")
            if worker not in self.graph.workers or worker in self.layouts:
                raise  # the mode, or a layout that was named, does not fit the lanes
            sizes = " or ".join(str(n) for n in sorted({one.lanes for one in options[worker]}))
            why = f"{worker}: {error.message}, and layouts of {sizes} lanes alone have a price"
        raise UserError(
            why,
            key="--mode",
            value=mode,
            hint="--mode auto finds one that does",
        )

    def _too_small(self, error: UserError) -> UserError:
        """The refusal, with the smallest number of lanes that would do, or why none would."""
        assert self.cluster is not None
        refused = partial(UserError, error.message, key="--cluster", value=str(self.cluster))
        why = error.message
        for larger in _doubled(self.cluster):
            reason = self._refusal(larger)
            if reason is None:
                return refused(expected=f"more lanes, such as {larger}")
            why = reason.message
        return refused(hint=f"no number of such lanes would do: {why}")

    def _refusal(self, cluster: Cluster) -> UserError | None:
        """Say why no plan keeps the limits there; None if one does."""
        try:
            profile, lanes = self._profile(cluster), self._lanes(cluster)
            check_fits(self.graph, profile, lanes, self.recipe.items_per_step)
        except UserError as error:
            return error
        return None


def _doubled(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with twice as many lanes each time, first on one machine, up to MOST_LANES."""
    first, rest = cluster.machines[0], cluster.machines[1:]
    while 2 * first.num_lanes <= MOST_LANES:
        if first.nodes == 1 and 2 * first.num_lanes <= FULL:
            device = replace(first.device, lanes_per_node=2 * first.num_lanes)
            first = replace(first, device=device)
        else:
            first = replace(first, nodes=2 * first.nodes)
        yield Cluster((first, *rest))


def _of_plan(decision: Decision, plan: Plan) -> Decision:
    """The decision for a plan that was judged beside the others."""
    every = (decision.chosen, *decision.others)
    for one in every:
        if shape(one.plan) == shape(plan):
            return _with_choice(decision, one)
    why = decision.ruled_out.get(plan.mode, "the profile has no price for this plan")
    raise UserError(why, key="--plan")


def _with_choice(decision: Decision, chosen: Candidate) -> Decision:
    every = (decision.chosen, *decision.others)
    others = tuple(one for one in every if one is not chosen)
    return replace(decision, chosen=chosen, others=others)
