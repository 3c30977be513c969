"""What generation takes on lanes that are not here: played answer by answer, and told in two ways.

`seconds` and `done` say when answers that came together are out: what a plan search asks. `round`
and `admit` are the decoding step by requests at work and the prompts' prefill, `resume` that of
answers which were begun elsewhere: with them a simulation draws lengths and plays the tail of every
replica itself.
"""

from __future__ import annotations

import math

from m2flow.plan.analytic_training import Place
from m2flow.plan.analytic_work import Generate
from m2flow.plan.footprint import check_generation_fits, running_limit
from m2flow.plan.generating import by_whole_groups, generate, requests
from m2flow.plan.profile import Piecewise, StageCost
from m2flow.plan.roofline import (
    Layout,
    decode_step_seconds,
    kv_bytes_per_lane,
    prefill_seconds,
)
from m2flow.plan.sampled import curve, rising

MOST_PLAYED = 2048
"""Answers of one replica that are played; beyond them time goes on in proportion."""

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Of the prompts of a replica, at which it is told how far its seconds are."""

CHANGES_LANES = 0.8
"""An answer that changes lanes has grown to the length that such a share of all does not exceed."""


def generated_on(work: Generate, group: int, place: Place) -> list[StageCost]:
    """A layout for each number of lanes that holds the longest answer and each running limit.

    A plan limits prompts, the work says answers. The largest limit is the generator's own, and asks
    nothing of a plan unless memory holds less.

    Args:
        group: answers to a prompt; items are prompts.

    Raises:
        UserError: no number of these lanes holds it; says the smallest that would.
    """
    found = []
    longest = work.answers.longest
    for layout in check_generation_fits(work.model, place.lanes, place.device, longest):
        fitting = running_limit(work.model, place.device, layout, work.answers.tokens)
        own = max(work.max_running)
        limits = {max(1, min(limit, fitting) // group): limit for limit in work.max_running}
        for prompts in sorted(limits):
            free = limits[prompts] == own <= fitting
            limit = own if free else prompts * group
            replica = _Replica(work, group, layout, limit, place)
            found.append(replica.layout(None if free else prompts))
    return found


class _Replica:
    """One way to lay a generating replica out."""

    def __init__(
        self, work: Generate, group: int, layout: Layout, limit: int, place: Place
    ) -> None:
        self.work, self.group, self.cut, self.limit, self.place = work, group, layout, limit, place

    def step(self, running: float, kv_tokens: float) -> float:
        """Seconds of a decoding step."""
        return decode_step_seconds(
            self.work.model, running, kv_tokens, self.place.device, self.cut, self.place.rates
        )

    def admit(self, prompts: int) -> float:
        """Seconds of the prefill of so many prompts."""
        tokens = self.work.answers.prompt_tokens
        return prefill_seconds(
            self.work.model, prompts * tokens, tokens / 2, self.place.device, self.cut,
            self.place.rates,
        )  # fmt: skip

    def resume(self, tokens: int) -> float:
        """Seconds of the prefill of answers that have so many tokens together, prompts included."""
        answers = self.work.answers
        each = answers.lengths.quantile(CHANGES_LANES)
        whole = each + answers.prompt_tokens
        return prefill_seconds(
            self.work.model, tokens / each * whole, whole / 2, self.place.device, self.cut,
            self.place.rates,
        )  # fmt: skip

    def ends(self, prompts: int) -> tuple[float, ...]:
        """Seconds until each of SHARES of so many prompts has all its answers."""
        answers = self.work.answers
        lengths = answers.lengths.sample(prompts * self.group)
        wanted = requests(lengths, answers.prompt_tokens, self.group)
        whole = generate(wanted, 1, self.step, self.limit, start=self.admit(prompts))
        out = by_whole_groups(whole.finished)
        return tuple(out[math.ceil(share * len(out)) - 1].seconds for share in SHARES)

    def round(self, running: int) -> float:
        """Seconds of a token of each request, those beyond the limit taking turns."""
        at_once = min(running, self.limit)
        context = self.work.answers.context
        return running / at_once * self.step(at_once, at_once * context)

    def layout(self, max_running: int | None) -> StageCost:
        model, answers, most = self.work.model, self.work.answers, self.place.most
        counts = [n for n in rising(most) if n * self.group <= MOST_PLAYED] or [1]
        ends = {count: self.ends(count) for count in counts}
        last = ends[counts[-1]]
        shares = (0.0, *(min(1.0, at / last[-1]) for at in last[:-1]), 1.0)
        cache = kv_bytes_per_lane(model, self.cut) * answers.tokens
        held = [(float(n), min(n * self.group, self.limit) * cache) for n in rising(most)]
        return StageCost(
            self.cut.lanes,
            curve(lambda count: ends[count][-1], counts),
            max_running=max_running,
            done=Piecewise(tuple(zip((0.0, *SHARES), shares, strict=True))),
            round=curve(self.round, [*rising(self.limit), 2 * self.limit]),
            admit=curve(self.admit, rising(most)),
            resume=curve(self.resume, rising(most * answers.lengths.maximum)),
            working=Piecewise(tuple(held)),
        )
