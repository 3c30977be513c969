"""Where a worker's policy comes from: the recipe's section, what the environment takes, weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow.environments.spec import EnvironmentSpec
from m2flow.errors import UserError
from m2flow.workloads.embodied.config import PolicySection

if TYPE_CHECKING:
    from m2flow.models.policies.protocol import Policy

TINY_BINS = 32
"""Of an action coordinate in a model made on the spot: each of 256 is shown too rarely to learn."""

WEIGHTS = "policy.safetensors"


@dataclass(frozen=True)
class PolicySource:
    """How to make a policy.

    Attributes:
        section: its kind and sizes.
        spec: of the environment; None where the policy is never made.
        seed: of its first weights.
        folder: where weights lie that it begins with, or None.
        critic: whether it says what observations are worth.
    """

    section: PolicySection
    spec: EnvironmentSpec | None
    seed: int = 0
    folder: str | None = None
    critic: bool = True

    def make(self, device: str = "cpu") -> Policy:
        """The policy, on a device.

        Raises:
            UserError: policy and environment do not fit each other, or the weights do not.
        """
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            policy = self._drawn()
        if self.folder is not None:
            from safetensors.torch import load_file

            try:
                policy.load_state_dict(load_file(Path(self.folder) / WEIGHTS))
            except RuntimeError as error:
                raise UserError(
                    f"holds weights of another policy: {str(error).splitlines()[-1].strip()}",
                    key=self.folder,
                    hint="train with the recipe that it was made by",
                ) from error
        return policy.to(device).eval()

    def _drawn(self) -> Policy:
        if self.section.kind.startswith("openvla"):
            return self._vision_language_action()
        from m2flow.models.policies.actor_critic import cnn_actor_critic, mlp_actor_critic

        assert self.spec is not None, "a policy is made for an environment"
        section, spec = self.section, self.spec
        state = next((part for part in spec.observations if part.name == "state"), None)
        head: dict[str, Any] = {
            "actions": self._distribution(),
            "low": spec.action.low,
            "high": spec.action.high,
            "count": spec.action.num_discrete,
            "chunk": section.chunk,
        }
        if section.kind == "cnn":
            side = spec.observation(section.cameras[0]).shape[0]
            return cnn_actor_critic(
                side,
                cameras=section.cameras,
                state_size=0 if state is None else state.shape[0],
                features=section.features,
                **head,
            )
        size = spec.observation("state").shape[0]
        return mlp_actor_critic(
            size, hidden=section.hidden, normalise=section.normalize_state, **head
        )

    def _vision_language_action(self) -> Policy:
        """A checkpoint, or a tiny model of the same structure that knows the instructions."""
        import torch

        from m2flow.models.policies.torchvision_import import import_torchvision

        import_torchvision()  # before whatever imports it in a way that fails
        from m2flow.models.policies.vla.checkpoint import load_openvla, load_openvla_oft
        from m2flow.models.policies.vla.lora import add_lora
        from m2flow.models.policies.vla.policy import VLAOptions
        from m2flow.models.policies.vla.tiny import tiny_openvla, unit_statistics

        assert self.spec is not None
        section, spec = self.section, self.spec
        options = VLAOptions(
            statistics=section.statistics,
            gripper=section.gripper,
            cameras=section.cameras,
            centre_crop=section.centre_crop,
            chunk=section.chunk,
            temperature=section.temperature,
            critic=self.critic,
        )
        parallel, dtype = section.kind == "openvla-oft", getattr(torch, section.dtype)
        policy: Policy
        if section.path is None:
            if not spec.instructions:
                raise UserError(
                    f"{spec.name} has no instructions, which such a policy reads",
                    key="policy.kind",
                    value=section.kind,
                    expected="mlp or cnn",
                )
            state = spec.observation("state").shape[0] if section.proprioception else None
            scale = unit_statistics(spec.action.size, state)
            side = spec.observation(section.cameras[0]).shape[0]
            policy = tiny_openvla(
                spec.instructions,
                scale,
                options,
                parallel=parallel,
                seed=self.seed,
                image_size=side,
                bins=TINY_BINS,
            )
        elif parallel:
            policy = load_openvla_oft(
                section.path, options, proprioception=section.proprioception, dtype=dtype
            )
        else:
            policy = load_openvla(section.path, options, dtype)
        if section.lora_rank:
            add_lora(policy, section.lora_rank, seed=self.seed)
        return policy

    def _distribution(self) -> str:
        """What the actions are drawn from; refused where the environment takes another kind."""
        assert self.spec is not None
        discrete = self.spec.action.num_discrete is not None
        chosen = self.section.distribution
        if chosen == "auto":
            return "categorical" if discrete else "gaussian"
        if (chosen == "categorical") != discrete:
            raise UserError(
                f"{self.spec.name} takes {'choices' if discrete else 'continuous actions'}",
                key="policy.distribution",
                value=chosen,
                expected="categorical" if discrete else "gaussian or squashed",
            )
        return chosen
