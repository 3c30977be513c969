"""Whatever is packed comes back the same, and buffers are never pickled."""

from __future__ import annotations

import enum
import gc
import io
import pickle
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2flow.flow.batch import Batch, Ragged
from m2flow.runtime.transport.wire import UnsendableError, pack, unpack

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


def sent(value: Any) -> Any:
    packed = pack(value)
    memory = []
    for buffer in packed.buffers:
        target = np.empty(buffer.nbytes, np.uint8)
        buffer.copy_to(target)
        assert np.array_equal(target, buffer.memory())
        memory.append(target)
    assert packed.nbytes == len(packed.head) + sum(map(len, memory))
    return unpack(packed.head, memory)


def same(a: Any, b: Any) -> bool:
    """Equal in type and content, all the way down; NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, b.requires_grad):
            return False
        # Copied, because one element or none may keep any stride, and then has no view as bytes.
        a, b = (torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for t in (a, b))
        return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Batch):
        return a.ids == b.ids and same(a.columns, b.columns)
    if isinstance(a, Ragged):
        return a.lengths == b.lengths and same(a.values, b.values)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Every dtype; zero-size, zero-dim, strided, transposed, expanded and sliced."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numbers = np.random.default_rng(draw(st.integers(0, 99)))
    count = int(np.prod(shape)) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    bits = torch.from_numpy(numbers.integers(0, high, count, dtype=np.uint8))
    tensor = bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    how = draw(st.sampled_from(["as it is", "transposed", "every other", "expanded"]))
    if how == "transposed" and tensor.ndim > 1:
        tensor = tensor.transpose(0, -1)
    elif how == "every other" and tensor.ndim:
        tensor = tensor[::2]
    elif how == "expanded":
        tensor = tensor.expand(2, *tensor.shape)
    if tensor.is_floating_point() or tensor.is_complex():
        tensor = tensor.requires_grad_(draw(st.booleans()) and tensor.is_leaf)
    return tensor


arrays = st.builds(
    lambda dtype, shape, flip: np.zeros(shape, dtype).T if flip else np.ones(shape, dtype),
    st.sampled_from(["<f4", ">i8", "?", "<U3", "S2", "<M8[s]", "<c16", "<f2"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.booleans(),
)
ragged = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(
    lambda lengths: Ragged(torch.arange(sum(lengths), dtype=torch.bfloat16), lengths)
)
leaves = st.one_of(
    tensors(),
    arrays,
    ragged,
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
batches = st.integers(1, 3).flatmap(
    lambda rows: st.builds(
        lambda values, ids: Batch(
            {
                "tensor": torch.arange(rows * 2).view(rows, 2),
                "array": np.arange(rows),
                "ragged": Ragged(torch.ones(rows), [1] * rows),
                "values": values,
            },
            ids,
        ),
        st.lists(leaves, min_size=rows, max_size=rows),
        st.lists(st.integers(0, 99), min_size=rows, max_size=rows),
    )
)
values = st.recursive(
    leaves | batches,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)


@given(values)
def test_any_nested_structure_comes_back_the_same(value: Any) -> None:
    assert same(sent(value), value)


@given(tensors())
def test_elements_stay_out_of_the_head(tensor: torch.Tensor) -> None:
    packed = pack({"one": tensor, "two": tensor.clone().detach()})
    assert len(packed.head) < 400
    assert sum(buffer.nbytes for buffer in packed.buffers) == 2 * tensor.nbytes


def test_a_slice_carries_only_what_it_shows() -> None:
    assert pack(torch.zeros(1_000_000)[5:10]).nbytes < 300


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_with_any_stride(dtype: torch.dtype) -> None:
    """It is contiguous whatever its stride, which a view as bytes does not forgive."""
    one = torch.tensor([1, 0]).to(dtype)[::2]
    assert same(sent(one), one)
    assert same(sent([one]), [one])


def test_a_contiguous_tensor_is_not_copied_before_the_link_does() -> None:
    tensor = torch.arange(4)
    (buffer,) = pack([tensor]).buffers
    assert buffer.address == tensor.data_ptr()
    assert np.shares_memory(buffer.memory(), tensor.numpy())


def test_unpacking_copies_nothing() -> None:
    packed = pack({"tensor": torch.zeros(2), "array": np.zeros(2)})
    memory = [np.zeros(buffer.nbytes, np.uint8) for buffer in packed.buffers]
    value = unpack(packed.head, memory)
    memory[0][:] = 255
    memory[1][:] = 255
    assert torch.isnan(value["tensor"]).all()
    assert np.isnan(value["array"]).all()


def test_what_requires_a_gradient_arrives_as_a_leaf_only_if_it_was_one() -> None:
    leaf = torch.ones(2, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    got = sent([leaf, leaf * 2, parameter, frozen])
    assert [one.requires_grad for one in got] == [True, False, True, False]
    assert all(one.is_leaf for one in got)
    assert [type(one) for one in got[2:]] == [torch.nn.Parameter] * 2


def test_a_batch_of_any_columns() -> None:
    batch = Batch(
        {
            "tokens": Ragged(torch.arange(4), [1, 3]),
            "rewards": torch.ones(2, 3, dtype=torch.bfloat16),
            "nothing": torch.zeros(2, 0),
            "text": ["a", None],
        },
        [3, 1],
    )
    assert same(sent(batch), batch)
    assert same(sent(Batch({}, [1, 2])), Batch({}, [1, 2]))


def test_one_column_under_two_names_arrives_as_one() -> None:
    tensor, ragged = torch.arange(2), Ragged(torch.arange(3), [1, 2])
    for columns in ({"a": tensor, "b": tensor}, {"a": ragged, "b": ragged}):
        got = sent(Batch(columns))
        assert got["a"] is got["b"]
    got = sent(Batch({"a": tensor, "b": [tensor, 1], "c": Ragged(tensor, [1, 1])}))
    assert got["a"] is got["b"][0] is got["c"].values
    texts = ["x", "y"]
    got = sent(Batch({"a": texts, "b": texts}))
    assert got["a"] is got["b"]


def test_one_object_arrives_as_one_and_two_views_as_two() -> None:
    tensor = torch.arange(4)
    one, other, view = sent([tensor, tensor, tensor.view(2, 2)])
    assert one is other
    one[0] = 9
    assert view[0, 0] == 0


def test_lazily_conjugated_and_negated_tensors_arrive_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    conjugated, negated = sent([tensor.conj(), tensor.conj().imag])
    assert torch.equal(conjugated, tensor.conj())
    assert torch.equal(negated, torch.tensor([-2.0, 4.0]))


def test_layouts_that_torch_takes_apart_itself() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(sent({"s": sparse})["s"].to_dense(), torch.eye(3))


def test_arrays_that_are_more_than_their_bytes() -> None:
    objects = np.array([1, "x", None], dtype=object)
    records = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    got = sent([objects, records])
    assert list(got[0]) == [1, "x", None]
    assert got[1].dtype == records.dtype
    assert got[1]["b"][0] == 2.0


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    text: str


def test_dataclasses_enums_and_sets() -> None:
    got = sent({"one": Sample(torch.arange(3), "a"), "two": Colour.RED, "three": {1, 2}})
    assert got["one"].text == "a"
    assert torch.equal(got["one"].tokens, torch.arange(3))
    assert got["two"] is Colour.RED
    assert got["three"] == {1, 2}


def test_lambdas_and_local_classes_travel_by_value() -> None:
    @dataclass
    class Local:
        tensor: torch.Tensor

    packed = pack({"f": lambda x: x + 1, "local": Local(torch.zeros(10_000))})
    assert len(packed.buffers) == 1
    assert len(packed.head) < 10_000
    got = unpack(packed.head, [buffer.memory() for buffer in packed.buffers])
    assert got["f"](1) == 2
    assert got["local"].tensor.shape == (10_000,)


def test_what_the_main_program_defines_travels_by_value() -> None:
    """Another process has another main program, so a name would not be found there."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("class Mine:\n    def __init__(self): self.x = 3\n", space)
    head = pack(space["Mine"]()).head
    assert pickle.loads(head).x == 3


