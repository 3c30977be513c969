"""Whole GRPO steps of a model of 1.5 billion parameters on one GPU: m2flow, and TRL beside it.

64 prompts, 16 answers each, of geometric lengths with a mean of 1,000 tokens, cut at 4,096
(`long_answers.py`: random weights of the published shape; whoever draws from them gets such
lengths). m2flow runs by its command line, collocated and under `auto`; the first step of each side
warms up. Shown are seconds by phase, context switches against a pinned copy measured in the same
run, memory of the device, what was predicted, and TRL's GRPOTrainer on the same work, where an
interpreter has it (`--sides trl`; M2FLOW_TRL_PYTHON, else this one). Each side takes minutes:
`--sides` picks them, so that runs with a time limit can share them out, and each is stopped after
`--seconds`: what is known of the steps that it has done is shown. If TRL's first step is not over
by then, the samples a second that it can have had at most are held against those of m2flow's first
step, in which both warm up. `--quick` has fewer and shorter answers, `--device cpu` a tiny model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.context_switch import raw_on_cpu, raw_on_gpu
from gpu.long_answers import write_model
from harness import ROOT, Target, arguments, conclude, table

from m2flow.models.shape import PUBLISHED
from m2flow.observe.jsonl import read_rows

HERE = Path(__file__).parent
LIMIT_SECONDS = 560
STOP_SECONDS = 30
"""That a side which is stopped has to write what it has, before it is killed."""

SIDES = ("collocated", "auto", "trl")
AGAINST_TRL, OF_PINNED = 3.0, 0.7
"""Aimed at: samples a second over TRL's, and the rate of switches over that of a pinned copy."""

LEARNING_RATE = 1e-12
"""All that an update does is done, and answers stay as long as they are: the end token hangs on a
few weights, and with 1e-6 answers were three times as long after four updates."""

STEP = re.compile(r"(seconds|plan)/.*|length/mean")
"""What is kept of each step."""

PROMPT_TOKENS = 9
"""Of a prompt in the mean: sums such as `12+34=`, letter by letter."""

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What each side does.

    Attributes:
        device, lanes: `cuda` or `cpu`, and m2flow's lanes on it.
        prompts, answers: of a step; `minibatches` of it.
        mean, tokens: of an answer, and at most.
        steps: that are timed, after one that is not.
        running: answers that m2flow draws together at most.
        microbatch: tokens of m2flow's micro-batches, `trl_samples` samples of TRL's.
        lane_memory: of m2flow's lane; None for what the device has. An H200 has so much that at
            1.5B nothing would have to leave; with an H100's 80 GB learner and generator take turns.
    """

    device: str
    lanes: str
    prompts: int
    answers: int
    minibatches: int
    mean: int
    tokens: int
    steps: int
    running: int
    microbatch: int
    trl_samples: int
    lane_memory: str | None = None


WORK = {
    "cuda": Work("cuda", "gpu:1", 64, 16, 4, 1000, 4096, 1, 512, 8192, 4, "80GB"),
    "cpu": Work("cpu", "cpu:1", 4, 4, 2, 20, 64, 1, 16, 1024, 4, "4MB"),
}
DEVICES = ("H200", "H100", "B200", "A100-80GB", "L40S")
"""Names of `m2flow plan --cluster`, the first of which a GPU's own name holds is its."""


