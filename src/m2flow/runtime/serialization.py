"""How tensors cross a process boundary by way of Ray's object store.

Ray pickles a torch tensor through its storage, byte by byte; a NumPy array travels out of band. So
tensors are sent as arrays. What arrives is a copy of its own and may be written to.
"""

from __future__ import annotations

from typing import Any


def register_tensors() -> None:
    """Make Ray send torch tensors as arrays, in this process. Imports torch and Ray."""
    import ray.util
    import torch

    ray.util.register_serializer(torch.Tensor, serializer=_to_arrays, deserializer=_from_arrays)


def _to_arrays(tensor: Any) -> tuple[Any, str, bool]:
    import torch

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:  # NumPy has no such type: send the bits
        return plain.view(torch.int16).numpy(), "bfloat16", tensor.requires_grad
    return plain.numpy(), "", tensor.requires_grad


def _from_arrays(sent: tuple[Any, str, bool]) -> Any:
    import torch

    array, dtype, requires_grad = sent
    tensor = torch.from_numpy(array.copy())
    if dtype:
        tensor = tensor.view(getattr(torch, dtype))
    return tensor.requires_grad_() if requires_grad else tensor
