"""Prices that the benchmark of published tables makes by itself: the planner takes them."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest

from m2flow.models.work import RATES
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import parse_cluster


@pytest.mark.parametrize("row", ["GRPO_7B", "PPO_7B", "GRPO_MOE"])
def test_a_published_row_has_a_profile(row: str) -> None:
    plans: Any = importlib.import_module("paper_plans")
    work = getattr(importlib.import_module("paper_tables"), row)
    flow = plans.Grpo(
        generator=plans.Generator(work.group), actor=plans.Trainer(work.updates), known=False
    )
    if work.trained == 2:
        critic = plans.Trainer(work.updates)
        flow = plans.Ppo(generator=flow.generator, actor=flow.actor, critic=critic, known=False)
    graph = flow.trace()
    priced = partial(plans.priced, work, graph, RATES)
    profile = analytic_profile(graph, parse_cluster("4x8xH100"), priced, 64)
    layouts = {cost.layout for cost in profile.stage("generator.generate").costs}
    assert "tp4" in layouts
    assert all(node.name in profile.stages for node in graph.nodes)
