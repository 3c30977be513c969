"""Where a worker's model comes from, and how it comes to the lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow.errors import UserError
from m2flow.flow import Layout, Place, Worker
from m2flow.flow.worker import ONE_LANE
from m2flow.models.shape import ModelShape
from m2flow.training.division import Division
from m2flow.workloads.common.loading import in_turn
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.supported import divides_by_heads, known_shape

if TYPE_CHECKING:
    import torch

    from m2flow.training.sharded import Shards


TEMPLATES = ("chat_template.jinja", "additional_chat_templates")
"""Where a folder has chat templates, if not in `tokenizer_config.json`."""


@dataclass(frozen=True)
class ModelSource:
    """Where a worker loads its weights from: a folder in Hugging Face layout, and a dtype.

    The dtype "auto" is bfloat16 on accelerators and float32 on CPUs.
    """

    path: str
    dtype: str = "float32"

    @classmethod
    def at(cls, path: str | None, dtype: str) -> ModelSource:
        """A folder as the user has named it to the launcher; lanes may work in another folder."""
        return cls(str(Path(path).expanduser().absolute()) if path else "", dtype)

    def load(self, device: str, *, stays: bool = True) -> Any:
        """The transformers model, on the device.

        Args:
            device: where to; its kind chooses the dtype "auto".
            stays: whether it is computed with there. A model on its way to somewhere else stays
                on the host, in pages of its files that all processes there share; where it is
                copied as it is loaded (`in_turn`), in memory of its own.
        """
        from m2flow.models.causal_lm import load_model

        return _placed(load_model, self, device, stays=stays)

    def load_critic(self, device: str, *, stays: bool = True) -> Any:
        """The critic there, or one made of the policy there; arguments are those of `load`."""
        from m2flow.models.critic import load_critic

        return _placed(load_critic, self, device, stays=stays)

    def is_copied(self, device: str) -> bool:
        """Whether files have another dtype than is loaded, or the experts of a mixture singly."""
        from m2flow.models.folder import is_copied

        return is_copied(self.path, dtype_on(self.dtype, device))

    def load_classifier(self, device: str, *, stays: bool = True) -> Any:
        """The sequence classifier there; arguments are those of `load`."""
        from m2flow.models.classifier import load_classifier

        return _placed(load_classifier, self, device, stays=stays)

    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: what the generation config says, else the tokenizer.

        Raises:
            UserError: the model is not all there, or neither names one, so that no answer would
                ever end by itself.
        """
        from transformers import AutoConfig, GenerationConfig

        from m2flow.models.folder import checked_folder, from_folder, read_json

        folder = checked_folder(self.path)
        said = (folder / "generation_config.json").is_file()
        if said:
            read_json(folder / "generation_config.json", "how answers end")
        read = from_folder(GenerationConfig if said else AutoConfig, folder)
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

    def ends(self, strings: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """What ends an answer: `stop_ids`, with the ids of special tokens that strings name, and
        the other strings. A special token is never part of an answer's text.

        Args:
            strings: that are to end answers.

        Raises:
            UserError: as `stop_ids`.
        """
        ids = self.stop_ids()
        if not strings:
            return ids, ()
        tokens = self.tokenizer().added_tokens_decoder.items()
        special = {str(token): number for number, token in tokens if token.special}
        named = [special[one] for one in strings if one in special]
        return tuple(dict.fromkeys((*ids, *named))), tuple(
            one for one in strings if one not in special
        )

    def has_chat_template(self) -> bool:
        """Whether there may be one beside the tokenizer, which itself takes a while to be read."""
        from m2flow.models.folder import model_folder, read_json

        folder = model_folder(self.path)
        if any((folder / name).exists() for name in TEMPLATES):
            return True
        return "chat_template" in read_json(folder / "tokenizer_config.json", "the tokenizer")

    def tokenizer(self) -> Any:
        from m2flow.models.causal_lm import load_tokenizer

        return load_tokenizer(self.path)


@dataclass(frozen=True)
class AdaptedSource:
    """What adapters that are published alone stand on: a model, and the scale of their products."""

    model: ModelSource
    scale: float

    @classmethod
    def of(cls, recipe: ReasoningRecipe, model: ModelSource) -> AdaptedSource | None:
        """That of a run which has begun with a model; None where whole weights are published."""
        section = recipe.model
        return None if section.lora_publish == "merged" else cls(model, section.lora_scale)

    def tensors(self, device: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
        """What makes a model's tensors of adapters.

        The model stays in host memory: in pages of its files, which all processes of a machine
        share; in memory of its own where it is a mixture or the files have another dtype.
        """
        from m2flow.models.lora import Summed

        base = self.model.load(device, stays=False).state_dict()
        return lambda adapters: Summed(base, adapters, self.scale, device)


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


def layout_of(division: Division, shape: ModelShape | None) -> Layout:
    """The layout in which a model is divided so, with what must divide evenly.

    Args:
        division: by how much.
        shape: the model's; None if nobody knows it.
    """
    divisions: list[tuple[str, int, int]] = []
    if shape is not None and division.tp > 1:
        divisions.append(("key-value heads", shape.kv_heads, division.tp))
        divisions.append(("channels of the MLP", shape.intermediate, division.tp))
    if shape is not None and division.ep > 1:
        divisions.append(("experts", shape.experts, division.ep))
    return Layout(division.layout, division.lanes, tuple(divisions))


MOST_HEADS = 64
"""Lanes over which layers are divided at most."""


def divisions_of(lanes: int, shape: ModelShape | None) -> Iterator[Division]:
    """The ways in which a model can be divided over at most so many lanes, simple ones first.

    Layers of a mixture are divided by experts alone, those of a dense model by heads alone.
    """
    sizes = range(2, lanes + 1)
    yield Division()
    yield from (Division(fsdp=size) for size in sizes)
    mixture = shape is not None and shape.experts > 0
    for tp in () if mixture else range(2, min(lanes, MOST_HEADS) + 1):
        yield from (Division(tp=tp, fsdp=fsdp) for fsdp in range(1, lanes // tp + 1))
    yield from (Division(cp=size) for size in sizes)
    if mixture:
        yield from (Division(ep=size) for size in sizes)


def by_heads(lanes: int, heads: int | None) -> Layout:
    """A model whose key-value heads are divided over so many lanes, `tpN`."""
    divisions = () if heads is None else (("key-value heads", heads, lanes),)
    return Layout(f"tp{lanes}", lanes, divisions) if lanes > 1 else ONE_LANE


class Divided(Worker):
    """A worker whose model is divided over the lanes of its gang.

    A subclass sets `state`, what is moved off the accelerator and back.
    """

    collective = True

    recipe: ReasoningRecipe
    state: Any

    planned_model: str | None = None
    """A folder, a `config.json` or a known name, where the plan is for another model than the
    recipe's."""

    def layouts(self, kind: str, lanes: int) -> Sequence[Layout]:
        shape = known_shape(self.recipe, self.planned_model)
        divisions = list(divisions_of(lanes, shape))
        by_heads = [division for division in divisions if division.tp > 1]
        if by_heads and not divides_by_heads(self.recipe, self.planned_model):
            divisions = [division for division in divisions if division.tp == 1]
        return [layout_of(division, shape) for division in divisions]

    def offload(self) -> None:
        self.state.offload()

    def onload(self) -> None:
        self.state.onload()

    def state_bytes(self) -> int:
        num_bytes: int = self.state.nbytes()
        return num_bytes


def divided(
    place: Place, source: ModelSource, load: Callable[..., Any], *, fused: bool | None = False
) -> tuple[Any, Shards]:
    """A model in evaluation mode, divided where the worker stands on gangs of several lanes.

    Args:
        place: where the worker stands.
        source: where the model comes from.
        load: `load` or `load_critic` of that.
        fused: whether it is computed by fused kernels, `training.fused_kernels` of a recipe.

    Raises:
        UserError: fused kernels are asked for and cannot compute the model here.
    """
    from m2flow.training.fused import fuse
    from m2flow.training.sharded import Shards

    shards = Shards.of(place.gang)

    def loaded(*, stays: bool = True) -> Any:
        model = load(place.device, stays=stays).eval()
        fuse(model, place.device, shards.division, fused)
        return model

    if shards.size == 1 and place.device == "cpu":  # what is loaded stays where it is
        return loaded(), shards
    with in_turn(place, source):
        if shards.size == 1:
            return loaded(), shards
        model = loaded(stays=False)  # moves to the device piece by piece
        shards.shard(model)
        return model, shards
