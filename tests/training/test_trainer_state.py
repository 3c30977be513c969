"""A trainer's state is written in parts, and a learner goes on from it under any layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from m2flow.errors import UserError
from m2flow.flow import Batch, Place
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import Shard
from m2flow.training import checkpoint, trainer_state
from m2flow.training.optimizer import SumOptimizer
from m2flow.training.trainer_state import SavedState
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.workers import Critic, Learner, ModelSource
from tests.training.lane_processes import LaneProcesses
from tests.training.parts import whole_parts
from tests.training.test_sharded import ADAMW, RECIPE, gang_of, place_on, samples

STOP, STEPS = 2, 5

REPLICAS: dict[str, Any] = {
    **dict.fromkeys(("fsdp2", "tp2", "cp2", "ep2"), ((0, 1),)),
    **dict.fromkeys(("fsdp4", "tp2.fsdp2"), ((0, 1, 2, 3),)),
}
"""The lanes of each layout; "one" is this process."""

DTYPES = {"dense": "float64", "mixture": "float32", "narrow": "bfloat16"}
"""Experts are grouped products, which have no double precision."""


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(4) as lanes:
        yield lanes


# Parts of tensors

MATRIX = torch.arange(35.0).view(7, 5)


def part(offsets: tuple[int, int], shape: tuple[int, int]) -> Shard:
    """A part of a 7x5 matrix, of zeros."""
    return Shard(torch.zeros(shape), Box(offsets, shape), (7, 5))


def written(folder: Path, tensors: dict[str, Tensor]) -> SavedState:
    trainer_state.write(folder, whole_parts(tensors))
    return SavedState(folder)


def test_parts_are_read_of_what_was_written_whole(tmp_path: Path) -> None:
    saved = written(tmp_path, {"m": MATRIX, "num_steps": torch.tensor(3)})
    assert saved.names == {"m", "num_steps"}
    parts = {"m": part((2, 1), (4, 3)), **whole_parts({"num_steps": torch.tensor(0)})}
    saved.read(parts)
    assert parts["m"].tensor.equal(MATRIX[2:6, 1:4])
    assert int(parts["num_steps"].tensor) == 3


def test_no_more_is_read_than_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, read = written(tmp_path, {"m": MATRIX, "n": MATRIX.clone()}), []
    safe_open = safetensors.safe_open

    class Watched:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = safe_open(*arguments, **options)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            assert name in {"keys", "metadata", "get_slice"}, f"{name} would read whole tensors"
            return getattr(self.file, name)

        def get_slice(self, name: str) -> Any:
            return Slice(self.file.get_slice(name))

    class Slice:
        def __init__(self, inner: Any) -> None:
            self.get_shape, self.get_dtype, self.inner = inner.get_shape, inner.get_dtype, inner

        def __getitem__(self, box: Any) -> Tensor:
            found: Tensor = self.inner[box]
            read.append(found.numel())
            return found

    monkeypatch.setattr(safetensors, "safe_open", Watched)
    saved.read({"m": part((2, 1), (4, 3)), "n": part((7, 0), (0, 5))})
    assert read == [12]


def test_a_file_holds_about_as_much_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in memory while it is written; a tensor that is larger by itself has a file alone."""
    monkeypatch.setattr(trainer_state, "FILE_BYTES", 250)
    tensors = {name: MATRIX + number for number, name in enumerate("abc")}  # of 140 bytes
    tensors |= {"d": torch.ones(10), "e": torch.ones(100), "f": torch.ones(2)}
    saved = written(tmp_path, tensors)
    files = [sorted(load_file(file)) for file in sorted(tmp_path.iterdir())]
    assert files == [["a"], ["b"], ["c", "d"], ["e"], ["f"]]
    found = whole_parts({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    saved.read(found)
    assert all(found[name].tensor.equal(tensor) for name, tensor in tensors.items())


def test_a_state_in_one_file_of_whole_tensors_is_read(tmp_path: Path) -> None:
    """As it was written before lanes wrote parts, or by any other program."""
    save_file({"m": MATRIX}, tmp_path / "state.safetensors")
    here = part((0, 0), (7, 2))
    SavedState(tmp_path).read({"m": here})
    assert here.tensor.equal(MATRIX[:, :2])


def test_an_optimizer_goes_on_from_an_older_file(tmp_path: Path) -> None:
    """Which counted the steps of each parameter, too."""

    def optimizer() -> SumOptimizer:
        layer = torch.nn.Linear(3, 2).double()
        return SumOptimizer(layer.named_parameters(), ADAMW)

    def stepped(some: SumOptimizer) -> dict[str, Tensor]:
        for _, parameter in some._named:
            assert parameter.grad is not None
            parameter.grad.fill_(0.5)
        some.step(torch.ones(1).double(), denominator=0, all_reduce=None)
        return dict(some.state_items())

    here, there = optimizer(), optimizer()
    state = stepped(here)
    assert set(state) == {"num_steps", *product_of("exp_avg", "exp_avg_sq")}
    steps = dict.fromkeys(product_of("step"), torch.tensor(1.0))
    save_file(
        state | {name: one.clone() for name, one in steps.items()}, tmp_path / "state.safetensors"
    )
    saved = SavedState(tmp_path)
    there.load(saved.names, saved.read)
    again, expected = stepped(there), stepped(here)
    assert again.keys() == expected.keys()
    assert all(again[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["exp_avg/gate", "critics.net.0.weight"])
def test_the_state_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    """Such as of one that trained more of its weights, or of another algorithm."""
    there = SumOptimizer(torch.nn.Linear(3, 2).named_parameters(), ADAMW)
    states = {"num_steps": torch.tensor(1), name: torch.ones(3)}
    save_file(states, tmp_path / "state.safetensors")
    saved = SavedState(tmp_path)
    with pytest.raises(UserError) as caught:
        there.load(saved.names, saved.read)
    line = str(caught.value)
    assert "\n" not in line
    assert name in line
    assert "start a new run" in line


def product_of(*quantities: str) -> set[str]:
    """Names of quantities of a layer's parameters."""
    return {f"{quantity}/{name}" for quantity in quantities for name in ("weight", "bias")}


@pytest.mark.parametrize("shape", [(7, 4), (8, 5), (35,)])
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    saved = written(tmp_path, {"m": MATRIX})
    wanted = Shard(torch.zeros(shape), Box.whole(shape), shape)
    with pytest.raises(UserError, match=r"does not hold all of m \(got \(7, 5\)\)") as caught:
        saved.read({"m": wanted})
    assert f"expected a tensor of shape {shape}" in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))
    with pytest.raises(UserError, match=r"does not hold all of w \(got 'nothing'\)"):
        saved.read({"w": wanted})


def test_an_error_is_raised_as_it_was(tmp_path: Path) -> None:
    """PyTorch's own is no `Exception`, and hides that a disk is full."""
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        trainer_state.write(tmp_path / "file", whole_parts({"m": MATRIX}))


@pytest.mark.parametrize("number", range(1, 6))
def test_a_file_that_cannot_be_written_is_an_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of those it is that are written at a time."""
    monkeypatch.setattr(trainer_state, "FILE_BYTES", 1)
    parts = {str(name): Shard(torch.zeros(3), Box((0,), (3,)), (3,)) for name in range(5)}
    trainer_state.write(tmp_path / "whole", parts)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(files) == 5
    (tmp_path / "half" / files[number - 1]).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        trainer_state.write(tmp_path / "half", parts)


def test_a_folder_that_machines_do_not_share_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SECONDS_UNTIL_SEEN", 0.0)
    (tmp_path / "mine").touch()
    trainer_state._wait_for(tmp_path, frozenset({"mine"}))
    with pytest.raises(UserError, match=r"not see what others have written: theirs.*share"):
        trainer_state._wait_for(tmp_path, frozenset({"mine", "theirs"}))


def write_apart(groups: LaneGroups, folder: Path) -> str:
    """The last one of four lanes has a disk of its own under the folder's name."""
    gang = gang_of(groups, ((0, 1, 2, 3),))
    assert gang is not None
    rows = Shard(MATRIX[gang.rank : gang.rank + 1].clone(), Box((gang.rank, 0), (1, 5)), (4, 5))
    usual, checkpoint.SECONDS_UNTIL_SEEN = checkpoint.SECONDS_UNTIL_SEEN, 0.0
    try:
        where = folder / "other" if gang.rank == 3 else folder / "first"
        trainer_state.write(where, {"m": rows}, gang.mesh().get_group("shard"))
    except UserError as error:
        return str(error)
    finally:
        checkpoint.SECONDS_UNTIL_SEEN = usual
    return "nothing"


def test_a_folder_that_machines_do_not_share_is_refused_on_all_lanes(
    lanes: LaneProcesses, tmp_path: Path
) -> None:
    """The first lane alone looks; the others once went on into a collective without it."""
    (said,) = set(lanes(write_apart, tmp_path))
    assert said.startswith(f"{tmp_path / 'first'}: the first lane does not see what others")


def write_rows(groups: LaneGroups, folder: Path) -> str:
    """Each of four lanes has two rows of seven, the last one; all have `b`. One cannot write."""
    gang = gang_of(groups, ((0, 1, 2, 3),))
    assert gang is not None
    first, last = min(2 * gang.rank, 7), min(2 * gang.rank + 2, 7)
    rows = Shard(MATRIX[first:last].clone(), Box((first, 0), (last - first, 5)), (7, 5))
    none = Shard(torch.zeros(0, 5), Box((7, 0), (0, 5)), (7, 5))
    group = gang.mesh().get_group("shard")
    bias = whole_parts({"b": torch.ones(100)})
    trainer_state.write(folder / "rows", {"m": rows, **bias}, group)
    halves = MATRIX[:4] if gang.rank == 0 else MATRIX[4:]
    box = Box((4 * gang.rank, 0), tuple(halves.shape))
    two = Shard(halves.clone(), box, (7, 5)) if gang.rank < 2 else none
    trainer_state.write(folder / "halves", {"m": two}, group)
    (folder / str(gang.rank)).touch()
    try:
        where = folder / "3" if gang.rank == 3 else folder / "others"
        trainer_state.write(where, {"m": rows}, group)
    except OSError as error:
        return type(error).__name__
    return "nothing"


def test_lanes_write_what_no_other_lane_has_written(lanes: LaneProcesses, tmp_path: Path) -> None:
    """And an error on one of them is raised on all, or the others would wait for it."""
    assert lanes(write_rows, tmp_path) == ["FileExistsError"] * 4
    for name, num_files in (("rows", 4), ("halves", 2)):
        whole = whole_parts({"m": torch.zeros(7, 5)})
        SavedState(tmp_path / name).read(whole)
        assert whole["m"].tensor.equal(MATRIX)
        files = list((tmp_path / name).iterdir())
        assert len(files) == num_files
        assert all(file.suffix == ".safetensors" for file in files), "no pickle"
    held = [load_file(file) for file in (tmp_path / "rows").iterdir()]
    assert sum("b" in one for one in held) == 1
    (tmp_path / "rows" / min(file.name for file in (tmp_path / "rows").iterdir())).unlink()
    with pytest.raises(UserError, match="does not hold all of m"):
        SavedState(tmp_path / "rows").read({"m": part((0, 0), (7, 5))})


COUNTS, LONG = {"a": 15, "b": 15, "c": 11}, torch.arange(75.0).view(15, 5)
"""Rows of tensors: of four lanes the last one has a row less of each."""


def write_uneven(groups: LaneGroups, folder: Path) -> None:
    """By the sizes of the first lane `b` and `c` go into a file, by the last one's `a` and `b`."""
    gang = gang_of(groups, ((0, 1, 2, 3),))
    assert gang is not None
    usual, trainer_state.FILE_BYTES = trainer_state.FILE_BYTES, 150
    parts = {}
    for name, count in COUNTS.items():
        each = -(-count // 4)
        first, last = each * gang.rank, min(each * (gang.rank + 1), count)
        box = Box((first, 0), (last - first, 5))
        parts[name] = Shard(LONG[first:last].clone(), box, (count, 5))
    try:
        trainer_state.write(folder, parts, gang.mesh().get_group("shard"))
    finally:
        trainer_state.FILE_BYTES = usual


def test_lanes_whose_parts_differ_in_size_write_all_of_them(
    lanes: LaneProcesses, tmp_path: Path
) -> None:
    """Where a file ends the first lane says: by its own sizes a lane would write one file twice."""
    lanes(write_uneven, tmp_path / "state")
    whole = whole_parts({name: torch.zeros(count, 5) for name, count in COUNTS.items()})
    SavedState(tmp_path / "state").read(whole)
    for name, count in COUNTS.items():
        assert whole[name].tensor.equal(LONG[:count]), name
    assert len(list((tmp_path / "state").iterdir())) == 4 * 2


# A learner that goes on under another layout


def recipe_of(model: str) -> ReasoningRecipe:
    """The one in 16 bits has its optimizer on the host."""
    training = {**RECIPE["training"], "optimizer_on_host": model == "narrow"}
    return ReasoningRecipe.model_validate(
        {**RECIPE, "model": {"dtype": DTYPES[model]}, "training": training}
    )


def learner_of(model: str, folder: Path, place: Place, checkpoint: str | None) -> Learner:
    path = folder if checkpoint is None else Path(checkpoint) / "model"
    learner = Learner(ModelSource(str(path), DTYPES[model]), recipe_of(model), checkpoint)
    learner.load(place)
    return learner


def batch_of(step: int, place: Place) -> Batch:
    """This lane's rows of the samples of a step, of which lanes have different numbers."""
    rows = [row for row in range(12) if (row + step) % 5]
    rank, lanes = place.gang.rank, place.gang.size
    return samples().select([row for row in rows if min(row // 4, lanes - 1) == rank])


Stretch = tuple[dict[str, Tensor], list[dict[str, float]], dict[str, Tensor], dict[str, Tensor]]


def stretch(
    place: Place, model: str, folder: Path, first: int, last: int, saved: str | None, root: Path
) -> Stretch:
    """Some steps of a run, saved at their end: the trainer's state before them, figures, weights
    and state after them."""
    learner = learner_of(model, folder, place, saved)
    optimizer = learner.trainer.optimizer
    before = {name: tensor.clone() for name, tensor in optimizer.state_items()}
    figures = []
    for step in range(first, last):
        learner.train(learner.logprobs(batch_of(step, place)))
        figures.append(learner.train_finish())
    learner.save_checkpoint(str(root), last, 2)
    return before, figures, learner.parameters(), dict(optimizer.state_items())


def stretch_on(groups: LaneGroups, layout: str, root: Path, *arguments: Any) -> Stretch | None:
    place = place_on(groups, REPLICAS[layout], root, layout)
    return None if place is None else stretch(place, *arguments, root)


Run = Callable[..., list[Stretch]]


@pytest.fixture(scope="module")
def run(
    lanes: LaneProcesses,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """What each lane of a layout has found in a stretch; a stretch is taken once."""
    taken: dict[Any, list[Stretch]] = {}
    narrow = {"narrow": folders["dense"]}

    def taking(layout: str, model: str, first: int, last: int, before: str = "") -> list[Stretch]:
        key = (layout, model, first, last, before)
        if key not in taken:
            root = tmp_path_factory.mktemp("stretch")
            roots[key] = root
            saved = None
            if first:
                saved = str(roots[before, model, 0, first, ""] / f"step_{first:06d}")
            arguments = (model, (folders | narrow)[model], first, last, saved)
            if layout == "one":
                taken[key] = [stretch(Place(spill=root), *arguments, root)]
            else:
                found = lanes(stretch_on, layout, root, *arguments)
                taken[key] = [one for one in found if one is not None]
        return taken[key]

    roots: dict[Any, Path] = {}
    return taking


FEW = [
    ("one", "fsdp2", "dense"),
    ("fsdp2", "tp2", "dense"),
    ("tp2.fsdp2", "one", "dense"),
    ("cp2", "fsdp2", "dense"),
    ("ep2", "one", "mixture"),
]
ALL = [
    *((a, b, "dense") for a, b in product(["one", *sorted(REPLICAS.keys() - {"ep2"})], repeat=2)),
    *((a, b, "mixture") for a, b in product(["one", "fsdp2", "cp2", "ep2"], repeat=2)),
]
CASES = FEW + [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FEW]


@pytest.mark.parametrize(("before", "after", "model"), CASES)
def test_a_learner_goes_on_under_another_layout(
    run: Run, before: str, after: str, model: str
) -> None:
    """It has the state that was saved, to the last bit, and makes the steps of an undisturbed run
    on one lane."""
    ((_, all_figures, weights, _),) = run("one", model, 0, STEPS)
    first = run(before, model, 0, STOP)
    for state, figures, weights_here, _ in run(after, model, STOP, STEPS, before):
        saved = first[0][3]
        assert state.keys() == saved.keys()
        assert not [name for name in saved if not state[name].equal(saved[name])]
        assert int(state["num_steps"]) == STOP
        for here, expected in zip(figures, all_figures[STOP:], strict=True):
            assert here["grad_norm"] > 0
            for name in expected.keys() - {"tokens_computed"}:
                assert here[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
        for name, weight in weights.items():
            torch.testing.assert_close(weights_here[name], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), [("fsdp2", "tp2"), ("one", "tp2.fsdp2")])
def test_master_copies_go_along(run: Run, before: str, after: str) -> None:
    """Of a model in 16 bits, with the optimizer on the host: to the last bit."""
    saved = run(before, "narrow", 0, STOP)[0][3]
    masters = [name for name in saved if name.startswith("master/")]
    assert masters
    assert all(saved[name].dtype == torch.float32 for name in masters)
    for state, _, _, later in run(after, "narrow", STOP, STOP + 1, before):
        assert not [name for name in saved if not state[name].equal(saved[name])]
        assert not all(later[name].equal(saved[name]) for name in masters)


def sizes_on(groups: LaneGroups, layout: str, folder: Path, root: Path) -> list[int] | None:
    """Bytes of the files of a trainer's state."""
    place = place_on(groups, REPLICAS[layout], root, layout)
    if place is None:
        return None
    learner = learner_of("dense", folder, place, None)
    learner.train(learner.logprobs(batch_of(0, place)))
    learner.train_finish()
    saved = Path(learner.save_checkpoint(str(root), 1, 1))
    dist.barrier(learner.shards.group)
    return [file.stat().st_size for file in sorted((saved / "trainer").iterdir())]


@pytest.mark.parametrize("layout", ["fsdp2", "cp2", "tp2.fsdp2"])
def test_each_lane_writes_its_share(
    lanes: LaneProcesses,
    folders: dict[str, Path],
    tmp_path: Path,
    layout: str,
) -> None:
    """One lane once gathered all of it; where lanes hold the same, they share the work."""
    sizes, *_ = lanes(sizes_on, layout, folders["dense"], tmp_path)
    num_lanes = len(REPLICAS[layout][0])
    assert len(sizes) == num_lanes
    assert max(sizes) < 1.35 * sum(sizes) / num_lanes


def critic_on(groups: LaneGroups, folder: Path, root: Path) -> dict[str, Tensor] | None:
    """A critic's state, which it has written beside a learner's."""
    place = place_on(groups, REPLICAS["fsdp2"], root, "fsdp2")
    if place is None:
        return None
    source = ModelSource(str(folder), "float64")
    critic, learner = Critic(source, recipe_of("dense")), Learner(source, recipe_of("dense"))
    for worker in (critic, learner):
        worker.load(place)
    critic.save_part(str(root), 1)
    learner.save_checkpoint(str(root), 1, 1)
    return critic.parameters()


def test_a_critic_s_part_is_written_by_all_its_lanes(
    lanes: LaneProcesses,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    expected, *_ = lanes(critic_on, folders["dense"], tmp_path)
    saved = tmp_path / "step_000001"
    source = ModelSource(str(saved / "critic" / "model"), "float64")
    critic = Critic(source, recipe_of("dense"), str(saved))
    critic.load(Place(spill=tmp_path))
    found = critic.parameters()
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    listed = json.loads((saved / "MANIFEST.json").read_text())["files"]
    assert {"trainer", "critic/trainer"} <= {name.rpartition("/")[0] for name in listed}
