"""Frames come out as they went in, in whatever pieces the bytes arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from m2flow.runtime.transport.frame import (
    _READ_AHEAD,
    ALIGNMENT,
    Frame,
    FrameDecoder,
)

lengths = st.sampled_from([0, 1, 63, 64, 65, 1000, _READ_AHEAD - 40, _READ_AHEAD, 100_000])
frames = st.builds(
    lambda kind, head, sizes: Frame(kind, bytes(head), [bytes([n % 251]) * n for n in sizes]),
    st.sampled_from(["a", "sixteen-letters-"]),
    lengths,
    st.lists(lengths, max_size=4),
)


def content(frame: Frame) -> tuple[str, bytes, list[bytes]]:
    return frame.kind, bytes(frame.head), [bytes(one) for one in frame.buffers]


@given(st.lists(frames, max_size=4), st.lists(st.integers(1, 200_000), min_size=1, max_size=20))
def test_frames_come_out_as_they_went_in(sent: list[Frame], portions: list[int]) -> None:
    raw = b"".join(piece for frame in sent for piece in frame.pieces())
    decoder, got, at, turn = FrameDecoder(), [], 0, 0
    while at < len(raw):
        room = decoder.room()
        assert len(room) > 0
        count = min(len(room), len(raw) - at, portions[turn % len(portions)])
        room[:count] = raw[at : at + count]
        got += decoder.add(count)
        at, turn = at + count, turn + 1
    assert list(map(content, got)) == list(map(content, sent))
    for frame in got:
        starts = [one.obj for one in frame.buffers]
        assert all(start is starts[0] for start in starts), "one piece of memory a frame"
        assert all(not one.readonly for one in frame.buffers)


def test_buffers_are_aligned_to_each_other() -> None:
    frame = Frame("k", b"abc", [bytes(3), bytes(5), bytes(70)])
    _, *rest = [frame.pieces()[0]]
    assert not rest, "a small frame is one piece"
    raw = bytes(frame.pieces()[0])
    assert (len(raw) - 40) % ALIGNMENT == 0
