"""Policies that are published as models: from a checkpoint's folder, or tiny ones in their place.

Whatever does not fit the environment is refused here, before an episode begins: a task without a
sentence, pictures that are not drawn, the size and the bounds of actions, the size of the state.
"""

from __future__ import annotations

from typing import Any

from m2flow.environments.spec import EnvironmentSpec
from m2flow.errors import UserError
from m2flow.models.policies.protocol import Policy
from m2flow.workloads.embodied.config import TINY, PolicySection

TINY_PATCH = 8
"""Pixels of a side of what a model made on the spot sees as one: it has no smaller picture."""

TINY_BINS = 32
"""Of an action coordinate in a model made on the spot: each of 256 is shown too rarely to learn."""


def vision_language_action(
    section: PolicySection,
    model: str | None,
    spec: EnvironmentSpec,
    seed: int,
    *,
    critic: bool,
) -> Policy:
    """The policy, with adapters where they are asked for.

    Args:
        section: its kind, and how it is used.
        model: a checkpoint's folder; None or "tiny" for a small model of the same structure, which
            knows the words of the environment's instructions.
        spec: of the environment.
        seed: of weights that are drawn.
        critic: whether it says what observations are worth.

    Raises:
        UserError: policy, checkpoint and environment do not fit each other.
    """
    from m2flow.models.policies.torchvision_import import import_torchvision

    tiny = model is None or model == TINY
    if spec.instructions is None or (tiny and not spec.instructions):
        raise UserError(
            f"{spec.name} has no instructions, which such a policy reads",
            key="policy.kind",
            value=section.kind,
            expected="mlp or cnn",
            hint="or give it one: environment.options.instruction" if _takes_one(spec) else None,
        )
    for camera in section.cameras:  # each is resized by itself
        spec.picture_size([camera])
    if tiny and (side := spec.observation(section.cameras[0]).shape[0]) < TINY_PATCH:
        raise UserError(
            "the pictures of a tiny model are too small",
            key="policy.cameras",
            value=side,
            expected=f"at least {TINY_PATCH} pixels of height",
        )
    spec.action.require(spec.action.size)  # no choices
    import_torchvision()  # before whatever imports it in a way that fails
    folder = None if tiny else model
    made: Any = (_pi0 if section.kind == "pi0" else _openvla)(section, folder, spec, seed, critic)
    if section.lora_rank:
        from m2flow.models.policies.vla.lora import add_lora

        add_lora(made, section.lora_rank, seed=seed)
    policy: Policy = made
    return policy


def _takes_one(spec: EnvironmentSpec) -> bool:
    return spec.name.startswith("maniskill:")


def _openvla(
    section: PolicySection, folder: str | None, spec: EnvironmentSpec, seed: int, critic: bool
) -> Policy:
    import torch

    from m2flow.models.policies.vla.checkpoint import load_openvla, load_openvla_oft
    from m2flow.models.policies.vla.policy import VLAOptions, VLAPolicy
    from m2flow.models.policies.vla.tiny import tiny_openvla, unit_statistics

    options = VLAOptions(
        statistics=section.statistics if folder else None,
        gripper=section.gripper,
        cameras=section.cameras,
        centre_crop=section.centre_crop,
        resize=section.resize,
        chunk=section.chunk,
        temperature=section.temperature,
        critic=critic,
        low=spec.action.low,
        high=spec.action.high,
    )
    parallel, dtype = section.kind == "openvla-oft", getattr(torch, section.dtype)
    policy: VLAPolicy
    if folder is None and section.head == "l1":
        raise UserError(
            "a tiny model has no regression head",
            key="policy.head",
            value=section.head,
            expected="discrete, or model=FOLDER of a checkpoint that has one",
        )
    if folder is None:
        state = spec.state_size() if section.proprioception else None
        policy = tiny_openvla(
            spec.instructions or (),
            unit_statistics(spec.action.size, state),
            options,
            parallel=parallel,
            seed=seed,
            image_size=spec.observation(section.cameras[0]).shape[0],
            bins=TINY_BINS,
        )
    elif parallel:
        policy = load_openvla_oft(
            folder,
            options,
            head=section.head,
            proprioception=section.proprioception,
            dtype=dtype,
        )
    else:
        policy = load_openvla(folder, options, dtype)
    ends = policy.scale(torch.tensor([[-1.0], [1.0]]).expand(2, policy.scale.size))
    low, high = ends.min(dim=0).values.tolist(), ends.max(dim=0).values.tolist()
    spec.action.require(policy.scale.size, low, high)
    if section.proprioception:
        _check_state(spec, len(policy.statistics.get("proprio", {}).get("q01", ())), exactly=True)
    return policy


def _pi0(
    section: PolicySection, folder: str | None, spec: EnvironmentSpec, seed: int, critic: bool
) -> Policy:
    import torch

    from m2flow.models.policies.flow_matching import FlowOptions, load_pi0, tiny_pi0

    options = FlowOptions(
        spec.action.size,
        cameras=section.cameras,
        chunk=section.chunk,
        low=spec.action.low,
        high=spec.action.high,
        noise=section.noise,
        noise_level=section.noise_level,
        steps=section.denoising_steps,
        critic=critic,
    )
    if folder is None:
        return tiny_pi0(
            spec.instructions or (),
            options,
            state_size=spec.state_size(),
            chunk=section.chunk,
            image_size=spec.observation(section.cameras[0]).shape[0],
            seed=seed,
        )
    policy = load_pi0(folder, options, getattr(torch, section.dtype))
    most, scaled = policy.model.config.max_state_dim, len(policy.options.state_mean or ())
    if scaled in (0, most):  # no scales, or padded ones
        _check_state(spec, most, exactly=False)
    else:
        _check_state(spec, scaled, exactly=True)
    return policy


def _check_state(spec: EnvironmentSpec, known: int, *, exactly: bool) -> None:
    size = spec.state_size()
    if size > known or (exactly and size != known):
        raise UserError(
            "the robot state has another size than the checkpoint's",
            key=spec.name,
            value=size,
            expected=f"{'' if exactly else 'at most '}{known} figures",
        )
