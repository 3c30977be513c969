"""What slots as long as the longest running row cost beside pages of keys and values.

A rollout of long-tailed answers is played with the decoding prices of the analytic profile on H100,
256 requests at a time, 16 tokens a round, under the budget that weights leave. With slots each
running row takes and reads the columns of the longest; with pages its own tokens. What has no room
waits, and the latest row makes way and is computed again. Rows that begin together are as long as
each other, so the two differ only where answers wait for a place. No target: a choice hangs on it
(docs/decisions/0079-keys-and-values-in-pages.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from harness import arguments, conclude, table

from m2flow.models.lengths import fit_lengths
from m2flow.models.shape import KNOWN_MODELS
from m2flow.models.work import decoding
from m2flow.plan.profile.hardware import DEVICES

H100, PROMPT, LIMIT, ROUND = DEVICES["H100"], 150, 256, 16
CASES = (("Qwen2.5-1.5B", 1), ("Qwen2.5-7B", 1), ("Qwen2.5-7B", 2), ("Qwen2.5-32B", 4),
         ("Qwen3-30B-A3B", 2))  # fmt: skip
"""Models, and lanes of a replica."""


@dataclass
class Rollout:
    """Answers of a replica, and how far each has come."""

    model: str
    lanes: int
    lengths: list[float]
    slots: bool

    def cells(self) -> float:
        """Tokens that there is room for."""
        shape = KNOWN_MODELS[self.model]
        room = min(0.5 * H100.memory_bytes, H100.usable_bytes - shape.weight_bytes / self.lanes)
        return room / shape.kv_bytes_on_lane(self.lanes)

    def taken(self, rows: list[float]) -> float:
        """Cells of rows so long."""
        return len(rows) * max(rows) if self.slots else sum(rows)

    def seconds(self) -> tuple[float, float]:
        """Of the rollout; and tokens that were computed again, over all."""
        shape, cells = KNOWN_MODELS[self.model], self.cells()
        waiting = list(range(len(self.lengths)))[::-1]
        done = [0.0] * len(self.lengths)
        running: list[int] = []
        seconds = again = 0.0

        def rows(some: list[int], ahead: int) -> list[float]:
            return [PROMPT + done[one] + ahead for one in some]

        while waiting or running:
            while waiting and len(running) < LIMIT:
                if self.taken(rows([*running, waiting[-1]], ROUND)) > cells and running:
                    break
                running.append(waiting.pop())
            while self.taken(rows(running, ROUND)) > cells and len(running) > 1:
                again += done[running[-1]]
                waiting.append(running.pop())
            held = self.taken(rows(running, 0))
            seconds += ROUND * decoding(shape, len(running), held, self.lanes).on(H100)
            for one in running:
                done[one] += ROUND
            running = [one for one in running if done[one] < self.lengths[one]]
        return seconds, again / sum(self.lengths)


def main() -> None:
    options = arguments((__doc__ or "").splitlines()[0]).parse_args()
    found = []
    for (model, lanes), longest, times in product(CASES, (8192, 27_648), (1, 2, 4)):
        if options.quick and (longest > 8192 or times > 2):
            continue
        lengths = fit_lengths(0.27 * longest, longest).sample(times * LIMIT, 1)
        (slots, redone), (pages, paged) = (
            Rollout(model, lanes, lengths, dense).seconds() for dense in (True, False)
        )
        found.append((model, lanes, longest, times, slots, pages, slots / pages, redone, paged))
    header = ("model", "lanes", "longest", "answers over limit", "slots, s", "pages, s", "ratio",
              "slots again", "pages again")  # fmt: skip
    table(header, found)
    conclude("slots", {"rollouts": found}, [], options)


if __name__ == "__main__":
    main()
