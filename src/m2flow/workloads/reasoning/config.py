"""The recipe of a reasoning run: the keys that `m2flow.workloads.common.Recipe` does not have.

Sizes are named for what they count. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from m2flow.errors import UserError
from m2flow.generation.supported import ENGINES, SAMPLERS, engines_that
from m2flow.workloads.common import recipe as common
from m2flow.workloads.common.recipe import (
    Count,
    Flag,
    Gigabytes,
    Natural,
    Positive,
    Rank,
    Running,
    Section,
    Share,
    Temperature,
)
from m2flow.workloads.reasoning.algorithm_section import (
    FURTHER_DRAWS,
    OF_GROUPS,
    AlgorithmSection,
    CriticSection,
)
from m2flow.workloads.reasoning.data_section import DataSection
from m2flow.workloads.reasoning.reward_sections import (
    JudgeSection,
    RewardModelSection,
    Rewards,
    check_models,
)

Dtype = Literal["auto", "float32", "float64", "bfloat16"]
"""What is computed in; auto: bfloat16 on accelerators, float32 on CPUs. Of a model that learns in
bfloat16 the optimizer keeps float32 weights, gradients and moments."""

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]


CACHE_SHARE = 0.5
"""Of an accelerator's memory, for keys and values where the recipe does not say; or what the
weights leave of the share that a lane may take, if that is less."""


class ModelSection(Section):
    """The policy: a folder in Hugging Face layout, or a tiny Qwen2 built on the spot.

    Beside `path` the sizes of the tiny one have no effect, and a line says so where they are given.

    With `lora_rank` only adapters of that rank are trained, scaled by `lora_alpha / lora_rank`
    (null: by 2). Saved is the sum, and published too; or, with `lora_publish: adapter`, adapters
    alone, which each lane that generates adds to the model that the run has begun with.
    """

    path: str | None = None
    dtype: Dtype = "auto"
    lora_rank: Rank = 0
    lora_alpha: Count | None = None
    lora_publish: Literal["merged", "adapter"] = "merged"
    hidden_size: Count = 128
    num_hidden_layers: Count = 4
    num_attention_heads: Count = 4
    num_key_value_heads: Count = 2
    intermediate_size: Count = 384
    max_position_embeddings: Count = 2048
    initializer_range: Positive = 0.08

    @property
    def lora_scale(self) -> float:
        """What the product of an adapter is multiplied by."""
        return (2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha) / self.lora_rank

    @model_validator(mode="after")
    def _adapters_are_there(self) -> ModelSection:
        for key, off in (("lora_alpha", None), ("lora_publish", "merged")):
            if not self.lora_rank and (value := getattr(self, key)) != off:
                raise UserError(
                    "there are no adapters",
                    key=f"model.{key}",
                    value=value,
                    hint="set model.lora_rank, such as 16, or take it out",
                )
        return self


OF_TINY = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "initializer_range",
)
"""Keys of `model` that the tiny model is made by, and nothing else."""


class WarmupSection(Section):
    """Supervised steps on the task's demonstrations before reinforcement; 0 for none."""

    steps: Natural = 0
    samples_per_step: Count = 16
    learning_rate: Positive = 2e-3


Strings = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
"""One string or several, none of them empty."""


class GenerationSection(Section):
    """How answers are drawn; `dtype` is the model's where it is not said.

    Any of the strings in `stop` ends an answer with the token that completes it, as the model's end
    tokens do; the answer keeps it. A special token, such as `<|im_end|>`, is one of them by name.

    `top_k`, `top_p` and `min_p` keep the likeliest tokens. Training knows nothing of them: ratios
    to what was drawn from are off then, unless `training.recompute_logprobs` sets them right.

    Keys and values take `cache_gb` on each lane at most (10**9 bytes; null: half of the memory of
    an accelerator, and on CPUs what they need, or 2**30 bytes with the engine of another package).

    With `tokens_per_step` an answer that has not ended after so many tokens of a step goes on in a
    later one, on the weights of then; its group is trained on when all of its answers have ended.
    With `max_versions` a recipe is refused by which weights that drew a token may lag behind the
    step that trains on it by more.

    With `captured_decode` the native engine records its decode steps on an accelerator as CUDA
    graphs, and replays them.
    """

    max_new_tokens: Count = 24
    tokens_per_step: Count | None = None
    max_versions: Natural | None = None
    temperature: Temperature = 1.0
    top_k: Natural = 0
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    min_p: Share = 0.0
    max_running: Running = 256
    engine: EngineName = "native"
    dtype: Dtype | None = None
    cache_gb: Gigabytes | None = None
    captured_decode: Flag = True
    stop: Strings = ()

    @model_validator(mode="after")
    def _engine_does_it(self) -> GenerationSection:
        engine, least = ENGINES[self.engine], ENGINES[self.engine].least_temperature
        if self.temperature < least:
            others = engines_that(lambda one: one.least_temperature <= self.temperature)
            raise UserError(
                f"{engine.label} draws at {least} where less is asked",
                key="generation.temperature",
                value=self.temperature,
                expected=f"at least {least}, or {others}",
            )
        for key, off in SAMPLERS.items():
            if key not in engine.samplers and getattr(self, key) != off:
                raise self._no_sampler(key, off)
        return self

    def _no_sampler(self, key: str, off: float) -> UserError:
        return UserError(
            ENGINES[self.engine].why_no_sampler,
            key=f"generation.{key}",
            value=getattr(self, key),
            expected=f"{off}, or {engines_that(lambda one: key in one.samplers)}",
        )


