"""Deltas: bits arrive exactly, and what does not add up changes nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.runtime.weights.bits import as_bytes, changed_elements, checksum, same_bits
from m2flow.runtime.weights.delta import (
    CorruptDelta,
    Delta,
    DeltaDecoder,
    DeltaEncoder,
    MissedVersion,
    NeedsBootstrap,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float16]


def over_the_wire(delta: Delta) -> Delta:
    """As a link hands it on: a copy."""
    payload = delta.to_payload()
    payload["changes"] = [
        (name, values.clone(), None if gaps is None else gaps.clone(), total)
        for name, values, gaps, total in payload["changes"]
    ]
    return Delta.from_payload(payload)


def assert_same(got, weights):
    assert got.keys() == weights.keys()
    assert all(same_bits(got[name], weights[name]) for name in weights)


@given(
    size=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    changes=st.sets(st.integers(0, 39)),
    offset=st.integers(0, 3),
)
def test_changed_elements_are_those_whose_bits_differ(size, dtype, changes, offset):
    old = torch.zeros(size + offset, dtype=dtype)[offset:]
    new = old.clone()
    changes = sorted(index for index in changes if index < size)
    new[changes] = 1
    assert changed_elements(old, new).tolist() == changes


def test_many_blocks_of_changes():
    old = torch.zeros(3_000_001, dtype=torch.bfloat16)
    new = old.clone()
    where = torch.randperm(len(old), generator=torch.Generator().manual_seed(0))[:1000].sort()[0]
    new[where] = 1
    assert torch.equal(changed_elements(old, new), where)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_versions_one_after_the_other_arrive_bit_by_bit(data):
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for index, dtype in enumerate(DTYPES):
        shape = data.draw(st.sampled_from([(), (0,), (7,), (300, 3), (70_000,)]))
        weights[f"w{index}"] = torch.randn(shape, generator=generator).to(dtype)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    assert_same(decoder.apply(over_the_wire(encoder.encode(weights, 3))), weights)
    for version in (4, 7, 8):
        for tensor in weights.values():
            fraction = data.draw(st.sampled_from([0.0, 0.0001, 0.01, 0.5, 1.0]))
            mask = torch.rand(tensor.shape, generator=generator) < fraction
            tensor[mask] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)[mask]
        delta = encoder.encode(weights, version)
        assert delta.num_bytes <= delta.full_bytes
        assert_same(decoder.apply(over_the_wire(delta)), weights)
        assert decoder.version == version


def test_minus_zero_and_nan_are_values_like_others():
    weights = {"w": torch.tensor([0.0, 1.0, 2.0, 3.0] * 10)}
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    decoder.apply(over_the_wire(encoder.encode(weights, 0)))
    weights["w"][0] = -0.0
    weights["w"][1] = float("nan")
    delta = encoder.encode(weights, 1)
    assert delta.changes[0].values.numel() == 2
    got = decoder.apply(over_the_wire(delta))["w"]
    assert torch.signbit(got[0])
    assert torch.isnan(got[1])
    # The NaN is still the same NaN: nothing is sent for it.
    assert not encoder.encode(weights, 2).changes
    # Another NaN is another value.
    weights["w"].view(torch.int32)[1] ^= 1
    assert encoder.encode(weights, 3).changes[0].values.numel() == 1


def test_a_delta_is_small_where_little_changes():
    weights = {"w": torch.zeros(1_000_000, dtype=torch.bfloat16), "still": torch.zeros(1000)}
    encoder = DeltaEncoder()
    assert encoder.encode(weights, 0).num_bytes == 2_004_000
    weights["w"][::100] = 1
    delta = encoder.encode(weights, 1)
    assert [change.name for change in delta.changes] == ["w"]
    assert delta.num_bytes == 10_000 * 3  # a byte for the gap, two for the value
    assert delta.fraction_changed == pytest.approx(10_000 / 1_001_000)
    assert delta.full_bytes == 2_004_000
    weights["w"] += 1
    delta = encoder.encode(weights, 2)
    assert delta.changes[0].gaps is None
    assert delta.num_bytes == 2_000_000
    assert encoder.encode(weights, 3).num_bytes == 0


@pytest.mark.parametrize("gap", [255, 256, 65_535, 65_536, 2_000_000])
def test_gaps_of_every_width(gap):
    weights = {"w": torch.zeros(2 * gap + 2, dtype=torch.int8)}
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    decoder.apply(encoder.encode(weights, 0))
    weights["w"][[0, gap, 2 * gap]] = 1
    delta = over_the_wire(encoder.encode(weights, 1))
    assert delta.changes[0].gaps is not None
    assert_same(decoder.apply(delta), weights)


def test_a_receiver_that_missed_a_version_asks_for_everything():
    weights = {"w": torch.arange(100.0)}
    encoder, decoder, late = DeltaEncoder(), DeltaDecoder(), DeltaDecoder()
    decoder.apply(over_the_wire(encoder.encode(weights, 0)))
    weights["w"][3] = -1
    first = over_the_wire(encoder.encode(weights, 1))
    decoder.apply(first)
    weights["w"][4] = -1
    second = over_the_wire(encoder.encode(weights, 2))
    with pytest.raises(MissedVersion, match="version 2 builds on version 1, here is none"):
        late.apply(second)
    assert_same(late.apply(over_the_wire(encoder.bootstrap())), weights)
    assert_same(late.apply(second), weights)  # here already
    assert_same(decoder.apply(second), weights)
    with pytest.raises(MissedVersion, match="here is 2"):
        late.apply(first)


def test_other_names_or_shapes_start_afresh():
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    decoder.apply(encoder.encode({"w": torch.zeros(4)}, 0))
    for version, weights in enumerate(
        ({"w": torch.ones(5)}, {"v": torch.ones(5)}, {"v": torch.ones(5, dtype=torch.float64)}), 1
    ):
        delta = over_the_wire(encoder.encode(weights, version))
        assert delta.base is None
        assert_same(decoder.apply(delta), weights)


def damages(delta: Delta):
    """The delta with one thing wrong, in every place there is."""
    for index, change in enumerate(delta.changes):

        def other(index=index, change=change, **fields):
            changes = list(delta.changes)
            changes[index] = dataclasses.replace(change, **fields)
            return dataclasses.replace(delta, changes=tuple(changes))

        values = change.values.clone()
        as_bytes(values)[-1] ^= 4
        yield other(values=values)
        yield other(checksum=change.checksum ^ 1)
        yield other(name="nobody")
        if change.gaps is None:
            yield other(values=change.values[:-1])
            yield other(values=change.values.double())
        else:
            yield other(values=change.values[:-1])
            for position, amount in ((0, 1), (-1, 1), (-1, 100), (0, -1)):
                gaps = change.gaps.clone()
                gaps[position] += amount
                yield other(gaps=gaps)
            yield other(gaps=change.gaps.long() - 50)
            yield other(gaps=torch.zeros_like(change.gaps))
        yield dataclasses.replace(delta, changes=delta.changes[:index])
    yield dataclasses.replace(delta, state=delta.state ^ 1)


@pytest.mark.parametrize("bootstrap", [True, False])
def test_damage_is_found_and_changes_nothing(bootstrap):
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(120, generator=generator) for name in ("a", "b", "c", "d")}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    decoder.apply(over_the_wire(encoder.encode(weights, 0)))
    weights["a"][[2, 20, 110]] = 7
    weights["c"][[5, 6]] = 7
    weights["d"] += 1
    delta = over_the_wire(encoder.encode(weights, 1))
    assert [change.gaps is None for change in delta.changes] == [False, False, True]
    if bootstrap:
        delta = over_the_wire(encoder.bootstrap())
    count = 0
    for damaged in damages(delta):
        with pytest.raises(CorruptDelta):
            decoder.apply(damaged)
        assert issubclass(CorruptDelta, NeedsBootstrap)
        assert decoder.version == 0
        assert_same(decoder._tensors, before)
        count += 1
    assert count > 15
    assert_same(decoder.apply(delta), weights)


@given(st.integers(0, 40_000), st.data())
@settings(deadline=None, max_examples=40)
def test_a_checksum_notices_every_damaged_byte_and_every_swap(size, data):
    generator = torch.Generator().manual_seed(size)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    right = checksum(raw)
    assert checksum(raw.clone()) == right
    assert checksum(torch.cat([raw, raw[:0].new_zeros(1)])) != right
    if size:
        position = data.draw(st.integers(0, size - 1))
        damaged = raw.clone()
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
        assert checksum(damaged) != right
    if size >= 16_400:
        swapped = torch.cat([raw[8192:16_384], raw[:8192], raw[16_384:]])
        assert checksum(swapped) != right
        assert checksum(raw.roll(8)) != right


def test_of_a_tensor_that_is_not_contiguous():
    weights = {"w": torch.arange(12.0).view(3, 4).T}
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    assert_same(decoder.apply(encoder.encode(weights, 0)), weights)
    weights["w"][1, 2] = -1
    assert_same(decoder.apply(encoder.encode(weights, 1)), weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_were_encoded_can_still_be_emptied_in_place(dtype):
    """Else a context switch would have to replace them, and a divided model refuses that."""
    weights = {"w": torch.zeros(3, 5).to(dtype), "none": torch.zeros(0, 5).to(dtype)}
    encoder = DeltaEncoder()
    for version in range(3):
        encoder.encode(weights, version)
        checksum(weights["w"])
        weights["w"][version] = 1
    assert all(tensor.untyped_storage().resizable() for tensor in weights.values())