@contextmanager
def device_memory(found: dict[str, float]) -> Iterator[None]:
    """Look at the device's memory while something runs; the most in use goes into `found`."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            free, total = torch.cuda.mem_get_info()
            found["GB at most"] = max(found.get("GB at most", 0.0), (total - free) / 1e9)

    watcher = threading.Thread(target=look, daemon=True)
    if torch.cuda.is_available():
        watcher.start()
    yield
    over.set()


def keys_of(work: Work, model: Path) -> list[str]:
    """The recipe and what is set in it."""
    return [
        str(ROOT / "recipes/quickstart.yaml"),
        *(f"model.path={model}", "warmup.steps=0", "reward=long_answers:even"),
        *(f"prompts_per_step={work.prompts}", f"samples_per_prompt={work.answers}"),
        *(f"minibatches={work.minibatches}", f"generation.max_new_tokens={work.tokens}"),
        *(f"generation.max_running={work.running}", f"optimizer.learning_rate={LEARNING_RATE}"),
        *(f"training.tokens_per_microbatch={work.microbatch}", "evaluation.problems=0"),
        "training.gradient_checkpointing=false",  # the device has room for a micro-batch's
        *(f"steps={work.steps + 1}", "checkpoint.every=1000", "journal_gb=0"),
        *([f"lane_memory={work.lane_memory}"] if work.lane_memory else []),
    ]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "m2flow", *words]


def environment() -> dict[str, str]:
    """With the rule that judges answers where Python finds it."""
    paths = [str(HERE), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def of_m2flow(work: Work, model: Path, mode: str, folder: Path, limit: float) -> dict[str, float]:
    """Figures of whole steps in a mode, the medians over those that are timed."""
    run, found = folder / mode, dict[str, float]()
    steps = work.steps + (4 if mode == "auto" else 0)  # its first ones are a race
    began = time.perf_counter()
    words = command(
        *("train", *keys_of(replace(work, steps=steps), model), "--quiet"),
        *("--mode", mode, "--run-dir", str(run), f"lanes={work.lanes}"),
    )
    with device_memory(found), subprocess.Popen(words, env=environment()) as process:
        try:
            if process.wait(limit):
                raise subprocess.CalledProcessError(process.returncode, words)
            found["s the whole command"] = time.perf_counter() - began
        except subprocess.TimeoutExpired:
            process.terminate()
            found["s, stopped"] = time.perf_counter() - began
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:  # it was writing a checkpoint; its rows are there
                process.kill()
    rows = [row for row in read_rows(run / "metrics.jsonl").rows if "seconds/step" in row]
    if not rows:
        return found
    found["s the first step"] = rows[0]["seconds/step"]
    found["samples/s, the first step"] = work.prompts * work.answers / found["s the first step"]
    if len(rows) <= steps - work.steps:  # none that is timed
        found |= {name: rows[0][name] for name in rows[0] if name.startswith("seconds/")}
        found["tokens of an answer"] = rows[0]["length/mean"]
        return found | switches(run, work.device)
    rows = rows[-work.steps :]
    for name in sorted({name for row in rows for name in row if name.startswith("seconds/")}):
        found[name] = statistics.median(row.get(name, 0.0) for row in rows)
    found["samples/s"] = work.prompts * work.answers / found["seconds/step"]
    found["tokens of an answer"] = statistics.mean(row["length/mean"] for row in rows)
    predicted = [row["plan/predicted_seconds"] for row in rows if row.get("plan/predicted_seconds")]
    if predicted:
        found["predicted s a step"] = predicted[-1]
    return found | switches(run, work.device)


def kept(run: Path, out: Path | None) -> list[dict[str, float]]:
    """Of each step of m2flow's what `STEP` says; its trace is put beside the results."""
    if out is not None and (run / "timeline.json").exists():
        shutil.copy(run / "timeline.json", out.with_name(f"{out.stem}_{run.name}_timeline.json"))
    rows = read_rows(run / "metrics.jsonl").rows if (run / "metrics.jsonl").exists() else []
    return [{name: row[name] for name in row if STEP.fullmatch(name)} for row in rows]


def switches(run: Path, device: str) -> dict[str, float]:
    """Seconds of the last step's context switches, and their rate over that of a raw copy."""
    if not (run / "timeline.json").exists():  # it was stopped before it wrote one
        return {}
    plan = json.loads((run / "plan.json").read_text())
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    moves = [event for event in events if event.get("cat") == "switch"]
    last = max((event["args"]["step"] for event in moves), default=0)
    moves = [event for event in moves if event["args"]["step"] == last]
    seconds = sum(event["dur"] for event in moves) / 1e6
    num_bytes = sum(plan["placements"][event["args"]["worker"]]["state_bytes"] for event in moves)
    if not seconds or not num_bytes:
        return {"s of switches": seconds}
    raw = raw_on_gpu(1 << 30) if device == "cuda" else raw_on_cpu(64 << 20)
    rate, pinned = num_bytes / seconds / 1e9, statistics.mean(raw)
    shown = {"s of switches": seconds, "GB of switches": num_bytes / 1e9}
    return shown | {"switches, GB/s": rate, "switches over a raw copy": rate / pinned}


