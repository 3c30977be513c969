"""What a plan's seconds are made of, and which limits a plan must keep."""

from __future__ import annotations

from dataclasses import dataclass

from m2flow.errors import PlanError
from m2flow.plan.search.problem import Problem
from m2flow.plan.search.tree import Cost
from m2flow.plan.search.weights import companions_seconds


@dataclass(frozen=True, slots=True)
class Terms:
    """What seconds are made of: work, states brought and taken away, links, and waiting for the
    slowest part of a pipeline while it fills and drains."""

    compute: float = 0.0
    switching: float = 0.0
    links: float = 0.0
    waiting: float = 0.0

    def __add__(self, other: Terms) -> Terms:
        return Terms(
            self.compute + other.compute,
            self.switching + other.switching,
            self.links + other.links,
            self.waiting + other.waiting,
        )

    def times(self, count: float) -> Terms:
        """So many times all of it."""
        return Terms(
            count * self.compute, count * self.switching, count * self.links, count * self.waiting
        )

    @property
    def total(self) -> float:
        return self.compute + self.switching + self.links + self.waiting


@dataclass(frozen=True, slots=True)
class Priced:
    """A node's cost, and what its first chunk and its period are made of.

    Attributes:
        cost: as the search has it.
        first, period: terms of F and P.
        first_error, period_error: standard errors of F and P in seconds, from those of the stages'
            prices: of one stage they add, of different ones their squares do.
    """

    cost: Cost
    first: Terms
    period: Terms
    first_error: float = 0.0
    period_error: float = 0.0


class Infeasible(PlanError):
    """A plan tree that breaks a limit or a rule of its words."""


def step_seconds(problem: Problem, cost: Cost) -> float:
    """Seconds of a step whose root costs this."""
    return cost.first + cost.publishing + companions_seconds(problem)


def check_limits(problem: Problem, cost: Cost) -> None:
    """Refuse what takes more than there is.

    Raises:
        Infeasible: says what there is too little of.
    """
    limits = problem.limits
    if cost.peak > 1:
        raise Infeasible("takes more memory than a lane has", value=cost.peak, expected="at most 1")
    if limits.cores is not None and cost.cores > limits.cores:
        raise Infeasible("takes more cores than there are", value=cost.cores)
    if limits.host_bytes is not None and cost.host > limits.host_bytes:
        raise Infeasible("takes more memory than the machines have", value=cost.host)
