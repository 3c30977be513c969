"""The numbers that a search tries: chunk sizes, lanes of a side, replicas of a stage.

On few lanes every number is tried. On many the menus are grids, of several finenesses: a search
looks at everything on a coarse one, and then, finer, around what it found (`passes`).
"""

from __future__ import annotations

from functools import cache

from m2flow.flow.graph import FlowGraph
from m2flow.plan.units import SourceItems

CALLS = (1, 4, 16)
"""Into how many calls a replica may cut its part of a chunk, to work in less memory."""

GROUPS = (1, 2, 4)
"""How many groups of items may ping-pong between the members of a cycle that stand apart."""

FINE = 8
"""Up to so many lanes or replicas every number is tried."""

MAX_CHUNKS = 64
"""The most chunks into which a step is cut on FINE lanes, where all sizes are tried everywhere."""

MORE_CHUNKS = 256
"""The most on more lanes, where small sizes are tried around good plans only."""

HALVES = 2
"""Each chunk size is at least so many times the next."""


@cache
def grid(most: int) -> tuple[int, ...]:
    """Every number up to FINE, and those of two significant bits up to `most`."""
    numbers, step = list(range(1, FINE + 1)), FINE
    while step < most:
        numbers += [3 * step // 2, 2 * step]
        step *= 2
    return tuple(number for number in numbers if number <= most)


@cache
def counts(most: int) -> tuple[int, ...]:
    """Lanes that a side of a `Spatial` may have, of so many in all: `grid`, and all less a power
    of two."""
    powers = [2**n for n in range(most.bit_length()) if 2 ** (n + 1) < most]
    return tuple(sorted({0, most, *grid(most), *(most - power for power in powers)}))


@cache
def lean(most: int) -> tuple[int, ...]:
    """Of `grid` the powers of two, and what is no small part of all."""
    kept = {n for n in grid(most) if 16 * n >= most or not n & (n - 1)}
    return tuple(sorted({0, most, *kept}))


@cache
def few(most: int) -> tuple[int, ...]:
    """One lane, and large powers of two, from either end."""
    powers = [2**n for n in range(most.bit_length())]
    near = {n for n in powers if 4 * n >= most} | {1}
    menu = {0, most, *near, *(most - n for n in near)}
    return tuple(sorted(n for n in menu if n in counts(most)))


def none(most: int) -> tuple[int, ...]:
    """All on one side."""
    return (0, most)


@cache
def replica_counts(count: int, most: int) -> tuple[int, ...]:
    """Replicas worth trying for so many units, of at most so many replicas."""
    if most < 1:
        return ()
    numbers = {min(most, count)}
    numbers.update(range(1, min(most, count, FINE) + 1))
    numbers.update(-(-count // share) for share in grid(count))
    kept, shares = [], set()
    for number in sorted(numbers):
        if number <= most and -(-count // number) not in shares:
            shares.add(-(-count // number))
            kept.append(number)
    return tuple(kept)


def chunk_sizes(
    graph: FlowGraph, num_items: int, max_chunks: int, ratio: int = HALVES
) -> tuple[SourceItems, ...]:
    """A chain of divisors of a step, by mini-batches first and small primes then.

    Args:
        graph: the flow.
        num_items: source items of a step.
        max_chunks: the most chunks of a step.
        ratio: each size is at least so many times the next.
    """
    most = max(node.minibatches for node in graph.nodes)
    sizes, size = [num_items], num_items
    for factor in (*_primes(most), *_primes(num_items)):
        if size % factor == 0 and num_items * factor <= max_chunks * size:
            size //= factor
            if size * ratio <= sizes[-1]:
                sizes.append(size)
    return tuple(SourceItems(size) for size in sizes)


def thinned(sizes: tuple[int, ...], ratio: int, most: int) -> tuple[int, ...]:
    """Of a chain of sizes the first, and those at least `ratio` times smaller than the one before.

    Args:
        sizes: largest first.
        ratio: between neighbours, at least.
        most: chunks of a step, at most.
    """
    kept = [sizes[0]]
    for size in sizes[1:]:
        if size * ratio <= kept[-1] and size * most >= sizes[0]:
            kept.append(size)
    return tuple(kept)


def _primes(number: int) -> list[int]:
    """Prime factors, smallest first."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
