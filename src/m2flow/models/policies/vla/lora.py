"""LoRA on OpenVLA by peft: every linear layer of towers, projector and decoder, not the head.

Only the adapters (and the value head) train; a saved checkpoint has them added to the weights.
"""

from __future__ import annotations

from m2flow.errors import UserError
from m2flow.models.policies.torchvision_import import import_torchvision
from m2flow.models.policies.vla.policy import VLAPolicy

# Linear layers by their published names; `lm_head` is left as it is, and the pooling of
# the second tower does not take part in the network.
_NAMES = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj qkv attn.proj fc1 fc2 fc3"
_LAYERS = rf"(?!.*attn_pool).*\.({'|'.join(_NAMES.split())})"


def add_lora(policy: VLAPolicy, rank: int = 32, alpha: int | None = None, seed: int = 0) -> None:
    """Put adapters into the policy's network, in place, and freeze all other weights of it.

    Args:
        policy: acts as before until the adapters are trained.
        rank: of the adapters.
        alpha: scale times rank; min(rank, 16) where nothing is given, as OpenVLA was fine-tuned.
        seed: of the adapters' initial weights.
    """
    import torch

    import_torchvision()
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f"LoRA needs {error.name}",
            hint="pip install 'm2flow[vla]', or beside a CPU build of torch: "
            "pip install --no-deps peft accelerate psutil",
        ) from error
    if rank < 1:
        raise UserError("the rank is not positive", key="lora.rank", value=rank)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(
            r=rank,
            lora_alpha=min(rank, 16) if alpha is None else alpha,
            target_modules=_LAYERS,
            init_lora_weights="gaussian",
        )
        inject_adapter_in_model(config, policy.model)
