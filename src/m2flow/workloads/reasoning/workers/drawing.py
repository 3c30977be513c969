"""The samples that one call of an engine draws, from their prompts to what is handed on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from collections.abc import Generator as Coroutine
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from m2flow.flow import Batch, Ragged
from m2flow.workloads.reasoning.workers.carried import BEGUN, OPEN, BegunAnswer

if TYPE_CHECKING:
    from m2flow.generation.engine import GenerationEngine
    from m2flow.generation.records import Completion, Request, SamplingParams

HANDED_ON = 4
"""Completions are handed on once they are 1 / HANDED_ON of those that still run: many at a time
while many run, and one by one in the tail."""

LISTEN_EVERY = 4
"""Steps of the engine after which the call stops for a moment to hear if anything has come."""


@dataclass(slots=True)
class Drawing:
    """The samples that one call draws.

    Attributes:
        engine: draws them.
        params: how.
        count: samples of a prompt.
        without: samples that need not be drawn.
        tokens_per_step: most that is drawn of an answer to prompts that say what is there of their
            answers (`BEGUN`); None for all of it.
        running: sample to the Batch and row that hold its prompt's columns.
    """

    engine: GenerationEngine
    params: SamplingParams
    count: int
    without: Collection[int] = ()
    tokens_per_step: int | None = None
    running: dict[int, tuple[Batch, int]] = field(default_factory=dict)

    def drawn(self, prompts: Batch) -> Coroutine[Batch, Batch | None, None]:
        """Draw until nothing runs; takes further prompts at each yield."""
        finished = list(self.submit(prompts))
        nothing = Batch({}, [])
        steps = 0
        while self.engine.busy or finished:
            if self.engine.busy:
                finished += self.engine.step()
            steps += 1
            if finished and len(finished) * HANDED_ON >= self.engine.num_running:
                arrived = yield self.handed_on(finished)
                finished = []
            elif steps % LISTEN_EVERY == 0:
                arrived = yield nothing
            else:
                continue
            if arrived is not None:
                finished += self.submit(arrived)

    def all_of(self, samples: Batch) -> Iterator[Batch]:
        """Draw samples in place of what they have, until nothing runs: after each step of the
        engine those that are finished, if any."""
        self._submit_samples(samples)
        while self.engine.busy:
            finished = self.engine.step()
            yield self.handed_on(finished) if finished else Batch({})

    def submit(self, prompts: Batch) -> Sequence[Completion]:
        """Have the samples of some prompts drawn; those that are at their end before they begin."""
        return self._submit_samples(prompts.repeat(self.count))

    def _submit_samples(self, samples: Batch) -> Sequence[Completion]:
        from m2flow.algorithms.sampling import derive_seed
        from m2flow.generation.records import Begun, Request

        carries = BEGUN in samples
        there: Sequence[Sequence[BegunAnswer]] = samples[BEGUN] if carries else [()] * len(samples)
        samples = samples.without(BEGUN) if carries else samples
        requests: list[Request] = []
        ended: list[Completion] = []
        rows = zip(samples.ids, samples["prompt_ids"].rows(), samples["seed"], strict=True)
        for row, (item, prompt, seed) in enumerate(rows):
            if item in self.without:
                continue
            self.running[item] = (samples, row)
            params, begun = self.params, Begun()
            if there[row]:
                answer = there[row][item % self.count]
                if answer.finish_reason != OPEN:
                    ended.append(self._ended(item, answer))
                    continue
                begun = Begun(answer.token_ids, answer.logprobs, answer.versions)
            if carries and self.tokens_per_step is not None:
                most = len(begun.token_ids) + self.tokens_per_step
                params = replace(params, max_new_tokens=min(most, params.max_new_tokens))
            own_seed = derive_seed(int(seed), item % self.count)
            requests.append(Request(item, prompt, own_seed, params, begun))
        self.engine.submit(requests)
        return ended

    def _ended(self, item: int, answer: BegunAnswer) -> Completion:
        """An answer that ended in an earlier step, as it was handed on then."""
        import torch

        from m2flow.generation.records import Completion

        return Completion(
            item,
            torch.tensor(answer.token_ids, dtype=torch.int64),
            torch.tensor(answer.logprobs, dtype=self.engine.logprob_dtype),
            torch.tensor(answer.versions, dtype=torch.int64),
            self.engine.version,
            "stop" if answer.finish_reason == "stop" else "length",
        )

    def _finish_reason(self, done: Completion) -> str:
        """Why an answer has ended, or that it goes on in a later step."""
        most = self.params.max_new_tokens
        if self.tokens_per_step is None or done.finish_reason == "stop":
            return done.finish_reason
        return OPEN if len(done.token_ids) < most else done.finish_reason

    def handed_on(self, finished: list[Completion]) -> Batch:
        """Finished samples as a Batch, with the columns of their prompts."""
        for done in finished:
            done.check(self.params.max_new_tokens)
        return Batch.concat(
            [
                prompts.with_columns(
                    completion_ids=Ragged.from_rows([done.token_ids for done in some]),
                    behaviour_logprobs=Ragged.from_rows([done.logprobs for done in some]),
                    finish_reason=[self._finish_reason(done) for done in some],
                    version=[done.versions for done in some],
                    token_versions=Ragged.from_rows([done.token_versions for done in some]),
                )
                for prompts, some in self.taken_out(finished)
            ]
        )

    def taken_out(self, finished: list[Completion]) -> list[tuple[Batch, list[Completion]]]:
        """Remove finished requests from `running`: for each batch its rows, and what was drawn."""
        rows_of: dict[int, tuple[Batch, list[int], list[Completion]]] = {}
        for done in finished:
            batch, row = self.running.pop(done.id)
            _, rows, some = rows_of.setdefault(id(batch), (batch, [], []))
            rows.append(row)
            some.append(done)
        return [(batch.select(rows), some) for batch, rows, some in rows_of.values()]
