"""One mechanism off at a time, on two lanes of one core each: what does each of them buy?

Shared memory off: every payload and the weights cross a socket (`link="stream"`).
Pipelining off: each stage takes all that its window has in one call, so it begins when the one
before it has ended. Fused loops off: each turn of a loop goes by way of the controller, twice.
Switching off: all states of a lane are there with each call, under a limit that holds only one of
them; such a plan is refused, and beside it stand the same plan with switching, and without limit.

The flows are described in `mechanism_flows.py`. The variants of one take the same steps in
alternating blocks; a ratio is the median of the blocks' own ratios. A lane's peak of memory is what
its process has held, interpreter included. A limit is for states and calls, so against it counts
what the lane has held beyond what is left when all states have been put away.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mechanism_flows as flows
import ray
from harness import Target, arguments, conclude, table

import m2flow
from m2flow import Batch, Flow
from m2flow.engine.plan import Plan
from m2flow.errors import PlanError
from m2flow.plan import build_plan, parse_lanes, with_memory, with_sizes
from m2flow.plan.chunks import spread
from m2flow.runtime.driver.pool import LanePool

LANES = parse_lanes("cpu:2")
FULL, SHARED, PIPELINING = "everything on", "shared memory off", "pipelining off"
SWITCHING, LOOPS = "limit, switching on", "fused loops off"
COMPARED = 2
"""Steps whose outputs must be the same: the second one runs on published weights. Later ones may
part where rounding tips a draw."""

NOISE = 0.03
"""A ratio so near to 1 is nothing."""

LIMIT_BYTES = max(flows.STATE_BYTES.values()) + flows.WORKING_BYTES


@dataclass(frozen=True)
class Case:
    """A flow, and the variants of running it.

    Attributes:
        name: for people.
        make_flow: a fresh flow.
        batch: step to its input.
        columns: of the output, which must be the same in all variants.
        variants: name to lanes and plan; the first one has everything on.
        block: steps of a variant in its turn.
        movable: workers that are put away in the end, for a base to count memory from.
    """

    name: str
    make_flow: Callable[[], Flow]
    batch: Callable[[int], Batch]
    columns: Sequence[str]
    variants: Mapping[str, tuple[LanePool, Plan]]
    block: int
    movable: tuple[str, ...] = ()


@dataclass
class Measured:
    """What a variant has shown.

    Attributes:
        blocks: median seconds of a step, for each block after the first.
        num_steps: how many steps these were.
        peak_bytes: the most that each of its lanes has held meanwhile.
        base_bytes: what each of them held at the end, all movable states put away.
        num_switches, transferred_bytes: of all these steps together.
        outputs: of the first steps, the columns that count.
    """

    blocks: list[float] = field(default_factory=list)
    num_steps: int = 0
    peak_bytes: list[int] = field(default_factory=list)
    base_bytes: list[int] = field(default_factory=list)
    num_switches: int = 0
    transferred_bytes: int = 0
    outputs: list[list[Any]] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.median(self.blocks)

    @property
    def peak(self) -> float:
        """Megabytes, of the lane that has held the most."""
        return max(self.peak_bytes) / 1e6

    @property
    def peak_beyond_base(self) -> float:
        """The same, without what was left in the end."""
        pairs = zip(self.peak_bytes, self.base_bytes, strict=True)
        return max(peak - base for peak, base in pairs) / 1e6


def measure(case: Case, blocks: int) -> dict[str, Measured]:
    """Run all variants of a case, in alternating blocks of steps; the first block warms up."""
    found = {name: Measured() for name in case.variants}
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(
                m2flow.launch(
                    case.make_flow(), items_per_step=len(case.batch(0)), plan=plan, lanes=pool
                )
            )
            for name, (pool, plan) in case.variants.items()
        }
        for number in range(blocks + 1):
            steps = range(number * case.block, (number + 1) * case.block)
            batches = [case.batch(step) for step in steps]
            names = list(runs) if number % 2 else list(reversed(runs))
            for name in names:
                if number == 1:
                    _reset_peaks(case.variants[name][0])
                results = [_timed(runs[name].step, batch) for batch in batches]
                _note(found[name], results, case.columns, warm=number > 0)
        for name, (pool, _) in case.variants.items():
            found[name].peak_bytes = [_peak_bytes(process) for process in _processes(pool)]
            for worker in case.movable:
                runs[name].worker_call_everywhere(worker, "offload")
            _reset_peaks(pool)
            found[name].base_bytes = [_peak_bytes(process) for process in _processes(pool)]
    return found


def _timed(step: Callable[[Batch], Any], batch: Batch) -> tuple[float, Any]:
    start = time.perf_counter()
    result = step(batch)
    return time.perf_counter() - start, result


def _note(
    there: Measured, results: Sequence[tuple[float, Any]], columns: Sequence[str], *, warm: bool
) -> None:
    for _, result in results[: COMPARED - len(there.outputs)]:
        there.outputs.append([_values(result.output[column]) for column in columns])
    if not warm:
        return
    there.blocks.append(statistics.median(seconds for seconds, _ in results))
    there.num_steps += len(results)
    spans = [span for _, result in results for span in result.spans]
    there.num_switches += sum(span.kind == "switch" for span in spans)
    there.transferred_bytes += sum(x.args["bytes"] for x in spans if x.kind == "transfer")


def _values(column: Any) -> list[Any]:
    return list(column.tolist() if hasattr(column, "tolist") else column)


def same(found: Mapping[str, Measured]) -> bool:
    """Whether all variants have put out the same, but for the rounding of sums."""
    first, *others = (each.outputs for each in found.values())
    return all(_close(first, other) for other in others)


def _close(some: Any, others: Any) -> bool:
    if isinstance(some, list):
        return len(some) == len(others) and all(map(_close, some, others))
    if isinstance(some, float):
        return abs(some - others) <= 1e-4 * max(abs(some), abs(others))
    return bool(some == others)


# --- memory, as the system counts it --------------------------------------------------------------


def _processes(pool: LanePool) -> list[Path]:
    return [Path("/proc") / str(address.process_id) for address in pool.addresses.values()]


def _reset_peaks(pool: LanePool) -> None:
    for process in _processes(pool):
        (process / "clear_refs").write_text("5")


def _peak_bytes(process: Path) -> int:
    """The most that a process has held; pages of files, such as its libraries', are not its own."""
    lines = (process / "status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    peak, of_files = (1024 * int(sizes[name].split()[0]) for name in ("VmHWM", "RssFile"))
    return peak - of_files


# --- the cases ------------------------------------------------------------------------------------


def distilling_case(unlimited: LanePool, limited: LanePool) -> Case:
    plan = _distilling_plan()
    under_limit = replace(plan, lanes=with_memory(plan.lanes, LIMIT_BYTES))
    return Case(
        "distilling",
        _distilling,
        lambda step: flows.batch_of_seeds(step, 512),
        ["error"],
        {"no limit": (unlimited, plan), SWITCHING: (limited, under_limit)},
        block=2,
        movable=tuple(flows.STATE_BYTES),
    )


def _distilling() -> Flow:
    return flows.Distilling(teacher=flows.Teacher(), student=flows.Student())


def _distilling_plan() -> Plan:
    plan = build_plan("collocated", _distilling().trace(), LANES, 512)
    return with_sizes(
        plan, flows.STATE_BYTES, dict.fromkeys(flows.STATE_BYTES, flows.WORKING_BYTES)
    )


def refusal() -> str:
    """What is said of the plan in which every state is there with every call, under the limit."""
    plan = _distilling_plan()
    beside = {
        worker: flows.WORKING_BYTES + sum(flows.STATE_BYTES.values()) - own
        for worker, own in flows.STATE_BYTES.items()
    }
    plan = replace(with_sizes(plan, {}, beside), lanes=with_memory(LANES, LIMIT_BYTES))
    try:  # before anything is started
        m2flow.launch(_distilling(), items_per_step=512, plan=plan).close()
    except PlanError as error:
        return str(error)
    return ""


def playing_case(fused: LanePool, by_turns: LanePool) -> Case:
    def make() -> Flow:
        return flows.Playing(world=flows.World(), walker=flows.Walker())

    plan = build_plan("collocated", make().trace(), LANES, 64)
    return Case(
        "playing",
        make,
        lambda step: flows.episodes(step, 64),
        ["place"],
        {FULL: (fused, plan), LOOPS: (by_turns, replace(plan, fuse_loops=False))},
        block=4,
    )


def grpo_case(pools: Sequence[LanePool]) -> Case:
    prompts = 32
    _, experiment, _ = flows.checked_grpo(prompts)
    return Case(
        "grpo",
        lambda: flows.checked_grpo(prompts)[0],
        experiment.batch,
        ["reward", "text"],
        _links_and_pipelining(flows.checked_grpo(prompts)[0], prompts, pools),
        block=2,
    )


def seeing_case(pools: Sequence[LanePool]) -> Case:
    def make() -> Flow:
        return flows.Seeing(player=flows.Player(), seer=flows.Seer())

    return Case(
        "seeing",
        make,
        lambda step: flows.batch_of_seeds(step, 64),
        ["reward", "action"],
        _links_and_pipelining(make(), 64, pools),
        block=2,
    )


def _links_and_pipelining(
    flow: Flow, items: int, pools: Sequence[LanePool]
) -> dict[str, tuple[LanePool, Plan]]:
    first, by_socket, third = pools
    graph = flow.trace()
    plan = build_plan("disaggregated", graph, LANES, items)
    at_once = replace(plan, stages=spread(graph, plan.placements, items))
    return {
        FULL: (first, plan),
        SHARED: (by_socket, plan),
        PIPELINING: (third, at_once),
    }


# --- what it says ---------------------------------------------------------------------------------


def ratio(there: Measured, full: Measured) -> float:
    """How many times as long a step takes; the median over the blocks."""
    pairs = zip(there.blocks, full.blocks, strict=True)
    return statistics.median(one / other for one, other in pairs)


def buys(mechanism: str, without: str, found: Mapping[str, Mapping[str, Measured]]) -> str:
    """A sentence on what a mechanism saves in the flows that were run without it."""
    said = []
    for case, variants in found.items():
        if without not in variants:
            continue
        times = ratio(variants[without], variants[FULL])
        if abs(times - 1) <= NOISE:
            saved = f"nothing that shows in {case}"
        elif times > 1:
            saved = f"{1 - 1 / times:.0%} of a step of {case}"
        else:
            saved = f"nothing in {case}, where it costs {1 / times - 1:.0%}"
        megabytes = variants[FULL].transferred_bytes / variants[FULL].num_steps / 1e6
        said.append(
            f"{saved} ({times:.2f} times as long without; {megabytes:.1f} MB of items a step "
            "between lanes)"
        )
    return f"{mechanism} saves {', and '.join(said)}."


def report(
    found: Mapping[str, Mapping[str, Measured]], refused: str, options: argparse.Namespace
) -> None:
    """Print the table and the sentences, and conclude."""
    rows: list[list[object]] = []
    ratios: dict[str, dict[str, float]] = {}
    for case, variants in found.items():
        full, *_ = variants.values()
        ratios[case] = {name: ratio(there, full) for name, there in variants.items()}
        rows += [
            [case, name, there.milliseconds, ratios[case][name], there.peak]
            for name, there in variants.items()
        ]
    rows.insert(2, ["distilling", "limit, switching off", "refused", "-", "-"])
    table(["flow", "variant", "ms/step", "ratio", "MB peak of a lane"], rows)
    unlimited, limited = found["distilling"].values()
    moves = limited.num_switches / limited.num_steps
    print(f"refused: {refused}")
    print(buys("Shared memory", SHARED, found))
    print(buys("Pipelining", PIPELINING, found))
    print(buys("Fusing loops", LOOPS, found))
    print(
        f"Switching lets distilling run under a limit of {LIMIT_BYTES / 1e6:.0f} MB, refused "
        f"without: states and calls take {limited.peak_beyond_base:.0f} MB at most instead of "
        f"{unlimited.peak_beyond_base:.0f}, for {moves:.0f} moves on two lanes and "
        f"{ratios['distilling'][SWITCHING]:.2f} times the time of a step."
    )
    conclude(
        "mechanisms",
        {
            "milliseconds_per_step": _figures(found, lambda there: there.milliseconds),
            "times_as_long": ratios,
            "peak_megabytes": _figures(found, lambda there: there.peak),
            "peak_megabytes_beyond_base": {
                name: there.peak_beyond_base for name, there in found["distilling"].items()
            },
            "limit_megabytes": LIMIT_BYTES / 1e6,
            "moves_per_step": moves,
            "refused": refused,
        },
        [
            *(
                Target(f"{case}: the same outputs in all variants (1: yes)", float(same(each)), 1.0)
                for case, each in found.items()
            ),
            *(
                Target(f"{case}, {name}: times as long as with everything on", times, 1 - NOISE)
                for case, each in ratios.items()
                for name, times in each.items()
                if name in (SHARED, PIPELINING, LOOPS)
            ),
            Target(
                "the plan without switching is refused (1: yes)", float(_explains(refused)), 1.0
            ),
            Target("moves of a step under the limit", moves, 1.0),
            Target(
                "MB of states and calls under the limit",
                limited.peak_beyond_base,
                1.1 * LIMIT_BYTES / 1e6,
                at_most=True,
            ),
        ],
        options,
    )


def _figures(
    found: Mapping[str, Mapping[str, Measured]], figure: Callable[[Measured], float]
) -> dict[str, dict[str, float]]:
    return {
        case: {name: figure(there) for name, there in variants.items()}
        for case, variants in found.items()
    }


def _explains(refused: str) -> bool:
    """Whether a refusal names a worker, the limit in bytes and a lane."""
    worker = any(name in refused for name in flows.STATE_BYTES)
    return worker and str(LIMIT_BYTES) in refused and "lane 0" in refused


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    blocks = 3 if options.quick else 12
    refused = refusal()
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        ray.init(num_cpus=3 * len(LANES), include_dashboard=False, logging_level="ERROR")
        pools = [stack.enter_context(LanePool(LANES, link=x)) for x in (None, "stream", None)]
        first, _, third = pools
        found = {  # the one whose memory counts to the last megabyte comes before all others
            "distilling": measure(distilling_case(first, third), blocks),
            "playing": measure(playing_case(first, third), blocks),
            "grpo": measure(grpo_case(pools), blocks),
            "seeing": measure(seeing_case(pools), blocks),
        }
    report(found, refused, options)


if __name__ == "__main__":
    main()
