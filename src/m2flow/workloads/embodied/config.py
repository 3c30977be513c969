"""The recipe of an embodied run: the keys that `m2flow.workloads.common.Recipe` does not have.

Sizes are named for what they count. Nothing here imports torch or a simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from m2flow.errors import UserError
from m2flow.workloads.common import recipe as common
from m2flow.workloads.common.recipe import (
    Count,
    Deadline,
    Decay,
    Flag,
    Natural,
    NonNegative,
    Options,
    Positive,
    Rank,
    Section,
    Share,
    Temperature,
)

if TYPE_CHECKING:
    from m2flow.environments.deadlines import Deadlines


class DeadlinesPart(Section):
    """Seconds after which a simulator's process counts as hung; `m2flow.environments.Deadlines`.

    `step` and `reset` are of one environment, `start` is until simulators stand, and `render` of a
    call that draws, saves or restores.
    """

    start: Deadline = 600.0
    reset: Deadline = 300.0
    step: Deadline = 60.0
    render: Deadline = 120.0


class EnvironmentSection(Section):
    """The simulator: `name` is "family:task" or "module:Class", `options` are its own.

    `processes` simulators run in so many processes of each lane; None for one a core where the
    simulator is a heavy one, 0 for none: it then runs in the lane's own process. `python` is their
    interpreter, where the simulator's packages clash with m2flow's. `reward` is "module:function":
    given the environment and what a step did, it says the step's reward in the simulator's place.
    `deadlines` say when one of the processes counts as hung.
    With `steps_aside` a simulator that cannot save its state leaves a lane that is short of memory
    too, and replays its episodes when it is back.
    """

    name: str
    options: Options = Field(default_factory=dict)
    processes: Natural | None = None
    python: str | None = None
    reward: str | None = None
    steps_aside: Flag = False
    deadlines: DeadlinesPart | None = None

    @property
    def hung_after(self) -> Deadlines | None:
        """When one of its processes counts as hung; None for what environments say themselves."""
        from m2flow.environments.deadlines import Deadlines

        return None if self.deadlines is None else Deadlines(**self.deadlines.model_dump())

    @property
    def arguments(self) -> dict[str, Any]:
        """What the environment is made with beside its name."""
        given = {} if self.reward is None else {"reward_function": self.reward}
        return {**self.options, **given}

    @model_validator(mode="after")
    def _another_interpreter_has_processes(self) -> EnvironmentSection:
        if self.python is not None and self.processes == 0:
            raise UserError(
                "another interpreter runs in processes of its own",
                key="environment.processes",
                value=0,
                expected="at least 1",
                hint="take it out for one a core",
            )
        return self

    @model_validator(mode="after")
    def _deadlines_are_of_processes(self) -> EnvironmentSection:
        if self.deadlines is not None and not self.has_processes:
            raise UserError(
                "hold for processes of simulators, and this one runs in the lane's own",
                key="environment.deadlines",
                hint="set environment.processes: 1, or as many as a lane has cores",
            )
        return self

    @property
    def has_processes(self) -> bool:
        """Whether simulators run in processes of their own."""
        from m2flow.environments.registry import is_light

        if self.processes is not None:
            return self.processes > 0
        return not is_light(self.name) or self.python is not None


KEYS_OF_POLICIES = {
    "hidden": ("mlp",),
    "normalize_state": ("mlp",),
    "features": ("cnn",),
    "distribution": ("mlp", "cnn"),
    "cameras": ("cnn", "openvla", "openvla-oft", "pi0"),
    "statistics": ("openvla", "openvla-oft"),
    "gripper": ("openvla", "openvla-oft"),
    "centre_crop": ("openvla", "openvla-oft"),
    "resize": ("openvla", "openvla-oft"),
    "temperature": ("openvla", "openvla-oft"),
    "dtype": ("openvla", "openvla-oft", "pi0"),
    "lora_rank": ("openvla", "openvla-oft", "pi0"),
    "proprioception": ("openvla-oft",),
    "head": ("openvla-oft",),
    "noise": ("pi0",),
    "noise_level": ("pi0",),
    "denoising_steps": ("pi0",),
}
"""Keys of `policy` to the kinds of policies that read them, where not all do."""

IN_BLOCKS = ("openvla", "openvla-oft")
"""Kinds of policies whose activations can be computed again."""

VISION_LANGUAGE_ACTION = ("openvla", "openvla-oft", "pi0")
"""Kinds of policies that are published as models."""

TINY = "tiny"
"""What `model` names in the place of a folder: a small model of the same structure."""

STATES = "states"
"""What `model` names for a small policy of the environment's state, which needs no pictures."""


