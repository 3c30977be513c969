"""A trainer's state on disk: every lane writes its own parts, and reads the slices that it needs.

This is `torch.distributed.checkpoint` with files of safetensors. The header of a file says where in
the whole tensors its parts lie, so a reader under another layout finds what it wants, straight into
memory that is there already. Nothing is gathered, and nothing on disk is a pickle: the index of
PyTorch's own format is one, and there is none here. Knows neither models nor optimizers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from m2flow.errors import UserError
from m2flow.flow.progress import goes_on
from m2flow.runtime.weights.manifest import Shard
from m2flow.training.checkpoint import wait_for

FILE_BYTES = 1 << 28
"""How large a lane's files become, unless a tensor is larger: those that are written just then are
in host memory twice."""

THREADS = 4
"""Files that a lane writes at a time: to put one together takes longer than the disk does."""


def write(folder: Path, parts: Mapping[str, Shard], group: Any = None) -> None:
    """Write the parts of all lanes; of equal parts, one lane writes.

    Collective in the group. The folder may be there, but no files in it.

    Args:
        folder: where to.
        parts: this lane's, by name; all lanes have the same names. A part may be empty.
        group: the process group of the lanes; None for one lane.

    Raises:
        UserError: the first lane does not see the files of all lanes. All lanes raise it.
    """
    with _as_raised():
        save(
            dict(parts),
            storage_writer=_Writer(folder, _file_numbers(parts)),
            planner=_SavePlanner(),
            process_group=group,
            no_dist=group is None,
        )


class SavedState:
    """What `write` has written, or any safetensors files of whole tensors.

    Args:
        folder: where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        metadata = HuggingFaceStorageReader(str(self._folder)).read_metadata()
        return frozenset(metadata.state_dict_metadata)

    def read(self, parts: Mapping[str, Shard]) -> None:
        """Fill these parts, whatever parts were written; not collective.

        Raises:
            UserError: what was saved is not of tensors of these shapes, or not all of it is there.
        """
        with _as_raised():
            load(
                dict(parts),
                storage_reader=HuggingFaceStorageReader(str(self._folder)),
                planner=_LoadPlanner(self._folder),
                no_dist=True,
            )


class _Writer(HuggingFaceStorageWriter):
    """Writes several files at a time; the first lane waits until it sees those of all lanes.

    Torch has threads of its own for writing, in which errors are lost: a disk that is full would be
    a checkpoint.
    """

    def __init__(self, folder: Path, numbers: dict[str, int]) -> None:
        super().__init__(str(folder), numbers, save_distributed=True)
        self._folder = folder
        self.per_thread_copy_ahead = 0  # each thread would wait for the others' copies

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # The first lane's numbers, by which torch names files: a lane with other pieces has others.
        numbers: Mapping[str, int] = plan.storage_data["fqn_to_index_mapping"]
        files: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            files.setdefault(numbers[item.index.fqn], []).append(item)

        def written(items: list[WriteItem]) -> list[WriteResult]:
            part = replace(plan, items=items)
            return super(_Writer, self).write_data(part, planner).value()

        with ThreadPoolExecutor(THREADS) as threads:
            results: list[WriteResult] = []
            for some in threads.map(written, files.values()):
                results += some
                goes_on()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Run on the first lane while the others wait for what comes of it: its error is theirs."""
        files = (each.storage_data.relative_path for theirs in results for each in theirs)
        _wait_for(self._folder, frozenset(files))


class _SavePlanner(DefaultSavePlanner):
    """Writes `Shard`s."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        parts: dict[str, Shard] = self.state_dict
        self.plan = SavePlan([_item(name, part) for name, part in parts.items() if part.box.numel])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        part: Shard = self.state_dict[index.fqn]
        return part.tensor.contiguous()


class _LoadPlanner(DefaultLoadPlanner):
    """Reads into `Shard`s."""

    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved: Mapping[str, Any] = self.metadata.state_dict_metadata
        parts: dict[str, Shard] = self.state_dict
        found: list[ReadItem] = []
        for name, part in parts.items():
            if part.box.numel:
                found += self._items(name, part, saved.get(name))
        return LoadPlan(found)

    def _items(self, name: str, part: Shard, saved: Any) -> list[ReadItem]:
        items, there = list[ReadItem](), 0
        if saved is not None and tuple(saved.size) == part.global_shape:
            items = create_read_items_for_chunk_list(name, saved, [_chunk(part)])
            there = sum(math.prod(item.lengths) for item in items)
        if there != part.box.numel:
            raise UserError(
                f"does not hold all of {name}",
                key=str(self._folder),
                value="nothing" if saved is None else tuple(saved.size),
                expected=f"a tensor of shape {part.global_shape}",
                hint="it is of another model, or a file is missing",
            )
        return items

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        part: Shard = self.state_dict[index.fqn]
        return part.tensor


def _chunk(part: Shard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(part.box.offsets), Size(part.box.shape))


def _item(name: str, part: Shard) -> WriteItem:
    properties = TensorProperties.create_from_tensor(part.tensor)
    data = TensorWriteData(_chunk(part), properties, Size(part.global_shape))
    return WriteItem(MetadataIndex(name, part.box.offsets), WriteItemType.SHARD, tensor_data=data)


def _file_numbers(parts: Mapping[str, Shard]) -> dict[str, int]:
    """By name, into which of a lane's files it goes; what the first lane says counts for all."""
    numbers, number, num_bytes = {}, 1, 0
    for name, part in parts.items():
        num_bytes += part.tensor.nbytes
        if num_bytes > FILE_BYTES and num_bytes > part.tensor.nbytes:
            number, num_bytes = number + 1, part.tensor.nbytes
        numbers[name] = number
    return numbers


def _wait_for(folder: Path, files: frozenset[str]) -> None:
    def missing() -> str:
        name = min(files - {path.name for path in folder.iterdir()}, default="")
        return name and f"what others have written: {name}"

    wait_for(missing, folder, "the first lane")


@contextmanager
def _as_raised() -> Iterator[None]:
    """Raise what a lane has raised, and not PyTorch's account of it; nor its word on one lane."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            raise first from None
