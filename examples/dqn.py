"""DQN (Mnih et al. 2015) on Catch: move a paddle under a falling ball, seen as a board of pixels.

A game is an item and holds all of its state, so it needs no environment that remembers it: it goes
around `loop(policy.act, fall)` until the ball is down. The learner keeps a replay memory and a
target network, and publishes its network to the policy.

    python examples/dqn.py --seed 1
    python examples/dqn.py --mode disaggregated --lanes cpu:2

Expected after 30 steps, greedily: at least 95 % of balls caught (at first 0).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, loop, stage
from m2flow.algorithms.sampling import derive_seed, sample_tokens

ROWS, COLUMNS, MOVES = 10, 5, 3
GAMES_PER_STEP, STEPS, EPSILON = 32, 30, 0.3
UPDATES_PER_STEP, BATCH, DISCOUNT, LEARNING_RATE = 40, 128, 0.95, 2e-3
EXPECTED = {"caught": 0.95}


def make_network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(ROWS * COLUMNS, 64), nn.ReLU(), nn.Linear(64, MOVES))


def board(row: Tensor, ball: Tensor, paddle: Tensor) -> Tensor:
    """[N, ROWS * COLUMNS] with a 1 at the ball and at the paddle in the last row."""
    pixels = torch.zeros(len(row), ROWS * COLUMNS)
    pixels.scatter_(1, (row * COLUMNS + ball)[:, None], 1.0)
    return pixels.scatter_(1, ((ROWS - 1) * COLUMNS + paddle)[:, None], 1.0)


class Policy(Worker):
    """Epsilon-greedy moves by a network that is published to it."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.network = make_network()

    @stage
    def act(self, games: Batch) -> Batch:
        row, epsilon = games["row"], games["epsilon"][:, None]
        paddle = games["paddles"].gather(1, row[:, None])[:, 0]
        with torch.inference_mode():
            best = self.network(board(row, games["ball"], paddle)).argmax(1)
        chances = epsilon / MOVES + (1 - epsilon) * nn.functional.one_hot(best, MOVES)
        move, _ = sample_tokens(chances.log(), games["seed"], row, 1.0)
        return games.with_columns(moves=games["moves"].scatter(1, row[:, None], move[:, None]))

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.network.load_state_dict(dict(weights))


@stage
def fall(games: Batch) -> Batch:
    """The paddle moves by one column at most, and the ball falls by one row."""
    row = games["row"][:, None]
    paddle = games["paddles"].gather(1, row) + games["moves"].gather(1, row) - 1
    paddle = paddle.clamp(0, COLUMNS - 1)
    down = games["row"] + 1 == ROWS - 1
    return games.with_columns(
        paddles=games["paddles"].scatter(1, row + 1, paddle),
        row=games["row"] + 1,
        caught=down & (paddle[:, 0] == games["ball"]),
        done=down.tolist(),
    )


class Learner(Worker):
    """Replay memory, network and target network; each lane draws from the games it was given."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.network, self.target = make_network(), make_network()
        self.optimizer = torch.optim.Adam(self.network.parameters(), LEARNING_RATE)
        self.memory: list[dict[str, Tensor]] = []
        self.chance = torch.Generator().manual_seed(place.rank)

    @stage(accumulates=True)
    def learn(self, games: Batch) -> Batch:
        turns = ROWS - 1
        row = torch.arange(turns).repeat(len(games))
        ball = games["ball"].repeat_interleave(turns)
        ended = row == turns - 1
        reward = torch.where(games["caught"], 1.0, -1.0).repeat_interleave(turns) * ended
        self.memory.append(
            {
                "before": board(row, ball, games["paddles"][:, :-1].flatten()),
                "after": board(row + 1, ball, games["paddles"][:, 1:].flatten()),
                "move": games["moves"].flatten(),
                "reward": reward,
                "discount": DISCOUNT * (~ended).float(),
            }
        )
        return games.only("caught")

    @learn.finish
    def learn_finish(self) -> dict[str, float]:
        memory = {name: torch.cat([part[name] for part in self.memory]) for name in self.memory[0]}
        self.memory = [memory]
        self.target.load_state_dict(self.network.state_dict())
        total = torch.zeros(())
        for _ in range(UPDATES_PER_STEP):
            drawn = torch.randint(len(memory["move"]), (BATCH,), generator=self.chance)
            rows = {name: column[drawn] for name, column in memory.items()}
            with torch.no_grad():
                future = self.target(rows["after"]).amax(1)
            value = self.network(rows["before"]).gather(1, rows["move"][:, None])[:, 0]
            loss = nn.functional.smooth_l1_loss(value, rows["reward"] + rows["discount"] * future)
            self.optimizer.zero_grad()
            loss.backward()
            gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
            self.place.all_reduce(gradients)
            for gradient in gradients:
                gradient /= self.place.size
            self.optimizer.step()
            total += loss.detach()
        return {"loss": float(total) / UPDATES_PER_STEP}

    def weights(self) -> dict[str, Tensor]:
        return dict(self.network.state_dict())


class DQN(Flow):
    """Play games to their end, learn from all that were played so far."""

    policy: Policy
    learner: Learner

    def step(self, games: Stream) -> Stream:
        return self.learner.learn(self.evaluate(games))

    def evaluate(self, games: Stream) -> Stream:
        return loop(self.policy.act, fall, until="done")(games)

    def sync(self) -> None:
        self.learner.publish(self.policy)


def games(seed: int, step: int, epsilon: float) -> Batch:
    """The games of a step before they begin: a function of the seed and the step's number."""
    seeds = [derive_seed(seed, step, number) for number in range(GAMES_PER_STEP)]
    zeros = torch.zeros(GAMES_PER_STEP, dtype=torch.int64)
    return Batch(
        {
            "seed": torch.tensor(seeds),
            "epsilon": torch.full((GAMES_PER_STEP,), epsilon),
            "row": zeros,
            "ball": torch.tensor(seeds) % COLUMNS,
            "paddles": torch.full((GAMES_PER_STEP, ROWS), COLUMNS // 2),
            "moves": zeros[:, None].repeat(1, ROWS - 1),
            "caught": zeros.bool(),
        }
    )


def train(seed: int = 0, mode: str = "eager", lanes: str = "auto") -> dict[str, float]:
    """Run the flow; the share of balls that the greedy policy catches at the end."""
    flow, caught = DQN(policy=Policy(), learner=Learner()), 0.0
    with m2flow.launch(
        flow, items_per_step=GAMES_PER_STEP, mode=mode, lanes=lanes, also={"evaluate": 32}
    ) as run:
        for done in range(0, STEPS + 1, 10):
            played = run.run_method("evaluate", games(seed, -1, epsilon=0.0)).output
            caught = float(played["caught"].float().mean())
            print(f"step {done:3d}  caught {caught:.3f}")
            for step in range(done, min(done + 10, STEPS)):
                run.step(games(seed, step, EPSILON))
    return {"caught": caught}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn to catch a ball from pixels.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", default="eager", help="eager, collocated or disaggregated")
    parser.add_argument("--lanes", default="auto", help="such as cpu:2")
    train(**vars(parser.parse_args()))
