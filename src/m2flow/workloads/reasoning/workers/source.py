"""Where a worker's model comes from, and how it comes to the lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m2flow.errors import UserError
from m2flow.flow import Layout, Place, Worker
from m2flow.flow.worker import ONE_LANE

if TYPE_CHECKING:
    from m2flow.training.sharded import Shards


@dataclass(frozen=True)
class ModelSource:
    """Where a worker loads its weights from: a folder in Hugging Face layout, and a dtype."""

    path: str
    dtype: str = "float32"

    def load(self, device: str) -> Any:
        """The transformers model, on the device."""
        import torch

        from m2flow.models.causal_lm import load_model

        return load_model(self.path, getattr(torch, self.dtype)).to(device)

    def load_critic(self, device: str) -> Any:
        """The critic there, or one made of the policy there, on the device."""
        import torch

        from m2flow.models.critic import load_critic

        return load_critic(self.path, getattr(torch, self.dtype)).to(device)

    def stop_ids(self, configured: int | list[int] | None) -> tuple[int, ...]:
        """Tokens that end an answer: what the generation config says, else the tokenizer.

        Raises:
            UserError: neither names one, so that no answer would ever end by itself.
        """
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


def divided(place: Place, load: Callable[[str], Any]) -> tuple[Any, Shards]:
    """A model in evaluation mode, divided where the worker stands on gangs of several lanes.

    Args:
        place: where the worker stands.
        load: gives the whole model on a device.
    """
    from m2flow.training.sharded import Shards

    shards = Shards.of(place.gang)
    if shards.size == 1:
        return load(place.device).eval(), shards
    model = load("cpu").eval()  # moves to the device shard by shard
    shards.shard(model)
    return model, shards