class PolicySection(Section):
    """What acts: a small actor-critic, or a vision-language-action model.

    Of the latter `statistics`, `dtype` and `head` speak of a published checkpoint: a tiny model has
    a scale of its own, in float32, and no regression head, which is for evaluation alone. With
    `lora_rank` only adapters of that rank are trained.
    """

    kind: Literal["mlp", "cnn", "openvla", "openvla-oft", "pi0"] = "mlp"
    chunk: Count = 1
    hidden: tuple[Count, ...] = (128, 128)
    normalize_state: Flag = True
    features: Count = 256
    distribution: Literal["auto", "gaussian", "squashed", "categorical"] = "auto"
    cameras: Annotated[tuple[str, ...], Field(min_length=1)] = ("image",)
    statistics: str | None = None
    gripper: Literal["as_it_is", "libero", "widowx"] = "as_it_is"
    centre_crop: Flag = False
    resize: Literal["bicubic", "lanczos"] = "bicubic"
    temperature: Temperature = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora_rank: Rank = 0
    proprioception: Flag = False
    head: Literal["discrete", "l1"] = "discrete"
    noise: Literal["sde", "network"] = "sde"
    noise_level: Positive = 0.5
    denoising_steps: Count | None = None

    @model_validator(mode="after")
    def _keys_belong_to_the_kind(self) -> PolicySection:
        common.refuse_keys_of_others(self, "policy.kind", KEYS_OF_POLICIES)
        common.refuse_keys_of_others(self, "policy.noise", {"noise_level": ("sde",)})
        if self.kind == "openvla" and self.chunk > 1:
            raise UserError(
                "openvla decodes the tokens of one action",
                key="policy.chunk",
                value=self.chunk,
                expected="1",
                hint="of a checkpoint that decodes chunks say policy.kind: openvla-oft",
            )
        if self.kind == "openvla-oft" and self.chunk == 1:
            raise UserError(
                "openvla-oft decodes the actions of a chunk at once, and reads no other chunk than "
                "it was trained on",
                key="policy.chunk",
                value=1,
                expected="8 for the checkpoints of LIBERO",
            )
        return self


class EmbodiedWarmupSection(Section):
    """Behaviour cloning before reinforcement, from demonstrations.

    They lie in the file `data`, or are played by `expert`, "module:function": given the environment
    it says what to do there. Without either the environment's own method `expert` is asked.
    Steps are AdamW's without weight decay, on the first accelerator with room for the policy and
    its optimizer, else on the cores of the launcher, as where `lanes` are of cores.
    """

    steps: Natural = 0
    data: str | None = None
    episodes: Count = 200
    batch_size: Count = 64
    learning_rate: Positive = 1e-3
    expert: str | None = None

    @model_validator(mode="after")
    def _demonstrations_come_from_one_place(self) -> EmbodiedWarmupSection:
        for key in ("episodes", "expert"):
            value = getattr(self, key)
            if self.data is not None and value != type(self).model_fields[key].default:
                raise UserError(
                    "is for demonstrations that are played, and warmup.data has them",
                    key=f"warmup.{key}",
                    value=value,
                    hint="take one of the two out",
                )
        return self


class RolloutSection(Section):
    """A rollout is what one environment does in a step of training.

    With `automatic_reset` it is `horizon` environment steps long, and another episode begins where
    one ends; without, it is one episode of at most so many steps.
    """

    horizon: Count = 200
    automatic_reset: Flag = True


