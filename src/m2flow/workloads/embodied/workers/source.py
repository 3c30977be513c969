"""Where a worker's policy comes from: the recipe's section, what the environment takes, weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow.environments.spec import EnvironmentSpec
from m2flow.errors import UserError
from m2flow.workloads.embodied.config import TINY, VISION_LANGUAGE_ACTION, PolicySection

if TYPE_CHECKING:
    from m2flow.models.policies.protocol import Policy

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
        model: folder of the published checkpoint that it is; None or "tiny" for a tiny one.
    """

    section: PolicySection
    spec: EnvironmentSpec | None
    seed: int = 0
    folder: str | None = None
    critic: bool = True
    model: str | None = None

    def make(self, device: str = "cpu") -> Policy:
        """The policy, on a device.

        Raises:
            UserError: policy and environment do not fit each other, or the weights do not, or
                their file is damaged.
        """
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            policy = self._drawn()
        if self.folder is not None:
            from safetensors.torch import load_file

            from m2flow.models.folder import check_safetensors

            file = Path(self.folder) / WEIGHTS
            check_safetensors(file)
            try:
                policy.load_state_dict(load_file(file))
            except RuntimeError as error:
                raise UserError(
                    f"holds weights of another policy: {str(error).splitlines()[-1].strip()}",
                    key=self.folder,
                    hint="train with the recipe that it was made by",
                ) from error
            self._require_bounds(policy)
        return policy.to(device).eval()

    def _require_bounds(self, policy: Policy) -> None:
        """Refuse weights of a small policy that acts beyond the bounds of this environment."""
        head: Any = getattr(policy, "head", None)
        if self.spec is not None and hasattr(head, "low"):
            low, high = head.low.tolist(), head.high.tolist()
            self.spec.action.require(len(low), low, high)

    def is_copied(self, device: str) -> bool:
        """Whether the policy takes host memory of its own as it is loaded, for whatever device.

        So do weights that a run has written, which are copied into it.
        """
        if self.model is None or self.model == TINY:
            return False
        import torch

        from m2flow.models.folder import is_copied

        dtype: torch.dtype = getattr(torch, self.section.dtype)
        return self.folder is not None or is_copied(self.model, dtype)

    def set_threads(self, given: int) -> None:
        """Have torch use so many threads on this one; a network of a state is slower on several."""
        import torch

        torch.set_num_threads(1 if self.section.kind == "mlp" else given)

    def _drawn(self) -> Policy:
        if self.section.kind in VISION_LANGUAGE_ACTION:
            from m2flow.workloads.embodied.workers.published import vision_language_action

            assert self.spec is not None
            return vision_language_action(
                self.section, self.model, self.spec, self.seed, critic=self.critic
            )
        from m2flow.models.policies.actor_critic import cnn_actor_critic, mlp_actor_critic

        assert self.spec is not None, "a policy is made for an environment"
        section, spec = self.section, self.spec
        has_state = any(part.name == "state" for part in spec.observations)
        head: dict[str, Any] = {
            "actions": self._distribution(),
            "low": spec.action.low,
            "high": spec.action.high,
            "count": spec.action.num_discrete,
            "chunk": section.chunk,
        }
        if section.kind == "cnn":
            return cnn_actor_critic(
                spec.picture_size(section.cameras),
                cameras=section.cameras,
                state_size=spec.state_size() if has_state else 0,
                features=section.features,
                **head,
            )
        return mlp_actor_critic(
            spec.state_size(), hidden=section.hidden, normalise=section.normalize_state, **head
        )

    def _distribution(self) -> str:
        """What the actions are drawn from; refused where the environment takes another kind."""
        import torch

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
        low_A, high_A = torch.tensor(self.spec.action.low), torch.tensor(self.spec.action.high)
        if chosen == "squashed" and not bool((high_A - low_A).isfinite().all()):
            raise UserError(
                f"{self.spec.name} does not bound its actions",
                key="policy.distribution",
                value=chosen,
                expected="gaussian, with algorithm.name ppo or grpo",
            )
        return chosen
