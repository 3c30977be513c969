"""Critics: a causal language model's body with one number a token in the place of its head.

The classes are those that transformers has for classifying tokens, with a single label, so that a
critic is a folder of Hugging Face layout like any model; where it has none, one is made of the same
parts. One that is made of a policy begins with the policy's body and a head of zeros: it expects
nothing of any state, whatever the seed. Norms and dtypes are treated as a policy's
(`m2flow.models.norms`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification

from m2flow.models.causal_lm import load_model, loaded
from m2flow.models.folder import checked_folder, read_json

CLASS = "ForTokenClassification"
"""How the class of a critic ends, in `architectures` of its `config.json`."""


class _TokenClassifier(GenericForTokenClassification):
    """A body and a head that is as wide as what the body gives: OPT may project that."""

    score: nn.Linear

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = getattr(config, "word_embed_proj_dim", self.score.in_features)
        if width != self.score.in_features:
            self.score = nn.Linear(width, self.score.out_features)


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
    config = read_json(folder / "config.json", "the architecture")
    architectures = config.get("architectures") or ()
    if not any(str(name).endswith(CLASS) for name in architectures):
        return critic_of(load_model(folder, dtype, own_memory=own_memory))
    if config["model_type"] in CONFIG_MAPPING:
        _add_class(CONFIG_MAPPING[config["model_type"]])
    return loaded(AutoModelForTokenClassification, folder, dtype, own_memory=own_memory)


def critic_of(policy: PreTrainedModel) -> PreTrainedModel:
    """A critic with the body of a policy, which is not to be used any more."""
    config: Any = policy.config
    config.num_labels = 1
    _add_class(type(config))
    with torch.device("meta"):  # only what stands around the body is wanted of it
        critic: Any = AutoModelForTokenClassification.from_config(config, trust_remote_code=False)
    body = policy.base_model
    parameter = next(body.parameters())
    setattr(critic, critic.base_model_prefix, body)
    critic.config = config  # the object that the body's layers look at, and no copy of it
    [head] = [part for part in critic.children() if isinstance(part, nn.Linear)]
    head.to_empty(device=parameter.device).to(parameter.dtype)
    for tensor in head.parameters():
        nn.init.zeros_(tensor)
    made: PreTrainedModel = critic.eval()
    return made


def _add_class(kind: Any) -> None:
    """Have transformers find a class of critics for models of a configuration, if it has none.

    Args:
        kind: the configuration's class.
    """
    known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    if kind in known or kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    policy = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    family = next(base for base in policy.__mro__[1:] if issubclass(base, PreTrainedModel))
    made = type(
        policy.__name__.removesuffix("ForCausalLM") + CLASS,
        (_TokenClassifier, family),
        {
            "__module__": policy.__module__,
            "base_model_prefix": policy.base_model_prefix,
            "config_class": kind,
        },
    )
    AutoModelForTokenClassification.register(kind, made, exist_ok=True)
