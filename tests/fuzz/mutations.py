"""Content with mutated bytes, for readers that must not trip over it."""

from __future__ import annotations

import time
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.results import add_result

WORDS = (b"null", b"NaN", b"-1", b"1e999", b"[" * 3000, b"{", b'"', b"\x00", b"\xff", b"\n", b": ",
         b"!!python/object/apply:os.system [ls]", b"&a [*a]", b"9" * 5000,
         b"\\ud800", b"true")  # fmt: skip
"""What readers trip over."""


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with some of its bytes changed, cut out, doubled, or displaced by a word."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 12)))
        new = draw(st.sampled_from(WORDS) | st.binary(max_size=6) | st.just(content[start:end] * 2))
        content = content[:start] + new + content[end:]
    return content if draw(st.booleans()) else content[: draw(st.integers(0, len(content)))]


MANY = 25_000


def examples(count: int) -> Callable[..., object]:
    """Of so many examples; and the same slowly. `MANY` are new ones each time."""
    return settings(
        max_examples=count,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        deadline=None,
        derandomize=count < MANY,
        database=None,
    )


def fuzzed_long(kind: str, content: bytes, check: Callable[[bytes], None]) -> None:
    """Give a check `MANY` mutations of the content; `make test-fuzz` keeps that it was done."""
    begun = time.monotonic()
    fuzzed(content, check, MANY)
    seconds = round(time.monotonic() - begun, 1)
    add_result("M2FLOW_FUZZ_RESULT", "fuzz", kind, {"cases": MANY, "seconds": seconds})


def fuzzed(content: bytes, check: Callable[[bytes], None], count: int) -> None:
    """Give a check so many mutations of the content."""

    @examples(count)
    @given(mutated(content))
    def run(data: bytes) -> None:
        check(data)

    run()
