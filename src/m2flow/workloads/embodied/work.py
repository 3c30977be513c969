"""What the stages of an embodied recipe ask of a lane: the workload's `prices`.

Policies are priced by their sizes. What a simulator takes is in no data sheet: for the families
that m2flow knows there is what a step was measured to take on one core, and a guess where an
accelerator draws; each is told as an assumption. A run measures both, and its profile wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from m2flow.environments.registry import is_light, needs_renderer
from m2flow.environments.spec import EnvironmentSpec
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.flow.worker import ONE_LANE
from m2flow.models.shape import WEIGHT_BYTES
from m2flow.models.work import (
    ADAM_BYTES,
    FORWARD_AND_BACKWARD,
    FROZEN_FORWARD_AND_BACKWARD,
    GRADIENT_BYTES,
    LAYER_CHANNELS,
    LAYER_HIDDEN,
    RATES,
    RECOMPUTED_FORWARD,
    TRAINED_BYTES,
    decoding,
    layer_activations,
    of_numbers,
    ring_bytes,
    trained_bytes,
)
from m2flow.plan.profile import Quantiles
from m2flow.plan.profile.hardware import Device
from m2flow.plan.profile.work import (
    FlowWork,
    Held,
    LayoutWork,
    Pricer,
    StageWork,
    Work,
    WorkerWork,
    gang_sizes,
)
from m2flow.plan.sizes import bytes_text
from m2flow.training.division import Division
from m2flow.workloads.common.workload import Assumed
from m2flow.workloads.embodied.bodies import PATCHES, Body, body_of
from m2flow.workloads.embodied.config import VISION_LANGUAGE_ACTION, EmbodiedRecipe
from m2flow.workloads.embodied.networks import FLOAT_BYTES, SmallPolicy, small_policy
from m2flow.workloads.embodied.scenes import spec_before
from m2flow.workloads.embodied.workers.learner import in_shards, is_divided

CALL_SECONDS = 1e-3
"""Of a call, beside what it computes."""

SMALL_LAYER_BYTES = 34
"""Of a block of a picture's tower, a patch and a unit of width that is kept for the backward pass
(Korthikanti et al. 2022, equation 1); with recomputation 2 remain, its input."""

CORES_BESIDE_GPU = 12
"""Cores of a machine for each of its accelerators. An assumption: a DGX H100 has 14."""

RENDERER_BYTES = 0.3e9
"""Of an accelerator's memory that one process draws in. An assumption, which holds until
`m2flow profile` has asked nvidia-smi; see `Simulator.beside_bytes`."""

CORE_ARITHMETIC = {"mlp": 0.47, "cnn": 0.265}
"""Of a core's peak FLOP/s that small policies attain. Measured: 4 us for a turn of two layers of
128 units in forward and backward pass, and 0.4 ms for one of convolutions over 32 pixels."""

GPU_ARITHMETIC = 0.5
"""Of an accelerator's peak in single precision that they attain there. An assumption."""

ACT_SECONDS = {"cpu": 0.25e-3, "gpu": 0.5e-3}
MINIBATCH_SECONDS = {"cpu": 0.4e-3, "gpu": 1.4e-3}
"""Of a call, and of an optimizer step, of a small policy beside its arithmetic. Measured on a core;
on an accelerator about 50 and 140 operations, of which each takes 10 us to launch: an
assumption."""

BESIDE_PICTURES = 256.0
"""Bytes of a turn that are neither pictures nor the state: numbers, seeds, a sentence."""


@dataclass(frozen=True)
class Simulating:
    """What one simulator takes, in seconds of a core, and in bytes of the host's memory.

    Attributes:
        step: of physics.
        picture: that a core draws; `drawn` where an accelerator does.
        reset: of the beginning of an episode.
        process_bytes: of a process without an environment.
        environment_bytes: of each environment in it.
    """

    step: float
    picture: float
    drawn: float
    reset: float
    process_bytes: float
    environment_bytes: float


