"""The worker that acts: a policy for inference, on the weights that the learner publishes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m2flow.flow import Batch, Place, Ragged, Worker, stage
from m2flow.workloads.embodied.workers.columns import CUT, TURN, WHO, observations_of
from m2flow.workloads.embodied.workers.source import PolicySource


class Actor(Worker):
    """Decides on actions, and says what observations are worth.

    Args:
        source: the policy.
        turns_per_microbatch: observations whose worth is computed at a time.
    """

    def __init__(self, source: PolicySource, turns_per_microbatch: int) -> None:
        self.source, self.turns_per_microbatch = source, turns_per_microbatch

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.runtime.lane.state import MovableState, module_tensors

        self.source.set_threads(place.num_threads)
        self.policy = self.source.make(place.device)
        self.state = MovableState(lambda: module_tensors(self.policy), place)

    @stage
    def act(self, seen: Batch) -> Batch:
        """A chunk of actions for each rollout. What is drawn follows from its seed and its turn."""
        import torch

        from m2flow.algorithms.sampling import derive_seeds

        seeds = derive_seeds(seen["seed"].tolist(), 2, last=seen["turn"].tolist())
        greedy = seen["greedy"].tolist()[0]
        with torch.inference_mode():
            decided = self.policy.act(self._here(observations_of(seen)), seeds=seeds, greedy=greedy)
        found = {
            "action": decided.actions, "tokens": decided.tokens, "logprobs": decided.logprobs
        }  # fmt: skip
        if decided.values is not None:
            found["values"] = decided.values
        return seen.only(*WHO).with_columns(**{name: x.cpu() for name, x in found.items()})

    @stage
    def look_beyond(self, rollouts: Batch) -> Batch:
        """Adds `turn.beyond`: where an episode was cut off, what the observation there is worth.

        And `turn.values`, where the policy has not said in acting what observations are worth.
        """
        import torch

        cut: Ragged = rollouts[f"{TURN}cut"]
        beyond_T = torch.zeros(len(cut.values))
        if bool(cut.values.any()):
            beyond_T[cut.values] = self._values(rollouts, CUT)
        found = {f"{TURN}beyond": Ragged(beyond_T, cut.lengths)}
        if f"{TURN}values" not in rollouts:
            found[f"{TURN}values"] = Ragged(self._values(rollouts, TURN), cut.lengths)
        return rollouts.with_columns(**found)

    def _values(self, rollouts: Batch, which: str) -> Any:
        """What observations of rollouts are worth, float32, one after another."""
        import torch

        observations, size = observations_of(rollouts, which), self.turns_per_microbatch
        count, found = len(next(iter(observations.values()))), []
        for first in range(0, max(1, count), size):
            some = {name: part[first : first + size] for name, part in observations.items()}
            with torch.inference_mode():
                values = self.policy.values(self._here(some))
            assert values is not None, "a policy without a critic"
            found.append(values.cpu())
        return torch.cat(found)

    def _here(self, observations: Mapping[str, Any]) -> dict[str, Any]:
        """Observations on the policy's device."""
        device = self.place.device
        return {
            name: part if isinstance(part, list) else part.to(device)
            for name, part in observations.items()
        }

    def install(self, weights: Mapping[str, Any], version: int) -> None:
        self.policy.load_state_dict(dict(weights))

    def offload(self) -> None:
        self.state.offload()

    def onload(self) -> None:
        self.state.onload()

    def state_bytes(self) -> int:
        return self.state.nbytes()
