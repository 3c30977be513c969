"""My first flow: of four arms of a bandit, learn by trying which one pays most often.

python examples/my_first_flow.py --seed 1    (expected: a mean reward of 0.8 after 30 steps)
"""

import argparse

import torch

from m2flow import Batch, Flow, Place, Stream, Worker, launch, stage
from m2flow.algorithms.sampling import derive_seed, sample_tokens, uniform

PAYS, PULLS, EXPECTED = torch.tensor([0.2, 0.9, 0.5, 0.4]), 64, {"reward": 0.8}


class Player(Worker):
    """Pulls arms, and prefers those that pay more than every second time."""

    def load(self, place: Place) -> None:  # on each lane that it is placed on
        super().load(place)
        self.logits, self.gradient = torch.zeros(4), torch.zeros(4)

    @stage
    def pull(self, pulls: Batch) -> Batch:
        seed = pulls["seed"]  # what an item draws follows from its seed, wherever it is drawn
        arm, _ = sample_tokens(self.logits.expand(len(pulls), 4), seed, seed * 0, 1.0)
        return pulls.with_columns(arm=arm, reward=(uniform(seed, seed * 0 + 1) < PAYS[arm]).float())

    @stage(accumulates=True)
    def learn(self, pulls: Batch) -> Batch:
        better = torch.nn.functional.one_hot(pulls["arm"], 4) - self.logits.softmax(0)
        self.gradient += ((pulls["reward"] - 0.5)[:, None] * better).sum(0)
        return pulls

    @learn.finish
    def learn_finish(self) -> None:
        self.place.all_reduce([self.gradient])  # over all of its lanes
        self.logits, self.gradient = self.logits + 0.1 * self.gradient, torch.zeros(4)


class Bandit(Flow):
    """Pull, then learn from what the arms have paid."""

    player: Player

    def step(self, pulls: Stream) -> Stream:
        return self.player.learn(self.player.pull(pulls))


def train(seed: int = 0, mode: str = "eager", lanes: str = "auto") -> dict[str, float]:
    seeds = [[derive_seed(seed, step, n) for n in range(PULLS)] for step in range(30)]
    with launch(Bandit(player=Player()), items_per_step=PULLS, mode=mode, lanes=lanes) as run:
        for done in run.steps(Batch({"seed": torch.tensor(row)}) for row in seeds):
            print(f"step {done.step:2d}  reward {float(done.output['reward'].mean()):.3f}")
    return {"reward": float(done.output["reward"].mean())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args().seed)