def of_trl(work: Work, model: Path, limit: float) -> dict[str, float]:
    """The same figures of TRL's side; of its first step alone if it is stopped in that."""
    found = dict[str, float]()
    python = os.environ.get("M2FLOW_TRL_PYTHON", sys.executable)
    with device_memory(found), (model.parent / "trl.log").open("w+") as log:
        began = time.time()  # which means the same in another process
        given = {**asdict(work), "model": str(model), "steps": work.steps + 1, "began": began}
        given["learning_rate"] = LEARNING_RATE
        try:
            answer = subprocess.run(
                [python, str(HERE / "trl_step.py")],
                input=json.dumps(given),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=True,
                env=environment(),
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return found | unfinished(work, log, time.time() - began)
        finally:
            log.seek(0)
            print(log.read()[-6000:], file=sys.stderr)
    done = json.loads(answer.stdout.splitlines()[-1])
    steps = slice(1, None)  # the first one warms up
    found["seconds/step"] = statistics.median(done["seconds"][steps])
    found["seconds/generator.generate"] = statistics.median(done["generation"][steps])
    found["samples/s"] = work.prompts * work.answers / found["seconds/step"]
    lengths = [length for step in done["lengths"][steps] for length in step]
    found["tokens of an answer"] = statistics.mean(lengths)
    return found


def unfinished(work: Work, log: TextIO, seconds: float) -> dict[str, float]:
    """What is known of TRL's steps when it is stopped after so many seconds."""
    log.seek(0)
    times = dict[str, float]()  # when something was said for the first time
    for line in log:
        if said := re.fullmatch(r"([\d.]+) s: (.*)\n", line):
            times.setdefault(said[2], float(said[1]))
    if (began := times.get("optimizer step 0 begins")) is None:
        return {"s, stopped before the first step": seconds}
    found = {"s of the first step, stopped": seconds - began}
    if "answers are there" in times:
        found["seconds/generator.generate, the first step"] = times["answers are there"] - began
    end = times.get(f"optimizer step {work.minibatches} begins")
    if end is not None:
        found["samples/s, the first step"] = work.prompts * work.answers / (end - began)
    else:
        found["samples/s at most"] = work.prompts * work.answers / (seconds - began)
    return found


def guessed(work: Work, model: Path, tokens: float) -> dict[str, float]:
    """What the analytic profile of this device expects of a collocated step, by phase.

    Args:
        tokens: of an answer in the mean, as measured: how long answers get no device decides.
    """
    name = torch.cuda.get_device_name()
    device = next((known for known in DEVICES if known.split("-")[0] in name), None)
    if device is None:
        return {}
    answer = subprocess.run(
        command(
            *("plan", *keys_of(work, model), "--mode", "collocated", "--json"),
            *("--cluster", f"1x1x{device}", "--prompt-tokens", str(PROMPT_TOKENS)),
            *("--answer-tokens", str(tokens)),
        ),
        check=True,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    predicted = json.loads(answer.stdout)["decision"]["predicted"]
    stages = {f"seconds/{stage}": seconds for stage, seconds in predicted["stages"].items()}
    return {"seconds/step": predicted["seconds"], **stages}


def targets_of(found: Mapping[str, Mapping[str, float]]) -> list[Target]:
    ours, theirs = found.get("collocated", {}), found.get("trl", {})
    targets = []
    if "samples/s" in ours and "samples/s" in theirs:
        ratio = ours["samples/s"] / theirs["samples/s"]
        targets.append(Target("samples/s against TRL", ratio, AGAINST_TRL))
    first = "samples/s, the first step"
    for theirs_name in (first, "samples/s at most"):
        if first in ours and theirs_name in theirs:
            ratio, words = ours[first] / theirs[theirs_name], "against TRL, of the first step"
            least = " at least" if theirs_name != first else ""
            targets.append(Target(f"samples/s {words}{least}", ratio, AGAINST_TRL))
    if "switches over a raw copy" in ours:
        share = ours["switches over a raw copy"]
        targets.append(Target("switches over a raw copy", share, OF_PINNED))
    return targets


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=tuple(WORK))
    parser.add_argument("--sides", nargs="+", default=["collocated"], choices=SIDES)
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="for each side")
    options = parser.parse_args()
    work = WORK[options.device]
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no GPU that PyTorch can use")
        sys.exit(2)
    if options.quick and options.device == "cuda":
        work = replace(work, prompts=16, mean=250, tokens=1024)
    config = PUBLISHED["Qwen2.5-1.5B"] if options.device == "cuda" else SMALL
    found: dict[str, dict[str, float]] = {}
    steps: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="m2flow-grpo-") as folder:
        model = Path(folder) / "model"
        share = write_model(config, work.mean, model, options.device)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        for side in options.sides:
            found[side] = (
                of_trl(work, model, options.seconds)
                if side == "trl"
                else of_m2flow(work, model, side, Path(folder), options.seconds)
            )
            if side != "trl":
                steps[side] = kept(Path(folder) / side, options.out)
            if options.out is not None:  # whoever is stopped in a later side keeps this one
                options.out.write_text(json.dumps({**found, "steps": steps}, indent=1))
            print(side, {name: round(value, 3) for name, value in found[side].items()}, flush=True)
        name = "tokens of an answer"
        tokens = [row[name] for row in found.values() if name in row]
        if options.device == "cuda" and tokens:
            found["guessed"] = guessed(work, model, tokens[0])
    names = list(dict.fromkeys(name for row in found.values() for name in row))
    table(["", *found], [[name, *(row.get(name, "") for row in found.values())] for name in names])
    where = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    results = {"device": where, "work": asdict(work), "end token": share, **found}
    results["steps"] = steps
    conclude("gpu/grpo_step", results, targets_of(found) if where != "cpu" else [], options)


if __name__ == "__main__":
    main()
