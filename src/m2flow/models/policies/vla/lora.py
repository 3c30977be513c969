"""LoRA on vision-language-action models by peft: every linear layer of towers and decoders.

Of OpenVLA only the adapters, its projector's among them, the projector of the robot's state and the
value head train; a saved checkpoint has the adapters added to the weights. pi0's projections of
states, actions and times have no pretrained weights that adapters could keep near: they train in
full, as openpi trains them beside adapters of its language models; noise network and value head do
too.
"""

from __future__ import annotations

from m2flow.errors import UserError
from m2flow.models.policies.flow_matching import FlowMatchingPolicy
from m2flow.models.policies.torchvision_import import import_torchvision
from m2flow.models.policies.vla.policy import VLAPolicy

# Linear layers by their published names; `lm_head` is left as it is, and the pooling of
# the second tower does not take part in the network.
_NAMES = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj qkv attn.proj fc1 fc2 fc3"
_LAYERS = rf"(?!.*attn_pool).*\.({'|'.join(_NAMES.split())})"

_IN_FULL = ("state_proj", "action_in_proj", "action_time_mlp_in", "action_time_mlp_out",
            "action_out_proj")  # fmt: skip
"""Layers of pi0 that train without adapters."""


def add_lora(
    policy: VLAPolicy | FlowMatchingPolicy,
    rank: int = 32,
    alpha: int | None = None,
    seed: int = 0,
) -> None:
    """Put adapters into the policy's network, in place, and freeze all other weights of it.

    Args:
        policy: acts as before until the adapters are trained; of pi0 see the module.
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
    for name, layer in policy.model.named_modules():
        if name.rpartition(".")[2] in _IN_FULL:
            layer.requires_grad_(True)