class PickleBufferHolder:
    """What other libraries do: hand pickle a buffer of their own."""

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _hold, (pickle.PickleBuffer(self.data),)


def _hold(data: Any) -> PickleBufferHolder:
    return PickleBufferHolder(bytearray(data))


def test_buffers_of_other_libraries_travel_out_of_band_too() -> None:
    for data in (bytearray(b"x" * 5_000), bytearray()):
        packed = pack([PickleBufferHolder(data), torch.ones(2)])
        assert len(packed.head) < 400
        assert sent([PickleBufferHolder(data), torch.ones(2)])[0].data == data


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        (threading.Lock(), "lock", "_thread.lock"),
        ({"a": [1, threading.Lock()]}, "dict['a'][1]", "_thread.lock"),
        (Batch({"env": [io.TextIOWrapper(io.BytesIO())]}), "Batch['env'][0]", "TextIOWrapper"),
        (Sample(torch.ones(1), (x for x in ())), "Sample.text", "generator"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, where: str, kind: str) -> None:
    with pytest.raises(UnsendableError) as caught:
        pack(value)
    assert where in str(caught.value)
    assert kind in str(caught.value)


def test_packing_keeps_nothing_alive() -> None:
    """A cycle through the pickler held every value until the garbage collector came by."""
    gc.disable()
    try:
        for value in ([torch.ones(3)], [torch.ones(3), lambda: 0]):
            tensor = weakref.ref(value[0])
            pack(value)
            value.clear()
            assert tensor() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_what_was_copied_out_can_still_be_emptied_in_place(dtype: torch.dtype) -> None:
    """As context switches do; a view for NumPy would rule it out for good."""
    tensor = torch.tensor([1, 0, 1, 1]).to(dtype)
    for source in (tensor, tensor.view(2, 2).T, torch.nn.Parameter(tensor, False)):
        (buffer,) = pack({"weight": source}).buffers
        target = np.empty(buffer.nbytes, np.uint8)
        buffer.copy_to(target)
        assert tensor.untyped_storage().resizable()
        assert torch.equal(torch.from_numpy(target).view(dtype), source.detach().clone().flatten())
