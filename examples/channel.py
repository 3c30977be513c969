"""A loop of one's own around a channel: processes make samples, this one trains on them.

A sample's weight is its number of tokens, so that a batch is as many samples as fit into 64 tokens.
The channel holds 16 samples at most: makers that are ahead of the training wait.

    python examples/channel.py
    python examples/channel.py 3 100
"""

from __future__ import annotations

import random
import sys
from multiprocessing import get_context

from m2flow import Channel

TOKENS_PER_BATCH = 64


def make(channel: Channel, maker: int, num_samples: int) -> None:
    """Put samples of various lengths."""
    length_of = random.Random(maker)
    for number in range(num_samples):
        tokens = list(range(length_of.randint(1, 32)))
        channel.put({"maker": maker, "number": number, "tokens": tokens}, weight=len(tokens))


def train(num_makers: int, num_samples: int) -> str:
    """Take batches until every sample was seen; how many tokens and batches that was."""
    batches, tokens, left = 0, 0, num_makers * num_samples
    with Channel("samples", max_items=16, timeout=60) as channel:
        start = get_context("spawn").Process
        makers = [start(target=make, args=(channel, n, num_samples)) for n in range(num_makers)]
        for maker in makers:
            maker.start()
        while left:
            batch = channel.get_batch(weight=TOKENS_PER_BATCH, max_items=left)
            tokens += sum(len(sample["tokens"]) for sample in batch)
            batches, left = batches + 1, left - len(batch)
        for maker in makers:
            maker.join()
    return f"{tokens} tokens in {batches} batches of at most {TOKENS_PER_BATCH}"


if __name__ == "__main__":
    print(train(*map(int, sys.argv[1:] or (2, 50))))
