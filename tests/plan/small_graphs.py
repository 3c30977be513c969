"""Small flows whose graphs the tests of plans share."""

from __future__ import annotations

from m2flow.flow import Flow, FlowGraph, Worker, loop, stage


class Model(Worker):
    @stage(streaming=True, expands=4)
    def generate(self, items):
        yield items.repeat(4)

    @stage(sticky=True)
    def act(self, items):
        return items


class Trainer(Worker):
    @stage(accumulates=True, minibatches=2)
    def train(self, items):
        return items


class World(Worker):
    @stage
    def move(self, items):
        return items


@stage
def score(items):
    return items


@stage(unit="group")
def normalise(items):
    return items


@stage(unit="step")
def whiten(items):
    return items


class Grpo(Flow):
    """Streaming generation, groups, mini-batches and a weight edge."""

    gen: Model
    learner: Trainer

    def step(self, items):
        return self.learner.train(normalise(score(self.gen.generate(items))))

    def sync(self):
        self.learner.publish(self.gen)

    def evaluate(self, items):
        return score(self.gen.generate(items))


class Embodied(Flow):
    """A loop with a sticky member, then a stage on whole steps."""

    world: World
    policy: Model
    learner: Trainer

    def step(self, items):
        return self.learner.train(whiten(loop(self.world.move, self.policy.act)(items)))

    def sync(self):
        self.learner.publish(self.policy)


class Sampling(Flow):
    """Generation without training."""

    gen: Model

    def step(self, items):
        return score(self.gen.generate(items))


class Watched(Flow):
    """The trained weights go to a worker that only evaluates, too."""

    gen: Model
    learner: Trainer
    judge: World

    def step(self, items):
        return self.learner.train(score(self.gen.generate(items)))

    def sync(self):
        self.learner.publish(self.gen, self.judge)

    def evaluate(self, items):
        return self.judge.move(items)


class Talking(Flow):
    """Generation and training, and nothing beside."""

    gen: Model
    learner: Trainer

    def step(self, items):
        return self.learner.train(self.gen.generate(items))

    def sync(self):
        self.learner.publish(self.gen)


class Playing(Flow):
    """A loop without training."""

    world: World
    policy: Model

    def step(self, items):
        return score(loop(self.world.move, self.policy.act)(items))


class Scoring(Flow):
    """Nothing is generated."""

    world: World

    def step(self, items):
        return score(self.world.move(items))


GRPO = Grpo(gen=Model(), learner=Trainer()).trace()
EVALUATE = Grpo(gen=Model(), learner=Trainer()).trace("evaluate")
TALKING = Talking(gen=Model(), learner=Trainer()).trace()
WATCHED = Watched(gen=Model(), learner=Trainer(), judge=World())
GRAPHS: dict[str, FlowGraph] = {
    "grpo": GRPO,
    "embodied": Embodied(world=World(), policy=Model(), learner=Trainer()).trace(),
    "sampling": Sampling(gen=Model()).trace(),
    "scoring": Scoring(world=World()).trace(),
    "playing": Playing(world=World(), policy=Model()).trace(),
    "watched": WATCHED.trace(),
}
