"""Critics: a causal language model's body with one number a token in the place of its head.

The classes are those that transformers has for classifying tokens, with a single label, so that a
critic is a folder of Hugging Face layout like any model. One that is made of a policy begins with
the policy's body and a head of zeros: it expects nothing of any state, whatever the seed. Norms and
dtypes are treated as a policy's (`m2flow.models.norms`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForTokenClassification, PreTrainedModel

from m2flow.models.causal_lm import load_model, loaded
from m2flow.models.folder import checked_folder, read_json


def load_critic(
    path: str | Path, dtype: torch.dtype = torch.float32, *, own_memory: bool = True
) -> PreTrainedModel:
    """The critic in a folder, or one made of the policy there, in evaluation mode on the CPU.

    Args:
        path: a folder in Hugging Face layout, of a critic or of a causal language model.
        dtype: of the weights.
        own_memory: as for `m2flow.models.causal_lm.loaded`.

    Raises:
        UserError: the folder or its weights are missing or incomplete.
    """
    folder = checked_folder(path)
    if not _is_critic(folder):
        return critic_of(load_model(folder, dtype, own_memory=own_memory))
    return loaded(AutoModelForTokenClassification, folder, dtype, own_memory=own_memory)


def critic_of(policy: PreTrainedModel) -> PreTrainedModel:
    """A critic with the policy's body, which it takes over: the policy is not to be used any more.

    transformers knows one for each architecture that generation computes.
    """
    config: Any = policy.config
    config.num_labels = 1
    with torch.device("meta"):  # only what stands around the body is wanted of it
        critic: Any = AutoModelForTokenClassification.from_config(config, trust_remote_code=False)
    body = policy.base_model
    parameter = next(body.parameters())
    setattr(critic, critic.base_model_prefix, body)
    critic.config = config  # the object that the body's layers look at, and no copy of it
    head: nn.Module = critic.score.to_empty(device=parameter.device).to(parameter.dtype)
    for tensor in head.parameters():
        nn.init.zeros_(tensor)
    made: PreTrainedModel = critic.eval()
    return made


def _is_critic(folder: Path) -> bool:
    architectures = read_json(folder / "config.json", "the architecture").get("architectures")
    return any(str(name).endswith("ForTokenClassification") for name in architectures or ())
