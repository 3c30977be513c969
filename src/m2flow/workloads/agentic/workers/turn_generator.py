"""The worker that draws one turn of each trajectory, up to a call of a tool or the model's end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from m2flow.flow import Batch, Layout, Place, stage
from m2flow.flow.worker import ONE_LANE
from m2flow.workloads.agentic.config import EpisodeSection
from m2flow.workloads.agentic.episodes import with_turns
from m2flow.workloads.reasoning.workers import Generator, ModelSource

if TYPE_CHECKING:
    from m2flow.generation.records import Completion, SamplingParams


class TurnGenerator(Generator):
    """Draws turns by continuous batching.

    What is drawn follows from a trajectory's seed, its tokens so far and the number of its turns,
    and not from what else is drawn. It stands on single lanes, and `load` refuses a gang: its lanes
    would have to agree on the trajectories of each call.

    Args:
        model: initial weights.
        episode: limits, and how calls are written.
        tools: names of the tools there are.
        settings: as for `Generator`.
    """

    collective = False

    def __init__(
        self, model: ModelSource, episode: EpisodeSection, tools: Sequence[str], **settings: Any
    ) -> None:
        super().__init__(model, **settings)
        self.episode, self.tools = episode, tuple(tools)

    def layouts(self, kind: str, lanes: int) -> Sequence[Layout]:
        return [ONE_LANE]

    def load(self, place: Place) -> None:
        from m2flow.workloads.agentic.dialect import dialect_of

        tokenizer = self.model.tokenizer()
        self._dialect = dialect_of(tokenizer, self.episode, self.tools, self.chat_options)
        super().load(place)
        self._stop_ids = (*self._stop_ids, *self._dialect.stop_ids)

    def stop_strings(self) -> tuple[str, ...]:
        return (*super().stop_strings(), *self._dialect.closing_strings)

    @stage
    def turn(self, episodes: Batch) -> Batch:
        """One turn more of each trajectory."""
        from m2flow.algorithms.sampling import derive_seed
        from m2flow.generation.records import Request

        greedy = bool(episodes["greedy"][0])
        requests = []
        rows = zip(
            episodes.ids, episodes["prompt_ids"].rows(), episodes["completion_ids"].rows(),
            episodes["seed"], episodes["turns"], strict=True,
        )  # fmt: skip
        for item, prompt, so_far, seed, turns in rows:
            context = [*prompt.tolist(), *so_far.tolist()]
            params = self.params(len(so_far), greedy=greedy)
            requests.append(Request(item, context, derive_seed(int(seed), 3, len(turns)), params))
        drawn = {one.id: one for one in self._drawn(requests)}
        return with_turns(episodes, [drawn[item] for item in episodes.ids])

    def params(self, length: int, *, greedy: bool) -> SamplingParams:
        """How the next turn of a trajectory is drawn that has so many tokens behind its prompt."""
        from m2flow.generation.records import SamplingParams

        return SamplingParams(
            max_new_tokens=min(self.max_new_tokens, self.episode.max_tokens - length),
            temperature=0.0 if greedy else self.temperature,
            stop_token_ids=self._stop_ids,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_strings=self._stop_strings,
        )

    def _drawn(self, requests: list[Any]) -> list[Completion]:
        self.engine.submit(requests)
        finished: list[Completion] = []
        try:
            while self.engine.busy:
                finished += self.engine.step()
                self.place.goes_on()
        finally:
            self.engine.abort([request.id for request in requests])
        most = {request.id: request.params.max_new_tokens for request in requests}
        for one in finished:
            one.check(most[one.id])
        return finished