SIMULATORS = {
    "libero": Simulating(8.5e-3, 60e-3, 4e-3, 1.0, 1.2e9, 0.7e9),
    "maniskill": Simulating(1.2e-3, 28e-3, 4e-3, 0.1, 1.0e9, 0.1e9),
    "metaworld": Simulating(0.5e-3, 10e-3, 2e-3, 5e-3, 0.12e9, 0.18e9),
    "envpool": Simulating(0.2e-3, 0.0, 0.0, 30e-3, 0.1e9, 10e6),
    "gymnasium": Simulating(20e-6, 1e-3, 1e-3, 50e-6, 21e6, 1e4),
    "table": Simulating(20e-6, 0.1e-3, 0.1e-3, 0.1e-3, 19e6, 1e4),
}
"""By family. Steps and pictures of a core were measured (LIBERO with 128 pixels, ManiSkill by
lavapipe, EnvPool with Meta-World); those that an accelerator draws are guesses. Memory was
measured, of Meta-World with pictures, but for ManiSkill and EnvPool, where it is a guess."""


def prices(recipe: EmbodiedRecipe, graph: FlowGraph, assumed: Assumed) -> Pricer:
    """Return what the stages of a recipe's flow ask of each kind of lane.

    Raises:
        UserError: nobody knows what the simulator takes, or how large the model is.
    """
    family = recipe.environment.name.partition(":")[0]
    if family not in SIMULATORS:
        raise UserError(
            "what a simulator of yours takes is in no data sheet",
            key="--cluster",
            hint="measure it: m2flow profile RECIPE, or a run in mode auto",
        )
    spec, guessed = spec_before(recipe.environment)
    policy: Body | SmallPolicy
    if recipe.policy.kind in VISION_LANGUAGE_ACTION:
        policy = body_of(recipe, assumed.model)
    else:
        policy = small_policy(recipe.policy, spec, recipe.algorithm.name)
    simulating = SIMULATORS[family]
    return lambda device, lanes: EmbodiedRecipeWork(
        recipe, simulating, spec, guessed, policy, device, lanes
    ).work(graph)


