"""Workloads on which the planner is held against the fixed modes. See the files for their reasons.

A workload is frozen once a result of it is checked in: a changed one needs a decision record with
the figures before and after.
"""

from __future__ import annotations

from workloads.common import LANES, Workload
from workloads.first import few_judged, first_judged
from workloads.first_poles import first_cart_pole
from workloads.frozen import judged, long_tail, ppo
from workloads.of_recipes import one_step_ahead, ppo_one_minibatch, wider, with_reference
from workloads.poles import cart_pole

__all__ = ["FIRST", "FROZEN", "LANES", "OF_RECIPES", "WORKLOADS", "Workload"]

FROZEN = (long_tail, judged, ppo, cart_pole)
FIRST = (first_judged, few_judged, first_cart_pole)
"""What two of the four were before; the other two have not changed."""

OF_RECIPES = (wider, with_reference, one_step_ahead, ppo_one_minibatch)
WORKLOADS = (*FROZEN, *FIRST, *OF_RECIPES)
