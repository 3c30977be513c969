"""What stages with vision-language-action models and simulators ask of a lane.

A policy is a language model behind a vision encoder: one observation is a fixed number of tokens,
and one forward pass (or one and a decoding step for each action token) gives a chunk of actions. A
simulator takes seconds for a step of all its environments, and for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from m2flow.flow.worker import Layout
from m2flow.models.shape import KNOWN_MODELS, WEIGHT_BYTES, ModelShape
from m2flow.models.work import (
    ADAM_BYTES,
    FORWARD_AND_BACKWARD,
    RATES,
    RECOMPUTED_FORWARD,
    Rates,
    decoding,
    ring_bytes,
)
from m2flow.plan.profile.work import LayoutWork, StageWork, Work, WorkerWork, rising

IMAGE_BYTES = 3 * 224 * 224
"""Of an observation on a link."""


@dataclass(frozen=True, slots=True)
class ActionModel:
    """A vision-language-action model.

    Attributes:
        name: for messages.
        language: its language model.
        vision_parameters: of all image encoders.
        image_tokens: that an observation's images become.
        text_tokens: of the instruction.
        action_tokens: that a chunk of actions is.
        actions_per_chunk: environment steps that a chunk lasts.
        parallel: whether all action tokens come from one forward pass.
        pass_seconds: of a forward pass, neither memory nor arithmetic: launches of code that runs
            operation by operation.
        prepare_seconds: of an observation before it is acted on: its images cut and scaled.
    """

    name: str
    language: ModelShape
    vision_parameters: int
    image_tokens: int
    text_tokens: int
    action_tokens: int
    actions_per_chunk: int
    parallel: bool
    pass_seconds: float = 0.0
    prepare_seconds: float = 0.0

    @property
    def parameters(self) -> int:
        """Count every parameter that memory must hold."""
        return self.language.parameters + self.vision_parameters

    @property
    def tokens_per_chunk(self) -> int:
        """Count the tokens that the language model sees for each chunk of actions."""
        return self.image_tokens + self.text_tokens + self.action_tokens

    def forward_flops(self, chunks: float) -> float:
        """Return the FLOPs of one pass over so many observations with their actions."""
        tokens = chunks * self.tokens_per_chunk
        vision = 2 * self.vision_parameters * chunks * self.image_tokens
        return self.language.forward_flops(tokens, self.tokens_per_chunk / 2) + vision

    def act(self, observations: float, rates: Rates = RATES) -> Work:
        """Return the work of a chunk of actions for each of so many observations."""
        first = Work(
            self.forward_flops(observations),
            self.parameters * WEIGHT_BYTES,
            seconds=self.pass_seconds + observations * self.prepare_seconds,
            arithmetic=rates.forward,
            bandwidth=rates.decode_bandwidth,
        )
        if self.parallel:
            return first
        slower = replace(rates, round_seconds=self.pass_seconds, layer_seconds=0.0)
        kept = observations * self.tokens_per_chunk
        token = decoding(self.language, observations, kept, rates=slower)
        return replace(first, then=(token,) * (self.action_tokens - 1))

    def train(self, chunks: float, lanes: int, rates: Rates = RATES) -> Work:
        """Return the work of forward and backward passes, activations computed again."""
        passes = FORWARD_AND_BACKWARD + RECOMPUTED_FORWARD
        return Work(passes * self.forward_flops(chunks) / lanes, arithmetic=rates.training)

    def update(self, lanes: int) -> Work:
        """Return the work of an optimizer step on sharded weights, which both passes gather."""
        return Work(sent_bytes=1.5 * ring_bytes(self.parameters * WEIGHT_BYTES, lanes), span=lanes)


@dataclass(frozen=True, slots=True)
class Simulator:
    """Environments that step together on a lane.

    Attributes:
        name: for messages.
        kind: of the lanes that it needs, `gpu` or `cpu`.
        seconds_per_step: of each step, however few environments there are.
        seconds_per_env: of each environment and step, besides.
        bytes_per_env: that an environment keeps.
    """

    name: str
    kind: str
    seconds_per_step: float
    seconds_per_env: float
    bytes_per_env: int

    def seconds(self, envs: float) -> float:
        """Return the seconds of one step of so many environments on one lane."""
        return self.seconds_per_step + self.seconds_per_env * envs


# Acting runs in plain transformers code. The tests of RLinf's public repository feed its scheduler
# with 0.40, 0.60, 0.85 and 1.15 s of OpenVLA acting in 10, 20, 30 and 40 ManiSkill environments on
# one lane. The line through them is 0.125 s and 25 ms for each; on an H100, arithmetic and memory
# by roofline are 33 ms and 11.5 ms of that, the rest is put down to seven passes and to the images.
# (The same tests' figures for LIBERO follow those of the simulator up to its jump at 64, and so
# contain waiting for it; they are left out.)
PASS_SECONDS = 0.013
PREPARE_SECONDS = 0.0135

# The vision encoders are SigLIP SO400M and DINOv2 ViT-L/14, 256 patches of a 224-pixel image; seven
# tokens are an action (OpenVLA, arXiv 2406.09246, section 3). OFT gives 8 actions in one pass
# (arXiv 2502.19645). Thirty tokens of text are the `max_prompt_length` of its ManiSkill recipe.
OPENVLA = ActionModel(
    "OpenVLA",
    KNOWN_MODELS["Llama-2-7B"],
    730_000_000,
    256,
    30,
    7,
    1,
    False,
    PASS_SECONDS,
    PREPARE_SECONDS,
)
OPENVLA_OFT = ActionModel(
    "OpenVLA-OFT",
    KNOWN_MODELS["Llama-2-7B"],
    730_000_000,
    256,
    30,
    56,
    8,
    True,
    PASS_SECONDS,
    PREPARE_SECONDS,
)

# Both are straight lines through the times by number of environments that the tests of RLinf's
# public repository feed its scheduler with: ManiSkill 0.80 s at 10 and 20 and 0.85 s at 30 and 40
# for a step, LIBERO 0.61, 1.23, 2.46 and 4.66 s at 4, 8, 16 and 32 for a chunk of actions. (18.5 s
# at 64, where memory or cores ran out, is left out.) Bytes are assumptions.
MANISKILL = Simulator("ManiSkill", "gpu", 0.775, 0.002, 100_000_000)
LIBERO = Simulator("LIBERO", "cpu", 0.03, 0.146, 1_000_000_000)


def acting(policy: ActionModel) -> tuple[StageWork, WorkerWork]:
    """Price a stage that acts, and the worker's copy of the weights, on one lane."""
    size = float(policy.parameters * WEIGHT_BYTES)
    stage = StageWork((LayoutWork(call=policy.act),), IMAGE_BYTES)
    return stage, WorkerWork([(LayoutWork().layout, size)], size)


def training(policy: ActionModel, chunks: int, lanes: int) -> tuple[StageWork, WorkerWork]:
    """Price a stage that trains on items of so many decisions, in shards on up to `lanes` lanes."""
    sizes = [Layout(f"fsdp{n}" if n > 1 else "one", n) for n in rising(lanes)]
    works = tuple(
        LayoutWork(
            layout,
            lambda items, n=layout.lanes: policy.train(items * chunks, n),  # type: ignore[misc]
            lambda replicas, n=layout.lanes: policy.update(n * replicas),  # type: ignore[misc]
        )
        for layout in sizes
    )
    state = [(layout, ADAM_BYTES * policy.parameters / layout.lanes) for layout in sizes]
    return StageWork(works, IMAGE_BYTES), WorkerWork(state)


def simulating(simulator: Simulator, kind: str) -> StageWork:
    """Price a step of environments on a kind of lane, an item being one environment."""
    work = LayoutWork(
        call=lambda envs: Work(seconds=simulator.seconds(envs)),
        working_bytes=lambda _: float(simulator.bytes_per_env),
    )
    return StageWork((work,) if kind == simulator.kind else (), IMAGE_BYTES)
