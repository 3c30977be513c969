"""What trajectories and their turns are worth: the worker that scores, and their advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from m2flow.flow import Batch, Place, Ragged, stage
from m2flow.rewards.reward import Judged, Scores, WeightedReward, weighted_sum
from m2flow.workloads.agentic.config import EpisodeSection
from m2flow.workloads.agentic.workers.caller import written
from m2flow.workloads.reasoning.workers import ModelSource, Verifier, group_advantage


class TrajectoryVerifier(Verifier):
    """Scores trajectories by what the model wrote last, and turns by functions of their own.

    Args:
        model: whose tokenizer turns token ids into text.
        rewards: judge the last turn, where a trajectory was cut off without the calls in it, which
            nobody has answered; their rows have `turns`, all turns as `written` gives them.
        turn_rewards: judge each turn's text; their rows have `turn`, its number, and of the turn
            what `written` gives.
        episode: how calls are written.
        chat_options: variables of the chat template, where answers are turns of one.
    """

    def __init__(
        self,
        model: ModelSource,
        rewards: Sequence[WeightedReward] | None = (),
        turn_rewards: Sequence[WeightedReward] = (),
        episode: EpisodeSection | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, rewards)
        self.turn_rewards = tuple(turn_rewards)
        self.episode, self.chat_options = episode or EpisodeSection(), chat_options

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.workloads.agentic.dialect import dialect_of

        self._dialect = dialect_of(self.tokenizer, self.episode, (), self.chat_options)
        for reward in self.turn_rewards:
            reward.load()

    @stage
    def score(self, samples: Batch) -> Batch:
        """Adds `text`, `turns` as text, `reward`, `turn_rewards`, `shaped`, `failure`.

        `shaped` is the reward with those of the turns. A trajectory whose tool did not work has no
        reward.
        """
        import torch

        ids = [row.tolist() for row in samples["completion_ids"]]
        turns = [
            written(some, row, self.tokenizer)
            for some, row in zip(samples["turns"], ids, strict=True)
        ]
        last = [row[some[-1].begin : some[-1].end]
                for some, row in zip(samples["turns"], ids, strict=True)]  # fmt: skip
        prompts = [row.tolist() for row in samples["prompt_ids"].rows()]
        ends = [
            [self.prompt_end([*prompt, *row[: turn.begin]]) for turn in some]
            for prompt, row, some in zip(prompts, ids, samples["turns"], strict=True)
        ]
        told = [
            {
                **metadata,
                "answer": answer,
                "finished": reason == "stop",
                "turns": some,
                "prompt_end": of_turn[-1],
            }
            for metadata, answer, reason, some, of_turn in zip(
                samples["metadata"], samples["answer"], samples["finish_reason"], turns, ends,
                strict=True,
            )
        ]  # fmt: skip
        assert self.rewards is not None
        texts = [
            some[-1]["text"] if reason == "stop" else self._dialect.without_calls(drawn)
            for some, drawn, reason in zip(turns, last, samples["finish_reason"], strict=True)
        ]
        scores = weighted_sum(
            self.rewards, Judged(samples.ids, samples["prompt"], texts, last, told)
        )
        of_turns = self._of_turns(samples, ids, turns, told, ends)
        counts = [len(some) for some in turns]
        each = Ragged(torch.tensor(of_turns.rewards, dtype=torch.float64), counts)
        failures = list(samples["tool_failure"])
        why = iter(of_turns.failures)
        for row, count in enumerate(counts):
            mine = [next(why) for _ in range(count)]
            failures[row] = failures[row] or next(filter(None, [scores.failures[row], *mine]), "")
        rewards = [0.0 if bad else value
                   for value, bad in zip(scores.rewards, failures, strict=True)]  # fmt: skip
        sums = torch.stack([row.sum() for row in each.rows()])
        return samples.with_columns(
            text=self.tokenizer.batch_decode(ids, skip_special_tokens=True),
            turns=turns,
            turn_ends=Ragged(
                torch.tensor([turn.end for some in samples["turns"] for turn in some]), counts
            ),
            reward=rewards,
            turn_rewards=each,
            shaped=torch.tensor(rewards, dtype=torch.float64) + sums,
            failure=failures,
        )

    def _of_turns(
        self,
        samples: Batch,
        ids: Sequence[Sequence[int]],
        turns: Sequence[Sequence[dict[str, Any]]],
        told: Sequence[dict[str, Any]],
        ends: Sequence[Sequence[str]],
    ) -> Scores:
        """The rewards of all turns, one after another."""
        count = sum(map(len, turns))
        if not self.turn_rewards:
            return Scores([0.0] * count, [""] * count)
        items, prompts, texts, tokens, rows = [], [], [], [], []
        for row, some in enumerate(turns):
            for number, turn in enumerate(some):
                span = samples["turns"][row][number]
                items.append(samples.ids[row])
                prompts.append(samples["prompt"][row])
                texts.append(turn["text"])
                tokens.append(ids[row][span.begin : span.end])
                mine = {"turn": number, "prompt_end": ends[row][number]}
                rows.append({**told[row], **turn, **mine})
        return weighted_sum(self.turn_rewards, Judged(items, prompts, texts, tokens, rows))


@stage(unit="group")
def turn_advantage(
    samples: Batch,
    *,
    group_size: int,
    leave_one_out: bool = False,
    normalize_std: bool = True,
    drop_equal: bool = False,
    credit: str = "trajectory",
) -> Batch:
    """Adds `advantage` of each trajectory; by turns also `advantages` of each token.

    Args:
        samples: whole groups, one after another.
        group_size, leave_one_out, normalize_std, drop_equal: as for reasoning's `group_advantage`.
        credit: "turn" compares what follows a turn, its own reward included, with what follows the
            turn of the same number in the other trajectories of the group: in one that has no such
            turn, its outcome.
    """
    settings: dict[str, Any] = {
        "group_size": group_size, "leave_one_out": leave_one_out, "normalize_std": normalize_std,
    }  # fmt: skip
    compared: Batch = group_advantage(samples, drop_equal=drop_equal, **settings)
    if credit == "trajectory":
        return compared
    import torch

    rewards, counts = samples["turn_rewards"].rows(), samples["turn_rewards"].lengths
    outcome_B = torch.tensor(samples["reward"], dtype=torch.float64)
    of_turn = []
    for number in range(max(counts)):
        rest_B = torch.stack([row[number:].sum() for row in rewards])
        some: Batch = group_advantage(samples.with_columns(shaped=outcome_B + rest_B), **settings)
        of_turn.append(some["advantage"])
    if drop_equal:  # of turns something may be learned where trajectories are worth the same
        alive_G = torch.stack(of_turn).view(len(of_turn), -1, group_size).ne(0).any(2).any(0)
        compared = compared.with_columns(dropped=~alive_G.repeat_interleave(group_size))
    lengths, pieces = samples["completion_ids"].lengths, []
    for row, (ends, length) in enumerate(zip(samples["turn_ends"].rows(), lengths, strict=True)):
        bounds = [0, *ends.tolist()]
        spans = torch.tensor([end - begin for begin, end in pairwise(bounds)])
        values = torch.stack([of_turn[number][row] for number in range(len(spans))])
        # What tools answered lies before the turn that read it; nobody learns it.
        piece = values.repeat_interleave(spans)
        pieces.append(torch.cat([piece, piece.new_zeros(length - len(piece))]))
    return compared.with_columns(advantages=Ragged(torch.cat(pieces), lengths))
