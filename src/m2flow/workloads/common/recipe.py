"""`Recipe`: the keys that the recipe of every workload has, with their defaults.

A workload derives its recipe from this class and adds its own keys. Sizes are named for what they
count. Nothing here imports torch; `reading` turns YAML into a recipe and validation errors into
one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from m2flow.engine.plan import LONGEST_DEADLINE
from m2flow.errors import UserError
from m2flow.observe.yaml_text import plain

LARGEST = 1e30
"""Number that any key takes: computed with in float32, whose largest is 3.4e38."""

MOST_GIGABYTES = 1e6
"""Of memory or disk: bytes are counted in 64 bits."""

LEAST_TEMPERATURE = 1e-6
"""Above 0: logits are divided by it, in float32."""


def _fits_a_tensor(value: int) -> int:
    if value >= 2**63:
        raise ValueError("a number below 2**63")
    return value


# Strict: a truth value is no number, and a number that came as text is a mistake in the YAML.
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(ge=1, strict=True), AfterValidator(_fits_a_tensor)]
Natural = Annotated[int, Field(ge=0, strict=True), AfterValidator(_fits_a_tensor)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST, strict=True)]
Positive = Annotated[float, Field(gt=0, le=LARGEST, strict=True)]
Gigabytes = Annotated[float, Field(gt=0, le=MOST_GIGABYTES, strict=True)]
Temperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=LARGEST, strict=True)]
Rank = Annotated[int, Field(ge=0, le=2**16, strict=True)]
Running = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]
Deadline = Annotated[float, Field(gt=0, le=LONGEST_DEADLINE, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
Decay = Annotated[float, Field(ge=0, lt=1, strict=True)]


def _as_json(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("finite numbers, text, lists and tables") from None
    return plain(value)


Options = dict[str, Annotated[Any, AfterValidator(_as_json)]]
"""Settings whose names somebody else gives: what a run directory can keep as it is."""

AUTO_MODE = "auto"
"""The mode in which the planner chooses the plan."""


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, and a number where text is due is its text, as
    it was written."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )


def refuse_keys_of_others(
    section: Section, choice: str, readers: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuse a key that was set though nobody reads it under the choice that was made."""
    name, _, chooser = choice.partition(".")
    chosen = getattr(section, chooser)
    for key, wanted in readers.items():
        value = getattr(section, key)
        if chosen not in wanted and value != type(section).model_fields[key].default:
            raise UserError(
                f"{chosen} has no use for it",
                key=f"{name}.{key}",
                value=value,
                hint=f"set {choice} to {' or '.join(wanted)}, or take it out",
            )


class OptimizerSection(Section):
    """AdamW."""

    learning_rate: Positive = 1e-4
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Natural = 0

    def check_schedule(self, optimizer_steps: int, sizes: str) -> None:
        """Refuse a warm-up that is as long as the run, of which a schedule has nothing left.

        Args:
            optimizer_steps: of the whole run, in which what is trained moves.
            sizes: keys of the recipe that make them.
        """
        if self.schedule != "constant" and self.warmup_steps >= optimizer_steps:
            raise UserError(
                f"leaves nothing of the {self.schedule} schedule",
                key="optimizer.warmup_steps",
                value=self.warmup_steps,
                expected=f"fewer than {sizes} = {optimizer_steps}",
            )

    @property
    def fixed_steps(self) -> str | None:
        """Why a run's steps may not change when it is resumed; None if they may."""
        if self.schedule == "constant":
            return None
        return (
            f"the {self.schedule} schedule of the run that is to be resumed ends with its last step"
        )


class EvaluationSection(Section):
    """Figures on held-out items: at step 0, every `every` steps, and at the end."""

    every: Count = 20


class CheckpointSection(Section):
    """Checkpoints every `every` steps and at the end; the newest `keep` are kept."""

    every: Count = 20
    keep: Count = 2


class Recipe(Section):
    """A whole run; the keys that do not depend on the workload."""

    workload: str
    name: str
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    steps: Count = 80
    mode: Literal["auto", "eager", "collocated", "disaggregated", "hybrid"] = "auto"
    lanes: str = "auto"
    lane_memory: str | None = None
    layouts: dict[str, str] = Field(default_factory=dict)
    max_staleness: Natural = 0
    deadline_seconds: Deadline = 600.0
    load_deadline_seconds: Deadline = 1800.0
    lane_restarts: Natural = 3
    elastic: Flag = False
    spare_lanes: Natural = 1
    snapshot_every: Count | None = None
    grace_seconds: Deadline = 20.0
    journal_gb: Annotated[float, Field(ge=0, le=MOST_GIGABYTES, strict=True)] = 2.0
    max_skipped_updates: Natural = 3
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logger: tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow", "trackio", "swanlab"], ...] = (
        "jsonl",
    )
    samples_logged_per_step: Natural = 4

    @classmethod
    def stand_ins(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG003
        """By key with dots what takes the place of the recipe's own values, if anything does.

        Args:
            data: the recipe before it is validated, with what the command line says.
        """
        return {}

    def without_effect(self, written: Mapping[str, Any]) -> str | None:
        """Which keys that somebody has written are not read, and why; None where all are.

        Args:
            written: the recipe's own file, without its `base`, with what the command line says.
        """
        return None

    @property
    def items_per_step(self) -> int:
        """Source items of a step."""
        raise NotImplementedError

    @property
    def evaluated_at_once(self) -> int | None:
        """Items of an evaluation that are under way at a time, at most; None for all of them."""
        return None

    @property
    def step_size(self) -> str:
        """What a step works on, in words."""
        return f"{self.items_per_step} items"

    @property
    def profiling_seconds(self) -> float:
        """Seconds that measuring the stages may take, where nobody says it."""
        return 300.0

    @property
    def fixed_steps(self) -> str | None:
        """Why `steps` may not change when a run is resumed; None if it may."""
        return None

    def allows_staleness(self, steps: int) -> bool:
        """Whether a plan file may let generation run ahead by so many steps."""
        return True

    def derived(self) -> dict[str, int]:
        """Sizes that follow from the keys; `--dry-run` prints them."""
        return {"items_total": self.steps * self.items_per_step}

    @model_validator(mode="after")
    def _metrics_are_written(self) -> Recipe:
        if "jsonl" not in self.logger:
            raise UserError(
                "jsonl is missing",
                key="logger",
                value=list(self.logger),
                hint="add jsonl: the report and --resume read metrics.jsonl",
            )
        return self
