"""The worker that asks a language model what answers are worth."""

from __future__ import annotations

from collections.abc import Generator as Coroutine
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from m2flow.errors import UserError
from m2flow.flow import Batch, Place, stage
from m2flow.workloads.reasoning.reward_sections import JudgeSection
from m2flow.workloads.reasoning.workers.columns import unjudged, with_score
from m2flow.workloads.reasoning.workers.drawing import Drawing
from m2flow.workloads.reasoning.workers.generator import Generator
from m2flow.workloads.reasoning.workers.source import ModelSource

if TYPE_CHECKING:
    from m2flow.generation.records import Completion
    from m2flow.workloads.reasoning.encoding import Chat

NO_SCORE = "has written no score from 0 to judge.highest that judge.pattern finds"


class JudgeModel(Generator):
    """A frozen model that judges answers in words; the weighted score is a part of the reward.

    What it writes of a sample follows from the sample and its seed, and not from what else is
    judged. It lies on its lanes as a generator does.
    """

    name = "judge"

    def __init__(self, section: JudgeSection) -> None:
        self.section = section
        super().__init__(
            ModelSource.at(section.path, section.dtype),
            samples_per_prompt=1,
            max_new_tokens=section.max_new_tokens,
            temperature=section.temperature,
            max_running=section.max_running,
            cache_gb=section.cache_gb,
            chat_options=section.chat_options,
        )

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.workloads.reasoning.encoding import context_of

        self.tokenizer = self.model.tokenizer()
        self.chat = judge_chat(self.tokenizer, self.section)
        self.context = context_of(self.model.path)

    @stage(streaming=True)
    def score(self, samples: Batch) -> Coroutine[Batch, Batch | None, None]:
        """Adds the weighted score to `reward`, `judge_score`, and `judge`: what it has written.

        A sample without a reward is not judged, nor an answer that goes on in a later step. One of
        which the judge gives no score, or that does not fit into its context, has no reward
        (`failure`).
        """
        from m2flow.generation.records import SamplingParams

        params = SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop_token_ids=self._stop_ids,
        )
        call = _Judging(self.engine, params, 1, judge=self)
        try:
            yield from call.drawn(samples)
        finally:
            self.engine.abort(list(call.running))


def judge_chat(tokenizer: Any, section: JudgeSection) -> Chat | None:
    """How a judge is asked: as the user of a conversation, where its tokenizer has a template.

    Raises:
        UserError: there are options of a template, and no template, or none that reads them.
    """
    from m2flow.workloads.reasoning.encoding import chat_of

    key = "judge.chat_options"
    return chat_of(tokenizer, None, None, section.chat_options, key, key)


def asked(question: str, before: Sequence[Mapping[str, str]] = ()) -> str:
    """What a judge is told of a question: of a conversation the earlier turns too."""
    if not before:
        return question
    turns = (*before, {"role": "user", "content": question})
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


@dataclass(slots=True)
class _Judging(Drawing):
    """The samples that one call judges; in `unasked` is why some are not asked about."""

    judge: JudgeModel = field(kw_only=True)
    unasked: dict[int, str] = field(default_factory=dict)

    def submit(self, prompts: Batch) -> Sequence[Completion]:
        from m2flow.algorithms.sampling import derive_seed
        from m2flow.generation.records import Request

        ended = []
        before = prompts["before"] if "before" in prompts else [()] * len(prompts)
        columns = (prompts[name] for name in ("prompt", "text", "answer", "seed"))
        silent = unjudged(prompts)
        for row, (item, turns, *values) in enumerate(
            zip(prompts.ids, before, *columns, strict=True)
        ):
            question, text, gold, seed = values
            self.running[item] = (prompts, row)
            ids, why = ([], "") if silent[row] else self._asked(asked(question, turns), text, gold)
            if silent[row] or why:
                self.unasked[item] = why
                ended.append(_nothing(item))
            else:
                own_seed = derive_seed(int(seed), item, 1)  # no answer is drawn with it
                try:
                    self.engine.submit([Request(item, ids, own_seed, self.params)])
                except UserError:  # of its memory, which the engine alone knows
                    self.unasked[item] = (
                        f"cannot be asked: a question of {len(ids)} tokens and "
                        f"judge.max_new_tokens = {self.params.max_new_tokens} do not fit into "
                        "judge.cache_gb"
                    )
                    ended.append(_nothing(item))
        return ended

    def _asked(self, question: str, text: str, gold: str) -> tuple[list[int], str]:
        """What the judge is to read, or why it cannot."""
        from m2flow.models.tokenizer import spelled_out
        from m2flow.workloads.reasoning.encoding import prompt_rows
        from m2flow.workloads.reasoning.tasks import Problem

        judge, new = self.judge, self.params.max_new_tokens
        text = spelled_out(text, judge.tokenizer)
        problem = Problem(judge.section.question(question, text, gold), "")
        try:
            (ids,) = prompt_rows(judge.tokenizer, [problem], judge.chat, judge.name)
        except UserError:
            return [], "cannot be asked: its tokenizer cannot write the question"
        if judge.context is not None and len(ids) + new > judge.context:
            return [], (
                f"cannot be asked: the question and judge.max_new_tokens = {new} do not fit into "
                f"its context of {judge.context} tokens"
            )
        return ids, ""

    def handed_on(self, finished: list[Completion]) -> Batch:
        return Batch.concat([self._judged(*piece) for piece in self.taken_out(finished)])

    def _judged(self, samples: Batch, done: Sequence[Completion]) -> Batch:
        section, tokenizer = self.judge.section, self.judge.tokenizer
        written = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in done]
        why = [self.unasked.pop(one.id, NO_SCORE) for one in done]
        scores = [section.score(text) for text in written]
        scored = with_score(samples, self.judge.name, scores, why, section.weight)
        return scored.with_columns(judge=written)


def _nothing(item: int) -> Completion:
    """What is drawn of a sample that is not asked about."""
    import torch

    from m2flow.generation.records import Completion

    none = torch.empty(0, dtype=torch.int64)
    return Completion(item, none, torch.empty(0), none, -1, "abort")
