"""The worker that hosts agents: its policy answers them over HTTP, and keeps what it saw and drew.

One stage draws for all agents of its lane by continuous batching, while the agents run in threads
beside it. Trajectories have the columns of those that come out of a loop.
"""

from __future__ import annotations

import copy
import math
import queue
import time
from collections.abc import Collection, Sequence
from collections.abc import Generator as Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from m2flow.errors import UserError
from m2flow.flow import Batch, Place, Ragged, stage
from m2flow.user_code import user_function
from m2flow.workloads.agentic.config import AgentPart, EpisodeSection
from m2flow.workloads.agentic.endpoint.agents import Agents, Endpoint
from m2flow.workloads.agentic.endpoint.conversation import Conversation, RefusedRequest
from m2flow.workloads.agentic.endpoint.server import ConversationServer
from m2flow.workloads.agentic.episodes import Turn, begin_episodes
from m2flow.workloads.agentic.workers.turn_generator import TurnGenerator
from m2flow.workloads.reasoning.workers import ModelSource

LISTEN_SECONDS = 0.5
"""How long nothing may happen before the stage hears whether more trajectories have come."""


class AgentHost(TurnGenerator):
    """Serves agents.

    Args:
        model, episode, settings: as for `TurnGenerator`.
        agent: the function, and its limits.
    """

    def __init__(
        self,
        model: ModelSource,
        episode: EpisodeSection,
        agent: AgentPart,
        **settings: Any,
    ) -> None:
        super().__init__(model, episode, (), **settings)
        self.agent = agent

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.workloads.agentic.dialect import ChatDialect

        self._function = user_function(self.agent.function, "agent.function")
        self.tokenizer = self.model.tokenizer()
        limit = self.episode.max_tokens
        self.dialect = ChatDialect(self.tokenizer, limit, self.chat_options)

    @stage(streaming=True, expands="samples_per_prompt")
    def host(
        self,
        prompts: Batch,
        *,
        samples_per_prompt: int | None = None,
        greedy: bool = False,
        without: Collection[int] = (),
    ) -> Coroutine[Batch, Batch | None, None]:
        """Agents on each prompt; each trajectory when its agent has ended, less those there are."""
        count = samples_per_prompt or self.samples_per_prompt
        hosting = Hosting(self, greedy)

        def begin(some: Batch) -> None:
            episodes = begin_episodes(some, samples_per_prompt=count, greedy=greedy)
            hosting.begin(episodes.take(item for item in episodes.ids if item not in without))

        try:
            begin(prompts)
            while hosting.running:
                arrived = yield hosting.go_on()
                if arrived is not None:
                    begin(arrived)
        finally:
            hosting.close()


