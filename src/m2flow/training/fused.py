"""Norms, rotary embeddings and gated MLPs of a transformers model, on CUDA by Liger's kernels.

Each is one Triton kernel in place of several operations, and keeps less for the backward pass (Hsu
et al., "Liger Kernel", arXiv 2410.10989). Results differ by rounding. Losses are not Liger's:
`forward` has its own head. Liger replaces forwards of the model at hand, and names in transformers'
module for the whole process. The names are put back, so that a model made later is transformers'
own, except the rotary embedding, which a forward looks up there: it is Liger's for tensors on CUDA.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.errors import UserError
from m2flow.training.division import Division

_log = logging.getLogger(__name__)

KEY = "training.fused_kernels"

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders with a norm before each part. Liger knows others, with code of their own for each:
mixtures get other experts from it, and of Gemma 3 it takes no critic."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

WHOLE = Division()
"""A model on one lane."""

_ROTARY = "apply_rotary_pos_emb"


def check_installed() -> None:
    """Refuse the setting where this interpreter does not find Liger.

    Raises:
        UserError: names the command that installs it.
    """
    if not _installed():
        raise UserError(
            "liger-kernel is not installed",
            key=KEY,
            value=True,
            hint="pip install 'm2flow[liger]', or take it out",
        )


def reason_against(model: Any, device: str, division: Division = WHOLE) -> str | None:
    """Why Liger's kernels cannot compute a model; None where they can.

    Args:
        model: of transformers.
        device: where it is computed with.
        division: over how many lanes, and how.
    """
    config = model.config
    if not device.startswith("cuda"):
        return "they run on CUDA"
    if not _installed():
        return "liger-kernel is not installed (pip install 'm2flow[liger]')"
    if config.model_type not in ARCHITECTURES:
        return f"they are for {', '.join(ARCHITECTURES)}, not {config.model_type}"
    if config.hidden_act not in ("silu", "swish"):
        return f"the gate of their MLP is SiLU, not {config.hidden_act}"
    if model.dtype not in DTYPES:
        return f"they compute in float32 at most, not {model.dtype}"
    if division.tp > 1:
        # A sum over lanes is handed on before it is there, by a subclass that waits for it at the
        # next operation of torch. A Triton kernel is none.
        return f"a layer divided by {division.layout} hands on sums that are still on their way"
    return None


def fuse(
    model: Any,
    device: str,
    division: Division = WHOLE,
    wanted: bool | None = None,
) -> None:
    """Have a model compute by Liger's kernels, in place.

    To be called after adapters are in, and before the model is divided.

    Args:
        model, device, division: as for `reason_against`.
        wanted: None for where it can be done; False leaves the model as it is.

    Raises:
        UserError: it is wanted and cannot be done.
    """
    if wanted is False:
        return
    against = reason_against(model, device, division)
    if against is None:
        _replace(model)
    elif wanted:
        raise UserError(
            f"Liger's kernels cannot be used here: {against}",
            key=KEY,
            value=True,
            expected="null or false",
        )
    elif device.startswith("cuda"):
        _log.info("training computes without Liger's kernels: %s", against)


def _installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def _replace(model: Any) -> None:
    # It warns of kernels for other devices, which this one does not need.
    logging.getLogger("liger_kernel.backends").setLevel(logging.ERROR)
    from liger_kernel import transformers as liger

    kind = model.config.model_type
    module: Any = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    own = dict(vars(module))
    replace = getattr(liger, f"apply_liger_kernel_to_{kind}")
    replace(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    fused, rotary = getattr(module, _ROTARY), own[_ROTARY]
    vars(module).update(own)
    if not isinstance(rotary, _Rotary):
        setattr(module, _ROTARY, _Rotary(fused, rotary))


@dataclass(frozen=True)
class _Rotary:
    """The rotary embedding of queries and keys: one function on CUDA, another elsewhere."""

    on_cuda: Callable[..., tuple[Tensor, Tensor]]
    elsewhere: Callable[..., tuple[Tensor, Tensor]]

    def __call__(
        self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rotate = self.on_cuda if query.is_cuda else self.elsewhere
        return rotate(query, key, *args, **kwargs)