@dataclass(frozen=True)
class EmbodiedRecipeWork:
    """A recipe's sizes, and how many lanes of a kind there are.

    Attributes:
        spec: of the environment; `guessed` is what is assumed in it, "" for nothing.
    """

    recipe: EmbodiedRecipe
    simulating: Simulating
    spec: EnvironmentSpec
    guessed: str
    policy: Body | SmallPolicy
    device: Device
    lanes: int

    def work(self, graph: FlowGraph) -> FlowWork:
        policy = self.policy
        model = policy.text.name if isinstance(policy, Body) else self.recipe.policy.kind
        return FlowWork(
            {node.name: self._stage(node) for node in graph.nodes},
            {worker: self._worker(worker) for worker in graph.workers},
            model,
            tuple(self._told()),
        )

    def _told(self) -> list[str]:
        simulating, section, policy = self.simulating, self.recipe.environment, self.policy
        family = section.name.partition(":")[0]
        at_once = f"{self._at_once} simulators work at a time on a {self.device.kind} lane"
        if not section.has_processes:
            at_once = "simulators work one after the other, in their lane's own process"
        found = [
            f"{simulating.step * 1e3:g} ms of a core for a step of {family}",
            f"{self._picture * 1e3:g} ms to draw a picture",
            at_once,
            f"every rollout has {self._turns} turns, and every episode is as long as it may be",
            f"{bytes_text(self._simulators_bytes['simulators'])} of host memory for simulators",
        ]
        if self.guessed:
            found.append(self.guessed)
        if self._renderers:
            found.append(f"{RENDERER_BYTES / 1e9:g} GB of a gpu for each process that draws")
        if self.recipe.algorithm.further_draws:
            found.append("every further draw is of all groups: the most that it can take")
        if isinstance(policy, Body):
            found.append(
                f"{policy.tokens} tokens of an observation, "
                f"{policy.parameters / 1e9:.2f} billion parameters"
            )
        elif self._on_gpu:
            update = MINIBATCH_SECONDS[self.device.kind]
            found.append(f"{update * 1e3:g} ms to launch an optimizer step of so small a policy")
        return found

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def _on_gpu(self) -> bool:
        return self.device.kind == "gpu"

    @property
    def _picture(self) -> float:
        return self.simulating.drawn if self._on_gpu else self.simulating.picture

    @property
    def _at_once(self) -> int:
        """Simulators that work at a time on a lane."""
        section = self.recipe.environment
        if not section.has_processes:
            return 1
        if section.processes is not None:
            return section.processes
        return CORES_BESIDE_GPU if self._on_gpu else 1

    @property
    def _environments(self) -> int:
        """Environments on a lane, where all lanes have as many; so of its rollouts."""
        return -(-self.recipe.rollouts_per_step // self.lanes)

    @property
    def _loaded(self) -> int:
        """Processes that they are in: a lane's own one counts where a heavy simulator is loaded."""
        section = self.recipe.environment
        if not section.has_processes and is_light(section.name):
            return 0
        return min(self._at_once, self._environments)

    @property
    def _simulators_bytes(self) -> dict[str, float]:
        one = self.simulating
        size = self._loaded * one.process_bytes + self._environments * one.environment_bytes
        return {"simulators": size}

    @property
    def _renderers(self) -> int:
        """Processes of a lane that have the accelerator draw."""
        section = self.recipe.environment
        drawn = self._on_gpu and needs_renderer(section.name, section.options)
        return self._loaded if drawn else 0

    @property
    def _turns(self) -> int:
        return -(-self.recipe.rollout.horizon // self.recipe.policy.chunk)

    @property
    def _episodes(self) -> int:
        """Of a rollout, where each is as long as it may be; the last one is cut off with it."""
        longest = self.spec.max_episode_steps
        if longest is None or not self.recipe.rollout.automatic_reset:
            return 1
        return -(-self.recipe.rollout.horizon // longest)

    @property
    def _pictures(self) -> int:
        """That are drawn for an observation, whether the policy looks at them or not."""
        return sum(part.is_picture for part in self.spec.observations)

    @property
    def _seen_bytes(self) -> float:
        """Of an observation as it moves: what the environment gives, whatever the policy makes of
        it."""
        return BESIDE_PICTURES + sum(part.nbytes for part in self.spec.observations)

    @property
    def _rollout_bytes(self) -> float:
        """Of a whole rollout: what was seen in each turn, and where episodes were cut off."""
        return (self._turns + self._episodes) * self._seen_bytes

    @property
    def _number(self) -> int:
        """Bytes of a number that the policy computes with."""
        return 2 if self.recipe.policy.dtype == "bfloat16" else 4

    # --- stages -----------------------------------------------------------------------------------

    def _stage(self, node: StageNode) -> StageWork:
        whole = self._rollout_bytes
        match node.method:
            case "begin":
                return StageWork((self._simulated(self._beginning),), self._seen_bytes)
            case "step":
                return StageWork((self._stepping(),), self._seen_bytes + whole / self._turns)
            case "act":
                turns = Quantiles((float(self._turns),) * 2)
                acting = LayoutWork(call=self._acting, working_bytes=self._acting_bytes)
                return StageWork((acting,), 256.0, turns=turns)
            case "look_beyond":
                looking = LayoutWork(call=self._looking, working_bytes=self._looking_bytes)
                return StageWork((looking,), whole)
            case "train":
                return StageWork(tuple(map(self._training, self._divisions)), 256.0)
        return StageWork((LayoutWork(call=lambda n: Work(seconds=CALL_SECONDS + 1e-5 * n)),), whole)

    @property
    def _beginning(self) -> float:
        """Seconds of an episode's beginning, with its first observation."""
        return self.simulating.reset + self._pictures * self._picture

    def _stepping(self) -> LayoutWork:
        """A turn of each simulator; in some of them the next episode begins.

        What a rollout leaves behind comes with its last turn, so that a mean one has its share.
        """
        drawn = self._pictures * self._picture
        chunk = self.recipe.policy.chunk
        if self.recipe.environment.name.startswith("maniskill:"):  # observes as part of each step
            drawn *= chunk
        turn = chunk * self.simulating.step + drawn
        again = (self._episodes - 1) / self._turns * self._beginning
        beside = self._on_gpu and self.recipe.environment.has_processes  # its own cores
        elsewhere = turn / (turn + again) if beside else 0.0  # who begins an episode is waited for
        return replace(self._simulated(turn + again), elsewhere=elsewhere)

    def _simulated(self, seconds: float) -> LayoutWork:
        """So many seconds of a core for each simulator, and so many at a time."""
        waves = self._at_once
        return LayoutWork(call=lambda n: Work(seconds=CALL_SECONDS + -(-n // waves) * seconds))

    def _small(self, flops: float, seconds: float = 0.0) -> Work:
        """So many FLOPs of a small policy, and seconds besides."""
        share = GPU_ARITHMETIC if self._on_gpu else CORE_ARITHMETIC[self.recipe.policy.kind]
        return Work(flops, seconds=seconds, arithmetic=share, single_precision=True)

    def _acting(self, count: int) -> Work:
        body = self.policy
        if isinstance(body, SmallPolicy):
            return self._small(count * body.actor.forward, ACT_SECONDS[self.device.kind])
        read = self._number * body.parameters
        first = Work(
            count * body.forward_flops(), read, seconds=CALL_SECONDS, arithmetic=RATES.forward,
            bandwidth=RATES.decode_bandwidth, single_precision=self._number > WEIGHT_BYTES,
        )  # fmt: skip
        if not body.decoded:
            return first
        steps = decoding(body.text, count, count * body.tokens).times(body.decoded)
        return replace(first, then=(of_numbers(steps, self._number),))

    @property
    def _looked_at(self) -> int:
        """Observations of a rollout whose value is asked for: those at which an episode was cut
        off, and all of them where a critic apart has said nothing in acting."""
        apart = isinstance(self.policy, SmallPolicy) and self.policy.critic is not None
        return self._episodes + (self._turns if apart else 0)

    def _looking(self, count: int) -> Work:
        """What the cut episodes of rollouts are worth, and in what `look_beyond` judges else."""
        if isinstance(self.policy, SmallPolicy):
            flops = count * self._looked_at * self.policy.judging.forward
            return self._small(flops, ACT_SECONDS[self.device.kind])
        return self._acting(count * self._looked_at)  # acts, and drops what it decides

    def _looking_bytes(self, count: int) -> Held:
        at_once = self.recipe.update.turns_per_microbatch
        return self._acting_bytes(min(count * self._looked_at, at_once))

    def _acting_bytes(self, count: int) -> Held:
        body = self.policy
        if isinstance(body, SmallPolicy):
            widest = max(body.actor.widest, body.judging.widest)
            return {"activations": count * (self._seen_bytes + FLOAT_BYTES * widest)}
        text, tokens = body.text, count * body.tokens
        layer = self._number * (LAYER_HIDDEN * text.hidden + LAYER_CHANNELS * text.intermediate)
        kept = text.kv_bytes_per_token * self._number / 2 if body.decoded else 0.0
        return {"activations": tokens * layer, "keys and values": tokens * kept}

    # --- training ---------------------------------------------------------------------------------

    @property
    def _divisions(self) -> list[Division]:
        """How the trained policy can be divided."""
        most = self.lanes if is_divided(self.recipe) else 1
        return [Division(fsdp=n) for n in gang_sizes(most, self.device)]

    def _training(self, division: Division) -> LayoutWork:
        return LayoutWork(
            in_shards(division),
            lambda _n: Work(seconds=CALL_SECONDS),
            lambda replicas: self._learning(division, replicas),
            lambda _n: self._training_bytes(division),
        )

    @property
    def _again(self) -> bool:
        """Whether activations are computed again."""
        return self.recipe.computes_again(self.device.kind)

    def _trained(self, body: Body) -> float:
        """Parameters that are trained."""
        if not (rank := self.recipe.policy.lora_rank):
            return body.trainable
        beside = body.trainable / body.text.parameters
        return body.text.adapter_parameters(rank) * beside

    @property
    def _updates(self) -> int:
        """Optimizer steps of a step."""
        recipe = self.recipe
        if recipe.algorithm.name == "sac":
            return recipe.replay.updates
        return recipe.update.epochs * recipe.update.minibatches

    def _learning(self, division: Division, replicas: int) -> Work:
        """All passes over a replica's rollouts, and the optimizer steps, when the step's rollouts
        are all there."""
        recipe, policy = self.recipe, self.policy
        rollouts = ceil(recipe.rollouts_per_step / (replicas * division.fsdp))  # of a lane
        turns = float(rollouts * self._turns * recipe.update.epochs)
        if isinstance(policy, SmallPolicy):
            if recipe.algorithm.name == "sac":
                turns = self._updates * ceil(recipe.replay.batch_size / replicas)
            flops = turns * policy.learning(values=recipe.algorithm.has_critic)
            return replace(self._small(flops), then=(self._small_update(replicas),))
        frozen = recipe.policy.lora_rank > 0
        passes = FROZEN_FORWARD_AND_BACKWARD if frozen else FORWARD_AND_BACKWARD
        passes += RECOMPUTED_FORWARD if self._again else 0.0
        flops = turns * passes * policy.forward_flops()
        rounds = turns / recipe.update.turns_per_microbatch
        return Work(
            flops,
            sent_bytes=rounds * self._gathered_and_scattered(policy, division),
            span=division.fsdp,
            overlapped=True,
            arithmetic=RATES.training,
            single_precision=self._number > WEIGHT_BYTES,
            then=(self._update(policy, division, replicas),),
        )

    def _gathered_and_scattered(self, body: Body, division: Division) -> float:
        """Bytes that a lane sends for a micro-batch: weights for two passes, float32 gradients."""
        weights = ring_bytes(self._number * body.parameters, division.fsdp)
        return weights + ring_bytes(GRADIENT_BYTES * body.parameters, division.fsdp) / 2

    def _small_update(self, replicas: int) -> Work:
        """What optimizer steps of a small policy take beside the passes."""
        seconds = self._updates * MINIBATCH_SECONDS[self.device.kind]
        messages = float(self._updates * (replicas > 1))
        return Work(messages=messages, span=replicas, seconds=seconds)

    def _update(self, body: Body, division: Division, replicas: int) -> Work:
        """What optimizer steps take beside the passes."""
        own = self._trained(body) / division.fsdp
        return Work(
            read_bytes=self._updates * 2 * ADAM_BYTES * own,
            sent_bytes=ring_bytes(GRADIENT_BYTES * own, replicas) * self._updates,
            span=division.fsdp * replicas,
            apart=division.fsdp,
            bandwidth=RATES.decode_bandwidth,
            then=self._partial_microbatches(body, division),
        )

    def _partial_microbatches(self, body: Body, division: Division) -> tuple[Work, ...]:
        """What shards send for micro-batches that are not full: one for each optimizer step."""
        if division.fsdp == 1:
            return ()
        sent = self._updates * self._gathered_and_scattered(body, division)
        return (Work(sent_bytes=sent, span=division.fsdp),)

    def _rows(self, division: Division) -> int:
        """Turns, or rows of SAC's batches, whose activations are there at a time at most."""
        recipe, update = self.recipe, self.recipe.update
        if recipe.algorithm.name == "sac":
            return recipe.replay.batch_size
        shares = update.minibatches * division.fsdp
        minibatch = ceil(recipe.rollouts_per_step * self._turns / shares)
        return min(update.turns_per_microbatch, minibatch)

    def _training_bytes(self, division: Division) -> Held:
        body, turns = self.policy, self._rows(division)
        if isinstance(body, SmallPolicy):
            return {"activations": turns * (self._seen_bytes + FLOAT_BYTES * body.kept)}
        tokens, layers = turns * body.tokens, body.text.layers
        towers = turns * body.pictures * PATCHES * body.widths
        wide = self._number / 2
        layer = tokens * layer_activations(body.text)
        kept = layers * layer + SMALL_LAYER_BYTES * towers
        if (expert := body.expert) is not None:
            moved = turns * body.moved * body.denoising
            kept += moved * expert.layers * layer_activations(expert)
        if self._again:
            kept = 2 * (tokens * body.text.hidden * layers + towers) + layer
        found = {"activations": wide * kept}
        if division.fsdp > 1:  # two blocks, and what stands outside of them with its gradients
            outside = 2 * body.text.vocabulary * body.text.hidden + body.projector
            inside = (body.parameters - outside) / body.text.layers
            found["gathered weights"] = self._number * (2 * inside + 2 * outside)
            found["scattered gradients"] = GRADIENT_BYTES * outside
        return found

    def _worker(self, name: str) -> WorkerWork:
        rollouts = {"rollouts": self._environments * self._rollout_bytes}
        if name == "simulator":
            held = {"renderers": RENDERER_BYTES * self._renderers}
            return WorkerWork(
                [(ONE_LANE, held)],
                hosted=[(ONE_LANE, self._simulators_bytes | rollouts)],
                dealt=("simulators", *rollouts),
            )
        if name not in ("actor", "learner"):  # a pure function
            return WorkerWork(())
        weights = self._weights_bytes
        if name == "actor":
            return WorkerWork([(ONE_LANE, {"weights": weights})], weights)
        hosted = [(in_shards(one), self._buffered_bytes or rollouts) for one in self._divisions]
        states = [(in_shards(one), self._trained_bytes(one)) for one in self._divisions]
        return WorkerWork(states, weights, hosted, dealt=tuple(rollouts))

    @property
    def _weights_bytes(self) -> float:
        policy = self.policy
        number = FLOAT_BYTES if isinstance(policy, SmallPolicy) else self._number
        return float(number * policy.parameters)

    def _trained_bytes(self, division: Division) -> Held:
        """Of the learner's state on each lane of a replica."""
        policy = self.policy
        if isinstance(policy, SmallPolicy):
            held = {what: n * policy.parameters for what, n in trained_bytes(FLOAT_BYTES).items()}
            if policy.twins is not None:
                each = sum(trained_bytes(FLOAT_BYTES).values()) + FLOAT_BYTES
                held["critics and their targets"] = 2 * each * policy.twins.parameters
            return held
        trained = self._trained(policy)
        if self.recipe.policy.lora_rank:
            return {
                "weights": self._weights_bytes,
                "adapters and their optimizer": TRAINED_BYTES * trained,
            }
        held = {what: n * trained for what, n in trained_bytes(self._number).items()}
        held["weights"] = self._weights_bytes
        return {what: size / division.fsdp for what, size in held.items()}

    @property
    def _buffered_bytes(self) -> dict[str, float]:
        """Of SAC's buffer, which each lane has all of; nothing for other algorithms."""
        if self.recipe.algorithm.name != "sac":
            return {}
        actions = self.recipe.policy.chunk * self.spec.action.size
        width = 2 * self.spec.state_size() + actions + 2
        return {"replay buffer": float(FLOAT_BYTES * self.recipe.replay.capacity * width)}
