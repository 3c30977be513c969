"""The half of a loop that answers: it reads calls in turns, and puts the answers behind them.

Who answers, a toolbox or another policy, is a subclass's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from m2flow.flow import Batch, Place, Worker, stage
from m2flow.tools import ToolCall, ToolResult
from m2flow.workloads.agentic.config import EpisodeSection
from m2flow.workloads.agentic.episodes import Turn, appended
from m2flow.workloads.reasoning.workers import ModelSource

if TYPE_CHECKING:
    from m2flow.workloads.agentic.dialect import Dialect


class Caller(Worker):
    """Carries out the calls of trajectories, and says which trajectories are at their end.

    Args:
        model: whose tokenizer turns answers into tokens.
        episode: limits, and how calls are written.
        tools: names of what may be called.
        chat_options: variables of the chat template, where answers are turns of one.
    """

    dialect: Dialect

    def __init__(
        self,
        model: ModelSource,
        episode: EpisodeSection,
        tools: Sequence[str],
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.episode, self.tools = model, episode, tuple(tools)
        self.chat_options = chat_options

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.workloads.agentic.dialect import dialect_of

        tokenizer = self.model.tokenizer()
        self.dialect = dialect_of(tokenizer, self.episode, self.tools, self.chat_options)

    def answers(self, calls: Sequence[ToolCall], seeds: Sequence[int]) -> list[ToolResult]:
        """The answer of each call.

        Args:
            calls: of all trajectories.
            seeds: one for each call, for who draws.
        """
        raise NotImplementedError

    @stage
    def call(self, episodes: Batch) -> Batch:
        """Carry out what the last turns ask for; those that ask for nothing are done.

        A trajectory is done as well (`finish_reason`) where it has had its turns ("turns"), where
        its tokens are used up ("length"), and where a tool does not work ("tool").
        """
        import torch

        ids = [row.tolist() for row in episodes["completion_ids"].rows()]
        turns: list[list[Turn]] = [list(some) for some in episodes["turns"]]
        reasons = list(episodes["finish_reason"])
        asked = [
            self._asked(tokens, some, reason)
            for tokens, some, reason in zip(ids, turns, reasons, strict=True)
        ]
        found = iter(self._carried_out(asked, episodes))
        failures, rows = list(episodes["tool_failure"]), []
        for row, calls in enumerate(asked):
            answers = [call if isinstance(call, ToolResult) else next(found) for call in calls]
            failures[row] = next((one.failure for one in answers if one.failure), "")
            last, more = turns[row][-1], list[int]()
            if answers and len(turns[row]) == self.episode.max_turns:
                reasons[row] = "turns"
            elif answers:
                last = replace(
                    last,
                    tools=tuple(call.tool for call in calls if isinstance(call, ToolCall)),
                    malformed=sum(isinstance(call, ToolResult) for call in calls),
                    errors=sum(one.error for one in answers),
                    seconds=sum(one.seconds for one in answers),
                )
                if failures[row]:
                    reasons[row] = "tool"
                else:
                    told, num_cut = self.dialect.result_ids(answers)
                    more = self.dialect.end_ids(ids[row]) + told
                    if last.end + len(more) >= self.episode.max_tokens:
                        more, reasons[row] = [], "length"
                    last = replace(last, cut=num_cut, result_end=last.end + len(more))
                turns[row][-1] = last
            rows.append(more)
        logprobs = episodes["behaviour_logprobs"].values
        grown = appended(
            episodes,
            [
                (
                    torch.tensor(more, dtype=torch.int64),
                    torch.zeros(len(more), dtype=torch.bool),
                    logprobs.new_zeros(len(more)),
                )
                for more in rows
            ],
        )
        return grown.with_columns(
            turns=turns,
            finish_reason=reasons,
            tool_failure=failures,
            done=torch.tensor([not more for more in rows]),
        )

    def _asked(self, ids: list[int], turns: list[Turn], reason: str) -> list[ToolCall | ToolResult]:
        """The calls in the last turn, if it came to its end and another turn may follow."""
        if reason != "stop":
            return []
        last = turns[-1]
        calls = self.dialect.calls(ids[last.begin : last.end])
        if calls and len(turns) == self.episode.max_turns:
            return [ToolResult("no turn is left", error=True)]  # nothing is carried out for nobody
        return calls

    def _carried_out(
        self, asked: Sequence[Sequence[ToolCall | ToolResult]], episodes: Batch
    ) -> list[ToolResult]:
        from m2flow.algorithms.sampling import derive_seed

        calls: list[ToolCall] = []
        seeds: list[int] = []
        for some, seed, turns in zip(asked, episodes["seed"], episodes["turns"], strict=True):
            for number, call in enumerate(some):
                if isinstance(call, ToolCall):
                    calls.append(call)
                    seeds.append(derive_seed(int(seed), 4, len(turns), number))
        return self.answers(calls, seeds)


def written(turns: Sequence[Turn], ids: Sequence[int], tokenizer: Any) -> list[dict[str, Any]]:
    """Turns as text, for people and rewards: never to be encoded again."""
    found = []
    for turn in turns:
        result = ids[turn.end : turn.result_end]
        found.append(
            {
                "text": tokenizer.decode(ids[turn.begin : turn.end], skip_special_tokens=True),
                "tokens": turn.end - turn.begin,
                "tools": list(turn.tools),
                "result": tokenizer.decode(result, skip_special_tokens=True) if result else "",
                "result_tokens": len(result),
                "malformed": turn.malformed,
                "errors": turn.errors,
                "cut": turn.cut,
                "seconds": turn.seconds,
            }
        )
    return found