class TrainingSection(Section):
    """How the learner computes; all but three of these change the result by rounding alone.

    `recompute_logprobs` is another objective where data are stale, or engine and trainer differ.
    With `gradient_checkpointing` activations are computed again in the backward pass, which takes a
    third more arithmetic and leaves the memory to longer micro-batches; null: on accelerators.
    With `optimizer_on_host` the optimizer's state is in host memory, and the CPU takes its steps.
    With `fused_kernels` policy, reference and critic compute by Liger's kernels, on CUDA; null:
    where these can be used; true refuses a run that could not use them.

    Two settings, which need torchao, change it too: `moments: 8bit` keeps the optimizer's
    moments in 8 bits, and `rounding: stochastic` steps bfloat16 weights without float32 copies.
    """

    tokens_per_microbatch: Count = 2048
    sharing: Literal["prefix", "prompt", "none"] = "prefix"
    drop_zero_advantage: Flag = True
    recompute_logprobs: Flag = False
    gradient_checkpointing: Flag | None = None
    optimizer_on_host: Flag = False
    fused_kernels: Flag | None = None
    moments: Literal["float32", "8bit"] = "float32"
    rounding: Literal["nearest", "stochastic"] = "nearest"

    @property
    def of_torchao(self) -> str | None:
        """A key that asks for torchao; None where none does."""
        asking = {"moments": self.moments == "8bit", "rounding": self.rounding == "stochastic"}
        return next((f"training.{key}" for key, asks in asking.items() if asks), None)

    @model_validator(mode="after")
    def _has_master_copies(self) -> TrainingSection:
        if self.rounding == "stochastic" and self.optimizer_on_host:
            raise UserError(
                "stochastic rounding leaves no float32 weights that could be in host memory",
                key="training.rounding",
                value=self.rounding,
                expected="nearest where training.optimizer_on_host is true",
            )
        return self

    def checkpoints_on(self, device: str) -> bool:
        """Whether activations are computed again, on a device or kind of lane."""
        chosen = self.gradient_checkpointing
        return not device.startswith("cpu") if chosen is None else chosen


class GreedyEvaluationSection(common.EvaluationSection):
    """Greedy accuracy on held-out problems, at step 0, every `every` steps, and at the end."""

    problems: Natural = 512


PRETRAINED: dict[str, dict[str, Any]] = {
    "generation": {"max_new_tokens": 4096},
    "optimizer": {"learning_rate": 1e-6},
    "training": {"tokens_per_microbatch": 16384},
}
"""What is not said of a run that starts from a model's folder: sizes of real models and answers.

One learning rate for all sizes: DAPO trains 32 billion parameters with it (arXiv 2503.14476), and
it is veRL's default for any model.
"""

LEARNING_RATE_OF_ADAPTERS = 2e-5
"""In place of that of `PRETRAINED`, where adapters alone are trained."""

LEARNING_RATE_OF_CRITICS = 1e-5
"""Of a critic that is made of a model's folder."""