KEYS_OF_ALGORITHMS = {
    "level": ("ppo", "grpo"),
    "clip_low": ("ppo", "grpo"),
    "clip_high": ("ppo", "grpo"),
    "entropy_coefficient": ("ppo", "grpo"),
    "gamma": ("ppo", "sac"),
    "lam": ("ppo",),
    "advantage_level": ("ppo",),
    "value_clip": ("ppo",),
    "value_coefficient": ("ppo",),
    "value_warmup_steps": ("ppo",),
    "normalize_advantage": ("ppo",),
    "group_size": ("grpo",),
    "normalize_std": ("grpo",),
    "reward": ("grpo",),
    "success_bounds": ("grpo",),
    "further_draws": ("grpo",),
    "aggregation": ("grpo",),
    "polyak": ("sac",),
    "target_entropy": ("sac",),
    "first_temperature": ("sac",),
}
"""Keys of `algorithm` to the algorithms that read them, where not all do."""


class EmbodiedAlgorithmSection(Section):
    """PPO with the policy's own value head, GRPO over rollouts that begin alike, or SAC.

    Of GRPO's groups those are dropped whose share of successes is outside `success_bounds`, after
    other starts were tried in their place `further_draws` times at most; without bounds, those are
    tried again whose episodes are all worth the same. In the
    first `value_warmup_steps` steps of PPO the critic alone learns, and the policy stands still,
    whose learning rate rises and falls behind them; optimizer steps that are left out do not count.
    With `advantage_level: action` an action is not credited with rewards of its chunk before it.
    """

    name: Literal["ppo", "grpo", "sac"] = "ppo"
    level: Literal["token", "action", "chunk"] = "action"
    clip_low: Share = 0.2
    clip_high: Positive = 0.2
    gamma: Share = 0.99
    lam: Share = 0.95
    advantage_level: Literal["chunk", "action"] = "chunk"
    value_clip: Positive | None = None
    value_coefficient: NonNegative = 0.5
    value_warmup_steps: Natural = 0
    entropy_coefficient: NonNegative = 0.0
    normalize_advantage: Flag = True
    group_size: Count = 8
    normalize_std: Flag = True
    reward: Literal["success", "return"] = "success"
    success_bounds: tuple[Share, Share] | None = None
    further_draws: Natural = 0
    aggregation: Literal["token-mean", "sequence-mean-token-mean"] = "token-mean"
    polyak: Share = 0.005
    target_entropy: Annotated[float, Field(strict=True)] | None = None
    first_temperature: Positive = 1.0

    @property
    def has_critic(self) -> bool:
        """Whether the policy says what observations are worth, where it need not."""
        return self.name == "ppo"

    @model_validator(mode="after")
    def _keys_belong_to_the_algorithm(self) -> EmbodiedAlgorithmSection:
        common.refuse_keys_of_others(self, "algorithm.name", KEYS_OF_ALGORITHMS)
        if self.advantage_level == "action" and self.level == "chunk":
            raise UserError(
                "a whole chunk has one probability ratio, and so one advantage",
                key="algorithm.advantage_level",
                value="action",
                expected="chunk, or algorithm.level action or token",
            )
        if self.success_bounds is not None and self.success_bounds[0] > self.success_bounds[1]:
            raise UserError(
                "the lower bound comes first",
                key="algorithm.success_bounds",
                value=list(self.success_bounds),
            )
        return self


class UpdateSection(Section):
    """What a step of training makes of its rollouts: `epochs` passes of `minibatches` each.

    With `gradient_checkpointing` activations of OpenVLA and OpenVLA-OFT are computed again in the
    backward pass; null: on accelerators. Other policies have no such blocks.
    """

    epochs: Count = 4
    minibatches: Count = 4
    turns_per_microbatch: Count = 4096
    gradient_checkpointing: Flag | None = None


class ReplaySection(Section):
    """The buffer that SAC learns from: `updates` batches of it after each step of training.

    Nothing is learned before it has `begin` transitions.
    """

    capacity: Count = 100_000
    begin: Natural = 1000
    batch_size: Count = 256
    updates: Count = 256