class Hosting:
    """The agents of one call of the stage.

    Args:
        host: whose engine draws.
        greedy: whether the likeliest tokens are drawn.
    """

    def __init__(self, host: AgentHost, greedy: bool) -> None:
        self._host, self._greedy = host, greedy
        self._engine = host.engine
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # The recipe's own in an evaluation too, which is greedy whatever an agent asks.
        sampling = {
            name: getattr(host, name) for name in ("temperature", "top_p", "top_k", "min_p")
        }
        self._server = ConversationServer(self._draw, sampling)
        limits = host.agent.concurrency, host.agent.deadline_seconds
        self._agents = Agents(host._function, *limits, self._events)
        self._waiting: dict[int, tuple[Future[Any], int]] = {}  # and the most tokens
        self.running: dict[int, tuple[Batch, int, Conversation, str, float]] = {}

    def begin(self, episodes: Batch) -> None:
        """Set agents to work."""
        host, now = self._host, time.monotonic()
        # Agents end by their own deadlines; by these where an `async` one keeps its loop to itself.
        # Those that wait for their turn have time too.
        rounds = 1 + math.ceil((len(episodes) + len(self.running)) / host.agent.concurrency)
        for row, item in enumerate(episodes.ids):
            conversation = Conversation(
                host.tokenizer, host.dialect, host.episode, item, int(episodes["seed"][row]),
                host._stop_ids, self._engine.context,
            )  # fmt: skip
            key = self._server.open(conversation)
            deadline = now + rounds * host.agent.deadline_seconds
            self.running[item] = episodes, row, conversation, key, deadline
            problem = {
                "prompt": episodes["prompt"][row],
                "metadata": copy.deepcopy(episodes["metadata"][row]),  # the agent may change it
            }  # fmt: skip
            self._agents.begin(item, problem, Endpoint(self._server.base_url, key))

    def go_on(self) -> Batch:
        """Draw a token for all that wait for one; the trajectories that have ended."""
        ended: list[tuple[int, str]] = []
        wait = not self._engine.busy
        until = min((one[-1] for one in self.running.values()), default=0.0) - time.monotonic()
        while True:
            try:
                event = self._events.get(timeout=max(0.0, min(until, LISTEN_SECONDS))) if wait \
                    else self._events.get_nowait()  # fmt: skip
            except queue.Empty:
                break
            wait = False
            if isinstance(event[1], str):
                ended.append(event)
            else:
                self._submit(*event)
        if self._engine.busy:
            for done in self._engine.step():
                waiting, most = self._waiting[done.id]
                done.check(most)  # `close` tells who waits, if it fails
                del self._waiting[done.id]
                waiting.set_result(done)
        now = time.monotonic()
        late = [item for item, one in self.running.items() if one[-1] < now]
        seconds = self._host.agent.deadline_seconds
        ended += [(item, f"the agent did not end within {seconds:g} s") for item in late]
        return self._handed_on(dict(ended))

    def close(self) -> None:
        """Leave all agents to themselves."""
        self._server.close()
        self._agents.close()
        self._engine.abort(list(self._waiting))
        for waiting, _ in self._waiting.values():
            waiting.set_exception(TimeoutError("the run goes on without this agent"))

    def _draw(self, conversation: Conversation, limit: int | None) -> Any:
        """In a thread of the server: have the stage draw, and wait for it."""
        answer: Future[Any] = Future()
        self._events.put((conversation, answer, limit))
        return answer.result(self._host.agent.deadline_seconds)

    def _submit(self, conversation: Conversation, answer: Future[Any], limit: int | None) -> None:
        from m2flow.algorithms.sampling import derive_seed
        from m2flow.generation.records import Request

        params = self._host.params(len(conversation.ids), greedy=self._greedy)
        room = self._engine.context - len(conversation.context)
        most = min(params.max_new_tokens, room, room if limit is None else limit)
        params = replace(params, max_new_tokens=most)
        seed = derive_seed(conversation.seed, 3, len(conversation.turns))
        if conversation.item not in self.running:
            answer.set_exception(TimeoutError("the run goes on without this agent"))
            return
        try:
            self._engine.submit([Request(conversation.item, conversation.context, seed, params)])
        except UserError as error:  # no memory for so many keys and values
            conversation.reason, conversation.drawing = "length", False
            answer.set_exception(RefusedRequest(str(error)))
            return
        self._waiting[conversation.item] = answer, params.max_new_tokens

    def _handed_on(self, ended: dict[int, str]) -> Batch:
        """Trajectories as items; one in which nothing was drawn has a token that nobody learns."""
        import torch

        parts = []
        for item, why in ended.items():
            if item not in self.running:
                continue
            episodes, row, record, key, _ = self.running.pop(item)
            self._server.forget(key)
            record.close()
            if (asked := self._waiting.pop(item, None)) is not None:
                self._engine.abort([item])
                asked[0].set_exception(TimeoutError("the run goes on without this agent"))
            if not record.turns:
                too_long = "the agent's first request does not fit the model's context"
                nothing = "the agent asked nothing of the policy"
                why = why or (too_long if record.reason == "length" else nothing)
            cut_off = record.reason in ("turns", "length") and not record.drawing
            limited = bool(record.turns) and cut_off
            parts.append(
                episodes.select([row]).with_columns(
                    **_columns(record, self._host.dtype == "float64"),
                    turns=[list(record.turns) or [Turn(0, 0)]],
                    version=[record.version or (self._engine.version,) * 2],
                    finish_reason=["agent" if why and not limited else record.reason],
                    tool_failure=["" if limited else why],
                    done=torch.ones(1, dtype=torch.bool),
                )
            )
        return Batch.concat(parts) if parts else Batch({}, [])


def _columns(record: Conversation, wide: bool) -> dict[str, Any]:
    import torch

    def ragged(values: Sequence[Any], dtype: Any) -> Ragged:
        return Ragged(torch.tensor(values, dtype=dtype), [len(values)])

    return {
        "prompt_ids": ragged(record.prompt_ids or [0], torch.int64),
        "completion_ids": ragged(record.ids, torch.int64),
        "loss_mask": ragged(record.mask, torch.bool),
        "behaviour_logprobs": ragged(record.logprobs, torch.float64 if wide else torch.float32),
    }