class ReasoningRecipe(common.Recipe):
    """A whole run.

    Where `model.path` names a model, `pretrained` takes the place of the defaults, which are those
    of the tiny one.
    """

    pretrained: ClassVar[dict[str, dict[str, Any]]] = PRETRAINED

    workload: Literal["reasoning"] = "reasoning"
    name: str = "reasoning"
    prompts_per_step: Count = 32
    samples_per_prompt: Count = 8
    minibatches: Count = 2
    minibatch_order: Literal["index", "arrival"] = "index"
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    reward: Rewards = None
    warmup: WarmupSection = WarmupSection()
    generation: GenerationSection = GenerationSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    critic: CriticSection = CriticSection()
    optimizer: common.OptimizerSection = common.OptimizerSection()
    training: TrainingSection = TrainingSection()
    evaluation: GreedyEvaluationSection = GreedyEvaluationSection()
    reward_model: RewardModelSection = RewardModelSection()
    judge: JudgeSection = JudgeSection()

    def without_effect(self, written: Mapping[str, Any]) -> str | None:
        model = written.get("model")
        if self.model.path is None or not isinstance(model, Mapping):
            return None
        fields = ModelSection.model_fields
        keys = [
            key for key in OF_TINY if model.get(key, fields[key].default) != fields[key].default
        ]
        names = ", ".join(f"model.{key}" for key in keys)
        return f"{names}: without effect, since model.path is set" if keys else None

    @property
    def items_per_step(self) -> int:
        return self.prompts_per_step

    @property
    def step_size(self) -> str:
        return f"{self.prompts_per_step} x {self.samples_per_prompt} samples"

    @property
    def profiling_seconds(self) -> float:
        return 60.0 if self.model.path is None else super().profiling_seconds

    @property
    def fixed_steps(self) -> str | None:
        return self.optimizer.fixed_steps

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run."""
        return self.steps * self.minibatches * self.algorithm.epochs

    @property
    def idle_steps(self) -> int:
        """Optimizer steps at the start in which the critic alone learns."""
        return self.critic.warmup_steps * self.minibatches * self.algorithm.epochs

    @property
    def longest_answer(self) -> int:
        """Tokens that may stand behind a prompt."""
        return self.generation.max_new_tokens

    @property
    def samples_per_minibatch(self) -> int:
        return self.samples_per_step // self.minibatches

    @model_validator(mode="before")
    @classmethod
    def _as_a_pretrained_model_needs(cls, data: Any) -> Any:
        """Keys that are not said are those of `pretrained` where there is a model."""
        model = data.get("model") if isinstance(data, dict) else None
        if not isinstance(model, dict) or model.get("path") is None:
            return data
        unsaid = dict(cls.pretrained)
        if model.get("lora_rank"):
            unsaid["optimizer"] = {"learning_rate": LEARNING_RATE_OF_ADAPTERS}
        algorithm = data.get("algorithm")
        if isinstance(algorithm, dict) and algorithm.get("name") == "ppo":
            unsaid["critic"] = {"learning_rate": LEARNING_RATE_OF_CRITICS}
        said = {name: data.get(name, {}) for name in unsaid}
        fitting = {
            name: unsaid[name] | section
            for name, section in said.items()
            if isinstance(section, dict)
        }
        return data | fitting

    @model_validator(mode="after")
    def _sizes_fit(self) -> ReasoningRecipe:
        if self.algorithm.name in OF_GROUPS and self.samples_per_prompt < 2:
            raise UserError(
                f"{self.algorithm.name} compares the samples of a prompt with each other",
                key="samples_per_prompt",
                value=self.samples_per_prompt,
                expected="at least 2",
            )
        if self.samples_per_step % self.minibatches:
            raise UserError(
                f"{self.prompts_per_step} x {self.samples_per_prompt} = {self.samples_per_step} "
                f"samples do not divide into {self.minibatches} mini-batches of the same size",
                key="prompts_per_step x samples_per_prompt, minibatches",
                hint="change one of the three",
            )
        return self

    @property
    def feedback_lag(self) -> int:
        """A step's problems may follow from results of steps at least so many before it: so many
        may be in flight, and as many more be done whose results are not told."""
        return 1 + 2 * self.max_staleness

    def allows_staleness(self, steps: int) -> bool:
        follows = self.data.curriculum is not None or self.further_draws > 0
        follows |= self.generation.tokens_per_step is not None
        bounded = follows or self.generation.max_versions is not None
        return steps <= self.max_staleness or not bounded

    @property
    def oldest_token(self) -> int:
        """Versions by which weights that drew a token may lag behind the step that trains on it."""
        most, each = self.generation.max_new_tokens, self.generation.tokens_per_step
        pieces = 1 if each is None else -(-most // each)
        return self.max_staleness + (pieces - 1) * self.feedback_lag

    @property
    def verifies(self) -> bool:
        """Whether functions judge answers, and not models alone."""
        return self.reward != ()

    @property
    def further_draws(self) -> int:
        """How often other prompts are asked in place of those whose groups say nothing."""
        algorithm = self.algorithm
        if algorithm.further_draws is not None:
            return algorithm.further_draws
        drops = algorithm.equal_groups == "drop" and self.verifies
        return FURTHER_DRAWS.get(algorithm.name, 0) if drops else 0

    @model_validator(mode="after")
    def _answers_may_be_carried_over(self) -> ReasoningRecipe:
        tokens, generation = self.generation.tokens_per_step, self.generation
        if tokens is None:
            return self
        reasons = (
            (
                tokens >= generation.max_new_tokens,
                "every answer ends in its step",
                f"less than generation.max_new_tokens = {generation.max_new_tokens}",
            ),
            (
                not ENGINES[generation.engine].carries_over,
                f"{ENGINES[generation.engine].label} begins every answer anew",
                engines_that(lambda one: one.carries_over),
            ),
            (
                self.algorithm.name not in OF_GROUPS,
                "a group waits for its last answer",
                f"algorithm.name: one of {', '.join(OF_GROUPS)}",
            ),
            (
                self.further_draws > 0,
                "other prompts are asked once all answers have ended",
                "algorithm.further_draws: 0",
            ),
            (
                self.data.curriculum is not None,
                "rates of success are of answers that have ended",
                "no data.curriculum",
            ),
        )
        for holds, why, wanted in reasons:
            if holds:
                key = "generation.tokens_per_step"
                raise UserError(why, key=key, value=tokens, expected=wanted)
        return self

    @model_validator(mode="after")
    def _tokens_are_young_enough(self) -> ReasoningRecipe:
        most = self.generation.max_versions
        if most is not None and self.oldest_token > most:
            raise UserError(
                "tokens may be older when they are trained on",
                key="generation.max_versions",
                value=most,
                expected=f"at least {self.oldest_token}",
                hint="lower max_staleness, or raise generation.tokens_per_step",
            )
        return self

    @model_validator(mode="after")
    def _something_judges(self) -> ReasoningRecipe:
        check_models(self.reward_model, self.judge)
        if not self.verifies and self.reward_model.path is None and self.judge.path is None:
            raise UserError(
                "nothing judges the answers",
                key="reward",
                value=[],
                expected="a function, or reward_model.path or judge.path",
                hint="take it out for the task's own reward",
            )
        if self.further_draws and not self.verifies:
            raise UserError(
                "what functions say decides what is drawn again, and there are none",
                key="algorithm.further_draws",
                value=self.further_draws,
                expected="0 where reward names no function",
            )
        if self.data.curriculum is not None and not self.verifies:
            raise UserError(
                "rates of success are shares of what functions say, and there are none",
                key="data.curriculum",
                value=self.data.curriculum.model_dump(),
                hint="name a function in reward, or take it out",
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> ReasoningRecipe:
        if self.model.path == "":
            raise UserError(
                "is empty",
                key="model.path",
                expected="a model folder",
                hint="take it out to start from a tiny model built on the spot",
            )
        if self.algorithm.overlong_buffer > self.generation.max_new_tokens:
            raise UserError(
                "is longer than an answer",
                key="algorithm.overlong_buffer",
                value=self.algorithm.overlong_buffer,
                expected=f"at most generation.max_new_tokens = {self.generation.max_new_tokens}",
            )
        engine, dtype = ENGINES[self.generation.engine], self.generation.dtype or self.model.dtype
        if dtype not in ("auto", *engine.dtypes):
            raise UserError(
                f"{engine.label} does not compute in it",
                key="generation.dtype",
                value=dtype,
                expected=f"{' or '.join(engine.dtypes)}, or "
                + engines_that(lambda one: dtype in one.dtypes),
            )
        for key, needless, dtypes in (
            ("rounding", "nearest", ("float32", "float64")),
            ("moments", "float32", ("float64",)),
        ):
            value = getattr(self.training, key)
            if value != needless and self.model.dtype in dtypes:
                raise UserError(
                    f"torchao steps no weights of {self.model.dtype} so",
                    key=f"training.{key}",
                    value=value,
                    hint="set model.dtype to bfloat16, or take it out",
                )
        steps = "(steps - critic.warmup_steps)" if self.idle_steps else "steps"
        self.optimizer.check_schedule(
            self.optimizer_steps - self.idle_steps, f"{steps} x minibatches x epochs"
        )
        for key in ("gap_level", "gap_rule", "gap_cap"):
            value = getattr(self.algorithm, key)
            default = AlgorithmSection.model_fields[key].default
            if value != default and not self.training.recompute_logprobs:
                raise UserError(
                    "nothing is weighted by the gap between engine and trainer",
                    key=f"algorithm.{key}",
                    value=value,
                    hint="set training.recompute_logprobs to true, or take it out",
                )
        if not self.algorithm.has_critic and self.critic != CriticSection():
            raise UserError(
                f"{self.algorithm.name} has no critic",
                key="critic",
                value=self.critic.model_dump(exclude_defaults=True),
                hint="set algorithm.name to ppo, or take it out",
            )
        return self

    def derived(self) -> dict[str, int]:
        """What follows from the sizes; printed by `--dry-run`."""
        return {
            "samples_per_step": self.samples_per_step,
            "samples_per_minibatch": self.samples_per_minibatch,
            "optimizer_steps": self.optimizer_steps,
            "prompts_total": self.steps * self.prompts_per_step,
        }
