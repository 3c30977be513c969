"""What `m2flow plan` decides from: a recipe, lanes that may not exist, and a profile of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from m2flow.cli.larger import fuller, smallest
from m2flow.cli.plan import Asked
from m2flow.cli.planning import AUTO_MODE, flow_of, lanes_of, layouts_of
from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.plan import (
    build_plan,
    isolated_workers,
    parse_bytes,
    read_plan,
    validate,
    with_memory,
)
from m2flow.plan.choose import check_fits, choose
from m2flow.plan.prediction import Candidate, Decision
from m2flow.plan.profile import Profile
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import Cluster, lane_specs, parse_cluster
from m2flow.plan.profile.work import Pricer
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.work import prices


class Planning:
    """A recipe, lanes and a profile: what a decision is taken from."""

    def __init__(self, recipe: ReasoningRecipe, asked: Asked, wanted: str | None) -> None:
        self.recipe, self.asked, self.wanted = recipe, asked, wanted
        if wanted == "eager":
            raise UserError(
                "an eager run has one process, and nothing to plan",
                key="--mode",
                value=wanted,
                hint="leave out --cluster and --profile to see its plan",
            )
        flow = flow_of(recipe)
        self.graph: FlowGraph = flow.trace()
        self.isolated = isolated_workers(flow)
        self.cluster = None if asked.cluster is None else parse_cluster(asked.cluster, "--cluster")
        self.prices: Pricer | None = None
        if self.cluster is not None:
            self.prices = prices(
                recipe, self.graph, asked.model, asked.prompt_tokens, asked.answer_tokens
            )

    def decision(self) -> Decision:
        """What is chosen: by the planner, or by the person who named a mode or a plan."""
        mine = self._own_plan()
        lanes = self._lanes(self.cluster)
        decision = self.decided(lanes, [] if mine is None else [mine])
        if mine is not None:
            return _of_plan(decision, mine)
        if self.wanted not in (None, AUTO_MODE):
            decision = self._of_mode(decision, self.recipe.mode)
        plan = replace(decision.chosen.plan, deadline_seconds=self.recipe.deadline_seconds)
        return replace(decision, chosen=replace(decision.chosen, plan=plan))

    def _own_plan(self) -> Plan | None:
        if self.asked.plan_file is None:
            return None
        mine = read_plan(self.asked.plan_file)
        validate(mine, self.graph, self.recipe.prompts_per_step, self.isolated)
        return mine

    def decided(self, lanes: Sequence[LaneSpec], beside: Sequence[Plan] = ()) -> Decision:
        """The planner's choice for some lanes, with further plans judged beside its own."""
        try:
            profile = self._profile(self.cluster)
            return choose(
                self.graph,
                profile,
                lanes,
                self.recipe.prompts_per_step,
                max_staleness=self.recipe.max_staleness,
                isolated=self.isolated,
                layouts=self._layouts(profile),
                beside=beside,
            )
        except UserError as error:
            if self.cluster is None or self.asked.profile_file or not self._refusal(self.cluster):
                raise
            raise self._too_small(error) from error

    def _lanes(self, cluster: Cluster | None) -> tuple[LaneSpec, ...]:
        """The cluster's lanes or the recipe's, under the recipe's limit of memory if it has one."""
        if cluster is None:
            return lanes_of(self.recipe)
        limit = self.recipe.lane_memory
        lanes = lane_specs(cluster)
        return lanes if limit is None else with_memory(lanes, parse_bytes(limit, "lane_memory"))

    def _profile(self, cluster: Cluster | None) -> Profile:
        """Computed for a cluster, read from the file that was named, or measured here before."""
        from m2flow.cli.profile_key import profile_key
        from m2flow.runtime.profiling.stored import cached, given

        file, reuse = self.asked.profile_file, self.asked.reuse
        if cluster is not None:
            assert self.prices is not None
            computed = analytic_profile(
                self.graph, cluster, self.prices, self.recipe.prompts_per_step
            )
            return computed if file is None else given(file, computed.key, whatever_its_key=reuse)
        key = profile_key(self.recipe, lanes_of(self.recipe))
        found = cached(key) if file is None else given(file, key, whatever_its_key=reuse)
        if found is None:
            raise UserError(
                "nothing has been measured for this recipe on these lanes",
                key="--mode",
                value=AUTO_MODE,
                hint=f"`m2flow profile {self.asked.recipe}` measures first, --cluster computes",
            )
        return found

    def _layouts(self, profile: Profile) -> dict[str, Layout]:
        """Lanes for a copy of each worker in the plans of fixed modes: the fewest that it fits."""
        asked = layouts_of(self.recipe, self.graph)
        found = {}
        for worker in self.graph.workers:
            nodes = [node for node in self.graph.nodes if node.worker == worker]
            costs = [profile.stage(node.name).costs for node in nodes]
            fitting = set.intersection(*({cost.lanes for cost in some} for some in costs))
            wanted = asked.get(worker, ONE_LANE)
            if wanted.lanes not in fitting and fitting:
                least = min(fitting)
                name = next(cost.layout for cost in costs[0] if cost.lanes == least)
                wanted = Layout(name, least)
            if wanted.lanes > 1:
                found[worker] = wanted
        return found

    def _of_mode(self, decision: Decision, mode: str) -> Decision:
        """The decision for the fastest plan of a mode among those that were simulated."""
        every = sorted(
            (one for one in (decision.chosen, *decision.others) if one.plan.mode == mode),
            key=lambda one: one.prediction.seconds,
        )
        if every:
            return _with_choice(decision, every[0])
        lanes = [lane for lane in decision.chosen.plan.lanes if lane.reserved_for is None]
        build_plan(  # says why, where the mode does not fit the lanes
            mode, self.graph, lanes, self.recipe.prompts_per_step, self.isolated,
            self._layouts(decision.profile),
        )  # fmt: skip
        raise UserError(
            "a plan of this mode does not keep the limits of these lanes",
            key="--mode",
            value=mode,
            hint="--mode auto finds one that does",
        )

    def _too_small(self, error: UserError) -> UserError:
        """The refusal, with the smallest number of lanes that would do, or why none would."""
        assert self.cluster is not None
        what = str(error).split(";")[0].removeprefix(f"{error.key}: ")
        found = smallest(self.cluster, lambda cluster: self._refusal(cluster) is None)
        if found is not None:
            enough = f"at least {found.num_lanes} lanes, such as {found}"
            return UserError(what, key="--cluster", expected=enough)
        reason = self._refusal(list(fuller(self.cluster))[-1])
        return UserError(what, key="--cluster", hint=f"no number of such lanes would do: {reason}")

    def _refusal(self, cluster: Cluster) -> UserError | None:
        """Say why no plan keeps the limits there; None if one does."""
        try:
            profile, lanes = self._profile(cluster), self._lanes(cluster)
            check_fits(self.graph, profile, lanes, self.recipe.prompts_per_step)
        except UserError as error:
            return error
        return None


def _of_plan(decision: Decision, plan: Plan) -> Decision:
    """The decision for a plan that was judged beside the others."""
    every = (decision.chosen, *decision.others)
    for one in every:
        if replace(one.plan, predicted_seconds=plan.predicted_seconds) == plan:
            return _with_choice(decision, one)
    raise UserError("the profile has no price for this plan", key="--plan")


def _with_choice(decision: Decision, chosen: Candidate) -> Decision:
    every = (decision.chosen, *decision.others)
    others = tuple(one for one in every if one is not chosen)
    return replace(decision, chosen=chosen, others=others)
