"""What the stages of an embodied recipe ask of a lane: the workload's `prices`.

Policies are priced by their sizes. What a simulator takes is in no data sheet: for the families
that m2flow knows there is what a step was measured to take on one core, and a guess where an
accelerator draws; each is told as an assumption. A run measures both, and its profile wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod

from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.flow.worker import ONE_LANE
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
    rising,
)
from m2flow.training.division import Division
from m2flow.workloads.common.workload import Assumed
from m2flow.workloads.embodied.bodies import PATCHES, Body, body_of
from m2flow.workloads.embodied.config import VISION_LANGUAGE_ACTION, EmbodiedRecipe
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

SMALL_TURN_SECONDS = {"mlp": 4e-6, "cnn": 4e-4}
"""Of a small policy on one core, for one turn of one rollout in the backward and forward pass."""

MINIBATCH_SECONDS = 0.4e-3
"""Of an optimizer step of a small policy, beside its turns."""


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
    body = None
    if recipe.policy.kind in VISION_LANGUAGE_ACTION:
        body = body_of(recipe, assumed.model)
    simulating = SIMULATORS[family]
    return lambda device, lanes: EmbodiedRecipeWork(recipe, simulating, body, device, lanes).work(
        graph
    )


@dataclass(frozen=True)
class EmbodiedRecipeWork:
    """A recipe's sizes, and how many lanes of a kind there are."""

    recipe: EmbodiedRecipe
    simulating: Simulating
    body: Body | None
    device: Device
    lanes: int

    def work(self, graph: FlowGraph) -> FlowWork:
        model = self.recipe.policy.kind if self.body is None else self.body.text.name
        return FlowWork(
            {node.name: self._stage(node) for node in graph.nodes},
            {worker: self._worker(worker) for worker in graph.workers},
            model,
            tuple(self._told()),
        )

    def _told(self) -> list[str]:
        simulating, section = self.simulating, self.recipe.environment
        family = section.name.partition(":")[0]
        found = [
            f"{simulating.step * 1e3:g} ms of a core for a step of {family}",
            f"{self._picture * 1e3:g} ms to draw a picture",
            f"{self._processes} simulators work at a time on a {self.device.kind} lane",
            f"every rollout has {self._turns} turns",
            f"{self._simulators_bytes['simulators'] / 1e9:.3g} GB of host memory for simulators",
        ]
        if self._pictures and self._on_gpu:
            found.append(f"{RENDERER_BYTES / 1e9:g} GB of a gpu for each process that draws")
        if self.recipe.algorithm.further_draws:
            found.append("every further draw is of all groups: the most that it can take")
        if self.body is not None:
            found.append(
                f"{self.body.tokens} tokens of an observation, "
                f"{self.body.parameters / 1e9:.2f} billion parameters"
            )
        return found

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def _on_gpu(self) -> bool:
        return self.device.kind == "gpu"

    @property
    def _picture(self) -> float:
        return self.simulating.drawn if self._on_gpu else self.simulating.picture

    @property
    def _processes(self) -> int:
        """Simulators that work at a time on a lane."""
        given = self.recipe.environment.processes
        if given is not None:
            return max(1, given)
        return CORES_BESIDE_GPU if self._on_gpu else 1

    @property
    def _environments(self) -> int:
        """Environments on a lane, where all lanes have as many."""
        return -(-self.recipe.rollouts_per_step // self.lanes)

    @property
    def _processes_started(self) -> int:
        """Processes that they are in."""
        return min(self._processes, self._environments)

    @property
    def _simulators_bytes(self) -> dict[str, float]:
        one = self.simulating
        size = (
            self._processes_started * one.process_bytes + self._environments * one.environment_bytes
        )
        return {"simulators": size}

    @property
    def _turns(self) -> int:
        return -(-self.recipe.rollout.horizon // self.recipe.policy.chunk)

    @property
    def _pictures(self) -> int:
        drawn = self.recipe.policy.kind != "mlp" or "pixels" in self.recipe.environment.options
        return len(self.recipe.policy.cameras) if drawn else 0

    @property
    def _seen_bytes(self) -> float:
        """Of an observation."""
        side = float(self.recipe.environment.options.get("pixels", 256))
        return 256.0 + 3 * side * side * self._pictures

    @property
    def _number(self) -> int:
        """Bytes of a number that the policy computes with."""
        return 2 if self.recipe.policy.dtype == "bfloat16" else 4

    # --- stages -----------------------------------------------------------------------------------

    def _stage(self, node: StageNode) -> StageWork:
        whole = self._turns * self._seen_bytes
        match node.method:
            case "begin":
                call = self._simulated(self.simulating.reset)
                return StageWork((call,), self._seen_bytes)
            case "step":
                steps = self.recipe.policy.chunk * self.simulating.step
                drawing = self._pictures * self._picture
                stepping = self._simulated(steps + drawing)
                beside = self._on_gpu and self.recipe.environment.has_processes  # its own cores
                return StageWork((replace(stepping, elsewhere=float(beside)),), self._seen_bytes)
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

    def _simulated(self, seconds: float) -> LayoutWork:
        """So many seconds of a core for each simulator, and so many at a time."""
        waves = self._processes
        return LayoutWork(call=lambda n: Work(seconds=CALL_SECONDS + -(-n // waves) * seconds))

    def _acting(self, count: int) -> Work:
        body = self.body
        if body is None:
            forward = SMALL_TURN_SECONDS[self.recipe.policy.kind] / 3
            return Work(seconds=CALL_SECONDS / 4 + count * forward)
        read = self._number * body.parameters
        first = Work(
            count * body.forward_flops(), read, seconds=CALL_SECONDS, arithmetic=RATES.forward,
            bandwidth=RATES.decode_bandwidth,
        )  # fmt: skip
        if not body.decoded:
            return first
        steps = decoding(body.text, count, count * body.tokens).times(body.decoded)
        return replace(first, then=(of_numbers(steps, self._number),))

    def _looking(self, count: int) -> Work:
        """What cut episodes are worth; a rollout is cut once, in the mean."""
        own = self.recipe.policy.kind == "mlp"  # whose critic has said nothing in acting
        return self._acting(count * (self._turns if own else 1))

    def _looking_bytes(self, count: int) -> Held:
        return self._acting_bytes(min(count, self.recipe.update.turns_per_microbatch))

    def _acting_bytes(self, count: int) -> Held:
        if self.body is None:
            return 0.0
        text, tokens = self.body.text, count * self.body.tokens
        layer = self._number * (LAYER_HIDDEN * text.hidden + LAYER_CHANNELS * text.intermediate)
        kept = text.kv_bytes_per_token * self._number / 2 if self.body.decoded else 0.0
        return {"activations": tokens * layer, "keys and values": tokens * kept}

    # --- training ---------------------------------------------------------------------------------

    @property
    def _divisions(self) -> list[Division]:
        """How the trained policy can be divided."""
        most = self.lanes if is_divided(self.recipe) else 1
        return [Division(fsdp=n) for n in rising(most)]

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

    @property
    def _trained(self) -> float:
        """Parameters that are trained."""
        assert self.body is not None
        if not (rank := self.recipe.policy.lora_rank):
            return self.body.parameters
        beside = self.body.parameters / self.body.text.parameters
        return self.body.text.adapter_parameters(rank) * beside

    def _learning(self, division: Division, replicas: int) -> Work:
        """All passes over a replica's rollouts, and the optimizer steps, when the step's rollouts
        are all there."""
        recipe, update = self.recipe, self._update(division, replicas)
        rollouts = ceil(recipe.rollouts_per_step / (replicas * division.fsdp))  # of a lane
        turns = float(rollouts * self._turns * recipe.update.epochs)
        if recipe.algorithm.name == "sac":
            steps = recipe.replay.updates * recipe.replay.batch_size
            turns = steps * rollouts / recipe.rollouts_per_step
        if self.body is None:
            return Work(seconds=turns * SMALL_TURN_SECONDS[recipe.policy.kind], then=(update,))
        frozen = recipe.policy.lora_rank > 0
        passes = FROZEN_FORWARD_AND_BACKWARD if frozen else FORWARD_AND_BACKWARD
        passes += RECOMPUTED_FORWARD if self._again else 0.0
        flops = turns * passes * self.body.forward_flops()
        rounds = turns / recipe.update.turns_per_microbatch
        return Work(
            flops,
            sent_bytes=rounds * self._gathered_and_scattered(division),
            span=division.fsdp,
            overlapped=True,
            arithmetic=RATES.training,
            then=(update,),
        )

    def _gathered_and_scattered(self, division: Division) -> float:
        """Bytes that a lane sends for a micro-batch: weights for two passes, float32 gradients."""
        assert self.body is not None
        weights = ring_bytes(self._number * self.body.parameters, division.fsdp)
        return weights + ring_bytes(GRADIENT_BYTES * self.body.parameters, division.fsdp) / 2

    def _update(self, division: Division, replicas: int) -> Work:
        """What optimizer steps take beside the passes."""
        recipe = self.recipe
        steps = recipe.update.epochs * recipe.update.minibatches
        if recipe.algorithm.name == "sac":
            steps = recipe.replay.updates
        if self.body is None:
            messages = float(steps * (replicas > 1))
            return Work(messages=messages, span=replicas, seconds=steps * MINIBATCH_SECONDS)
        own = self._trained / division.fsdp
        return Work(
            read_bytes=steps * 2 * ADAM_BYTES * own,
            sent_bytes=ring_bytes(GRADIENT_BYTES * own, replicas) * steps,
            span=division.fsdp * replicas,
            apart=division.fsdp,
            bandwidth=RATES.decode_bandwidth,
            then=self._partial_microbatches(division),
        )

    def _partial_microbatches(self, division: Division) -> tuple[Work, ...]:
        """What shards send for micro-batches that are not full: one for each optimizer step."""
        if division.fsdp == 1:
            return ()
        steps = self.recipe.update.epochs * self.recipe.update.minibatches
        sent = steps * self._gathered_and_scattered(division)
        return (Work(sent_bytes=sent, span=division.fsdp),)

    def _training_bytes(self, division: Division) -> Held:
        if self.body is None:
            return 0.0
        body, turns = self.body, self.recipe.update.turns_per_microbatch
        tokens, layers = turns * body.tokens, body.text.layers
        towers = turns * body.pictures * PATCHES * body.widths
        wide = self._number / 2
        layer = tokens * layer_activations(body.text)
        kept = layers * layer + SMALL_LAYER_BYTES * towers
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
        if name == "simulator":
            drawn = self._pictures and self._on_gpu
            held = {"renderers": RENDERER_BYTES * self._processes_started} if drawn else 0.0
            return WorkerWork([(ONE_LANE, held)], hosted=[(ONE_LANE, self._simulators_bytes)])
        if name not in ("actor", "learner"):  # a pure function
            return WorkerWork(())
        if self.body is None:
            size = 4.0 * prod(self.recipe.policy.hidden)
            return WorkerWork([(ONE_LANE, size * (1 if name == "actor" else 4))], size)
        weights = self._number * self.body.parameters
        if name == "actor":
            return WorkerWork([(ONE_LANE, {"weights": weights})], weights)
        if self.recipe.policy.lora_rank:
            held = {
                "weights": weights,
                "adapters and their optimizer": TRAINED_BYTES * self._trained,
            }
            return WorkerWork([(ONE_LANE, held)], weights)
        each = trained_bytes(self._number)
        states = [
            (in_shards(one), {what: n * self._trained / one.fsdp for what, n in each.items()})
            for one in self._divisions
        ]
        return WorkerWork(states, weights)
