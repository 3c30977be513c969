"""Vision-language-action models and simulators, as the few numbers that their seconds depend on.

A policy is a language model behind a vision encoder: one observation is a fixed number of tokens,
and one forward pass (or one and a decoding step for each action token) gives a chunk of actions. A
simulator is seconds for each step of all its environments together, and for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from m2flow.plan.models import LLAMA_2_7B, ModelShape


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
        pass_seconds: of a forward pass that are neither memory nor arithmetic: launches of code
            that runs operation by operation. None: what a serving engine takes.
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
    pass_seconds: float | None = None
    prepare_seconds: float = 0.0

    @property
    def parameters(self) -> int:
        """All that memory must hold."""
        return self.language.parameters + self.vision_parameters

    @property
    def tokens_per_chunk(self) -> int:
        """That the language model sees for each chunk of actions."""
        return self.image_tokens + self.text_tokens + self.action_tokens

    def forward_flops(self, chunks: float) -> float:
        """Of one pass over so many observations with their actions."""
        tokens = chunks * self.tokens_per_chunk
        vision = 2 * self.vision_parameters * chunks * self.image_tokens
        return self.language.forward_flops(tokens, self.tokens_per_chunk / 2) + vision


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
        """Of one step of so many environments on one lane."""
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
    "OpenVLA", LLAMA_2_7B, 730_000_000, 256, 30, 7, 1, False, PASS_SECONDS, PREPARE_SECONDS
)
OPENVLA_OFT = ActionModel(
    "OpenVLA-OFT", LLAMA_2_7B, 730_000_000, 256, 30, 56, 8, True, PASS_SECONDS, PREPARE_SECONDS
)

# Both are straight lines through the times by number of environments that the tests of RLinf's
# public repository feed its scheduler with: ManiSkill 0.80 s at 10 and 20 and 0.85 s at 30 and 40
# for a step, LIBERO 0.61, 1.23, 2.46 and 4.66 s at 4, 8, 16 and 32 for a chunk of actions. (18.5 s
# at 64, where memory or cores ran out, is left out.) Bytes are assumptions.
MANISKILL = Simulator("ManiSkill", "gpu", 0.775, 0.002, 100_000_000)
LIBERO = Simulator("LIBERO", "cpu", 0.03, 0.146, 1_000_000_000)