class EmbodiedOptimizerSection(common.OptimizerSection):
    """AdamW."""

    learning_rate: Positive = 3e-4
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    max_grad_norm: Positive | None = 0.5


class EpisodesSection(common.EvaluationSection):
    """Success and return of greedy episodes with seeds of their own; some of them are filmed."""

    episodes: Natural = 20
    films: Natural = 1


class EmbodiedRecipe(common.Recipe):
    """A whole run.

    With `model: tiny` what `tiny` says, by key with dots, takes the place of the recipe's own
    values, and with `model: states` what `states` says; what the command line says still wins.
    """

    workload: Literal["embodied"] = "embodied"
    name: str = "embodied"
    model: str | None = None
    tiny: Options = Field(default_factory=dict)
    states: Options = Field(default_factory=dict)
    rollouts_per_step: Count = 16
    environment: EnvironmentSection
    policy: PolicySection = PolicySection()
    warmup: EmbodiedWarmupSection = EmbodiedWarmupSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: EmbodiedAlgorithmSection = EmbodiedAlgorithmSection()
    update: UpdateSection = UpdateSection()
    replay: ReplaySection = ReplaySection()
    optimizer: EmbodiedOptimizerSection = EmbodiedOptimizerSection()
    evaluation: EpisodesSection = EpisodesSection()

    @classmethod
    def stand_ins(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        chosen = data.get("model")
        if chosen not in (TINY, STATES) or not isinstance(data.get(chosen), dict):
            return {}
        # Once: what the run's own config.yaml says is not replaced again.
        return {**data[chosen], TINY: {}, STATES: {}} if data[chosen] else {}

    @property
    def group_size(self) -> int:
        """Rollouts that begin alike."""
        return self.algorithm.group_size if self.algorithm.name == "grpo" else 1

    @property
    def items_per_step(self) -> int:
        return self.rollouts_per_step // self.group_size

    @property
    def evaluated_at_once(self) -> int:
        """As many as the rollouts of a step: each has a simulator of its own."""
        return self.rollouts_per_step

    @property
    def step_size(self) -> str:
        return f"{self.rollouts_per_step} rollouts of up to {self.rollout.horizon} steps"

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run."""
        if self.algorithm.name == "sac":
            return self.steps * self.replay.updates
        return self.steps * self.update.epochs * self.update.minibatches

    @property
    def idle_steps(self) -> int:
        """Optimizer steps at the start in which the critic alone learns."""
        return self.algorithm.value_warmup_steps * self.update.epochs * self.update.minibatches

    def computes_again(self, device: str) -> bool:
        """Whether the backward pass computes activations again, on a device or kind of lane."""
        chosen = self.update.gradient_checkpointing
        on_device = not device.startswith("cpu") if chosen is None else chosen
        return on_device and self.policy.kind in IN_BLOCKS

    @property
    def fixed_steps(self) -> str | None:
        return self.optimizer.fixed_steps

    def derived(self) -> dict[str, int]:
        return {
            "environment_steps_per_step": self.rollouts_per_step * self.rollout.horizon,
            "optimizer_steps": self.optimizer_steps,
        }

    @model_validator(mode="after")
    def _model_is_of_the_kind(self) -> EmbodiedRecipe:
        published = self.policy.kind in VISION_LANGUAGE_ACTION
        if self.model == STATES and self.policy.kind != "mlp":
            raise UserError(
                "the recipe has no stand-in by state: it says nothing under `states`",
                key="model",
                value=STATES,
                expected=f"a folder, or {TINY}" if published else "policy.kind: mlp, or no model",
            )
        if self.model not in (None, STATES) and not published:
            raise UserError(
                f"a policy of kind {self.policy.kind} is made from its sizes",
                key="model",
                value=self.model,
                hint=f"set policy.kind to {' or '.join(VISION_LANGUAGE_ACTION)}, or take it out",
            )
        if self.update.gradient_checkpointing and self.policy.kind not in IN_BLOCKS:
            raise UserError(
                f"a policy of kind {self.policy.kind} has no blocks that can be computed again",
                key="update.gradient_checkpointing",
                value=True,
                hint="take it out",
            )
        return self

    def without_effect(self, written: Mapping[str, Any]) -> str | None:
        warmup = written.get("warmup")
        if self.warmup.steps or not isinstance(warmup, Mapping) or "steps" in warmup:
            return None
        keys = [f"warmup.{key}" for key in ("data", "expert") if warmup.get(key) is not None]
        return f"{', '.join(keys)}: without effect, since warmup.steps is 0" if keys else None

    def require_model(self) -> None:
        """Refuse to run a recipe of a published checkpoint that names none; it can be planned."""
        if self.model is None and self.tiny:
            raise UserError(
                "the recipe is for a published checkpoint, which it does not name",
                key="model",
                expected=f"model=FOLDER, or model={TINY} for a small one made on the spot"
                + (f", or model={STATES} for a policy without pictures" if self.states else ""),
            )

    @model_validator(mode="after")
    def _sizes_fit(self) -> EmbodiedRecipe:
        size = self.group_size
        if size > self.rollouts_per_step:
            raise UserError(
                "a group is larger than the rollouts of a step",
                key="algorithm.group_size",
                value=size,
                expected=f"at most rollouts_per_step = {self.rollouts_per_step}",
            )
        if self.algorithm.name == "grpo" and size < 2:
            raise UserError(
                "rollouts that begin alike are compared with each other",
                key="algorithm.group_size",
                value=size,
                expected="at least 2",
            )
        if self.rollouts_per_step % size:
            raise UserError(
                "the rollouts do not fill whole groups",
                key="rollouts_per_step",
                value=self.rollouts_per_step,
                expected=f"a multiple of algorithm.group_size = {size}",
            )
        if self.algorithm.name == "grpo" and self.rollout.automatic_reset:
            raise UserError(
                "a group compares single episodes",
                key="rollout.automatic_reset",
                value=True,
                hint="set it to false",
            )
        if self.rollout.horizon % self.policy.chunk:
            raise UserError(
                "a rollout does not hold whole chunks of actions",
                key="rollout.horizon",
                value=self.rollout.horizon,
                expected=f"a multiple of policy.chunk = {self.policy.chunk}",
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> EmbodiedRecipe:
        if self.policy.kind == "pi0" and self.algorithm.advantage_level == "action":
            raise UserError(
                "pi0 denoises the actions of a chunk together: rewards of the first depend on all",
                key="algorithm.advantage_level",
                value="action",
                expected="chunk",
            )
        fixed = self.policy.kind == "pi0" and self.policy.noise == "sde"
        if fixed and self.algorithm.entropy_coefficient:
            raise UserError(
                "the noise of the stochastic equation is fixed, and so is its entropy",
                key="algorithm.entropy_coefficient",
                value=self.algorithm.entropy_coefficient,
                expected="0, or policy.noise: network",
            )
        sac = self.algorithm.name == "sac"
        steps = "(steps - algorithm.value_warmup_steps)" if self.idle_steps else "steps"
        sizes = "replay.updates" if sac else "update.epochs x update.minibatches"
        self.optimizer.check_schedule(self.optimizer_steps - self.idle_steps, f"{steps} x {sizes}")
        if sac and self.replay.begin > self.replay.capacity:
            raise UserError(
                "the buffer never holds so many transitions, so that nothing is learned",
                key="replay.begin",
                value=self.replay.begin,
                expected=f"at most replay.capacity = {self.replay.capacity}",
            )
        if sac and (self.policy.kind, self.policy.distribution) != ("mlp", "squashed"):
            raise UserError(
                "sac is for policies of states whose actions are squashed to their bounds",
                key="policy",
                value={"kind": self.policy.kind, "distribution": self.policy.distribution},
                expected="{kind: mlp, distribution: squashed}",
            )
        for key, default in (("replay", ReplaySection()), ("update", UpdateSection())):
            section = getattr(self, key)
            if section != default and sac != (key == "replay"):
                raise UserError(
                    f"{self.algorithm.name} has no use for it",
                    key=key,
                    value=section.model_dump(exclude_defaults=True),
                    hint="take it out" if sac else "set algorithm.name to sac, or take it out",
                )
        return self
