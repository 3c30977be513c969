"""Where a worker's model comes from, and how it comes to the lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m2flow.errors import UserError
from m2flow.flow import Layout, Place, Worker
from m2flow.flow.worker import ONE_LANE

if TYPE_CHECKING:
    import torch

    from m2flow.training.sharded import Shards


@dataclass(frozen=True)
class ModelSource:
    """Where a worker loads its weights from: a folder in Hugging Face layout, and a dtype.

    The dtype "auto" is bfloat16 on accelerators and float32 on CPUs.
    """

    path: str
    dtype: str = "float32"

    def load(self, device: str, *, stays: bool = True) -> Any:
        """The transformers model, on the device.

        Args:
            device: where to; its kind chooses the dtype "auto".
            stays: whether it is computed with there. A model on its way to somewhere else stays
                on the host, in pages of its files that all processes there share.
        """
        from m2flow.models.causal_lm import load_model

        return _placed(load_model, self, device, stays=stays)

    def load_critic(self, device: str, *, stays: bool = True) -> Any:
        """The critic there, or one made of the policy there; arguments are those of `load`."""
        from m2flow.models.critic import load_critic

        return _placed(load_critic, self, device, stays=stays)

    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: what the generation config says, else the tokenizer.

        Raises:
            UserError: the model is not all there, or neither names one, so that no answer would
                ever end by itself.
        """
        from transformers import AutoConfig, GenerationConfig

        from m2flow.models.folder import checked_folder

        folder = checked_folder(self.path)
        said = (folder / "generation_config.json").is_file()
        read: Any = (GenerationConfig if said else AutoConfig).from_pretrained(
            folder, local_files_only=True
        )
        configured: int | list[int] | None = getattr(read, "eos_token_id", None)
        if configured is None:
            configured = self.tokenizer().eos_token_id
        if configured is None:
            raise UserError(
                "names no end token, so no answer would end by itself",
                key=self.path,
                hint="set eos_token_id in its generation_config.json",
            )
        return tuple(configured) if isinstance(configured, list) else (configured,)

    def tokenizer(self) -> Any:
        from m2flow.models.causal_lm import load_tokenizer

        return load_tokenizer(self.path)


def _placed(load: Callable[..., Any], source: ModelSource, device: str, *, stays: bool) -> Any:
    on_host = not stays or device == "cpu"
    own_memory = stays and on_host
    model = load(source.path, dtype_on(source.dtype, device), own_memory=own_memory)
    return model if on_host else model.to(device)


def dtype_on(name: str, device: str) -> torch.dtype:
    """The dtype of a recipe on a kind of device."""
    import torch

    if name == "auto":
        name = "float32" if device == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def in_shards(lanes: int) -> Layout:
    """A model whose parameters are divided over so many lanes, `fsdpN`."""
    return Layout(f"fsdp{lanes}", lanes) if lanes > 1 else ONE_LANE


def by_heads(lanes: int, heads: int | None) -> Layout:
    """A model whose key-value heads are divided over so many lanes, `tpN`."""
    divisions = () if heads is None else (("key-value heads", heads, lanes),)
    return Layout(f"tp{lanes}", lanes, divisions) if lanes > 1 else ONE_LANE


class Sharded(Worker):
    """A worker whose model is divided over the lanes of its gang; layouts are `fsdpN`.

    A subclass sets `state`, what is moved off the accelerator and back.
    """

    collective = True

    state: Any

    def layouts(self, kind: str, lanes: int) -> Sequence[Layout]:
        return [in_shards(size) for size in range(1, lanes + 1)]

    def offload(self) -> None:
        self.state.offload()

    def onload(self) -> None:
        self.state.onload()

    def state_bytes(self) -> int:
        num_bytes: int = self.state.nbytes()
        return num_bytes


def divided(place: Place, load: Callable[..., Any]) -> tuple[Any, Shards]:
    """A model in evaluation mode, divided where the worker stands on gangs of several lanes.

    Args:
        place: where the worker stands.
        load: `load` or `load_critic` of where the model comes from.
    """
    from m2flow.training.sharded import Shards

    shards = Shards.of(place.gang)
    if shards.size == 1:
        return load(place.device).eval(), shards
    model = load(place.device, stays=False).eval()  # moves to the device shard by shard
    shards.shard(model)
    return model, shards
