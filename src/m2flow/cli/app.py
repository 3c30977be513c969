"""The command line: `m2flow COMMAND`.

Exit codes: 0 done, 2 the input is wrong (one line on standard error), 128 + N ended by signal N,
1 anything else.
"""

from __future__ import annotations

import io
import math
import os
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from json import dumps as to_json
from pathlib import Path
from typing import Annotated

import typer

from m2flow import __version__
from m2flow.errors import CannotWrite, RunFailed, Stopped, UserError, is_there, suggestion

# Idle OpenMP threads must sleep, or two busy processes on two cores slow each other several times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(
    name="m2flow",
    pretty_exceptions_enable=False,
)


def _names(incomplete: str) -> list[str]:
    """Recipes whose names begin so, for the shell; files are the shell's own affair."""
    from m2flow.workloads.common.shipped import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


Recipe = Annotated[
    Path,
    typer.Argument(help="A recipe: a YAML file, or a name of m2flow's own.", autocompletion=_names),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace those of the recipe."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"m2flow {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Reinforcement learning of foundation models: write the step, m2flow plans and runs it."""


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    mode: Annotated[
        str | None,
        typer.Option(help="auto (try plans, keep the fastest), or eager, collocated, ..."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A plan file to run instead of the mode's.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is kept.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --run-dir.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, start nothing.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print the run directory at the end, and nothing else.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line: steps, notes, the end.")
    ] = False,
) -> None:
    """Train a recipe, from the start or from its last checkpoint."""
    from m2flow.observe.progress import AVERAGED, JsonLines, Quiet, summary
    from m2flow.observe.record import seconds_taken
    from m2flow.observe.run_directory import ends, first_and_last, read_metrics
    from m2flow.workloads import common
    from m2flow.workloads.common.resume import check_directory
    from m2flow.workloads.common.start import describe

    words = with_mode(overrides, mode, plan)
    if dry_run and (quiet or json):
        key = "--json" if json else "--quiet"
        raise UserError("changes nothing of --dry-run", key=key, hint="give one of the two")
    if dry_run:
        read = common.read_recipe(recipe, words)
        if resume or run_dir is not None:
            check_directory(read, run_dir, resume)
        print("\n".join(describe(read, plan)))
        return
    if quiet and json:
        raise UserError("--json says it all", key="--quiet", hint="give one of the two")
    shown = JsonLines() if json else Quiet() if quiet else None
    # What a reward or a library prints must not stand between lines that a program reads.
    with nullcontext() if shown is None else redirect_stdout(sys.stderr):
        try:
            path = common.train(
                recipe, words, plan=plan, run_dir=run_dir, resume=resume, progress=shown
            )
        except Stopped as error:
            print(f"stopped by {error}", file=sys.stderr)
            raise SystemExit(error.exit_code) from error
    rows = read_metrics(path)
    if shown is None:
        rewards = [one for row in rows if isinstance(one := row.get("reward/mean"), int | float)]
        window = ends(rewards)[2] if rewards else 1
        print(summary(*first_and_last(rows, AVERAGED), path, window, seconds_taken(rows)))
    else:
        shown.done(*first_and_last(rows), path)


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="A new folder, or an empty one.")]) -> None:
    """Write a project of one's own: a flow, a recipe, a reward, and a test of them."""
    from m2flow.workloads.common.shipped import write_project

    for path in write_project(folder):
        print(path)
    print(f"next: cd {shlex.quote(str(folder))} && m2flow train recipe.yaml")


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="One of them: print its YAML.")] = None,
) -> None:
    """List the recipes that come with m2flow, or print one of them."""
    from m2flow.workloads.common.shipped import about, shipped_recipes

    there = shipped_recipes()
    if name is not None and name not in there:
        raise UserError("there is no such recipe", key=name, hint=suggestion(name, there))
    if name is not None:
        print(there[name].read_text(encoding="utf-8"), end="")
        return
    width = max(map(len, there))
    room = max(20, shutil.get_terminal_size((100, 24)).columns - width - 2)
    for one, file in there.items():
        print(f"{one:<{width}}  {textwrap.shorten(about(file), room, placeholder=' …')}")


@app.command("plan")
def plan_command(
    recipe: Recipe,
    overrides: Overrides = None,
    mode: Annotated[
        str | None,
        typer.Option(help="auto (the planner chooses), collocated, disaggregated, hybrid, eager."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="A plan file to check, or to judge by a profile."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Lanes that need not exist, such as 16x8xH100: auto, by computed costs."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --cluster: a config.json, its folder, or a known model's name."),
    ] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(min=0, help="Steps that generation may run ahead; prints the frontier."),
    ] = None,
    prompt_tokens: Annotated[
        float | None, typer.Option(min=1, help="With --cluster: tokens of a prompt in the mean.")
    ] = None,
    answer_tokens: Annotated[
        float | None, typer.Option(help="With --cluster: tokens of an answer in the mean.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="A stored profile to plan from.")
    ] = None,
    reuse_profile: Annotated[
        bool, typer.Option("--reuse-profile", help="Take --profile even if it differs.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say in words what the plan does, and why it was chosen."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, with the choice explained.")
    ] = False,
) -> None:
    """Show how a recipe would be carried out, and why; start nothing."""
    from m2flow.cli.deciding import Question
    from m2flow.cli.plan import plan as show
    from m2flow.workloads.common import Assumed

    with_mode(overrides, mode, plan)  # refuses the two together
    if reuse_profile and profile is None:
        raise UserError("reuses nothing", key="--reuse-profile", hint="name it: --profile FILE")
    words = [*(overrides or [])]
    if max_staleness is not None:
        words.append(f"max_staleness={max_staleness}")
    asked = Question(
        mode=mode,
        plan_file=plan,
        cluster=cluster,
        assumed=Assumed(model, prompt_tokens, answer_tokens),
        profile_file=profile,
        reuse=reuse_profile,
    )
    show(recipe, words, asked, explain=explain, as_json=json)


@app.command("profile")
def profile_command(
    recipe: Recipe,
    overrides: Overrides = None,
    lanes: Annotated[str | None, typer.Option(help="Lanes, such as cpu:2.")] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds for all of it: by default what the recipe says, 60 or 300."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write it to this file.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure though it is known.")] = False,
) -> None:
    """Measure how long the stages of a recipe take on this machine."""
    from m2flow.cli.profile import profile as run

    words = [*(overrides or []), *([f"lanes={lanes}"] if lanes else [])]
    run(recipe, words, budget=budget, out=out, again=again)


@app.command("eval")
def evaluate(
    model: Annotated[Path, typer.Argument(help="A checkpoint or a Hugging Face folder.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Problems as JSON lines, Parquet or CSV, several one after another; for a policy "
            "none, or the recipe of a published one."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers drawn for each problem.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0 is greedy; by default 0 for one sample and 1 for several."),
    ] = None,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many likeliest tokens.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(min=1e-6, max=1, help="Draw from the fewest of this probability together."),
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0, max=1, help="Draw from those so likely beside the likeliest.")
    ] = 0.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest answer, in tokens; by default that of the run MODEL is from, else 4096 "
            "or half of the model's context.",
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="native, vllm or sglang.")] = "native",
    dtype: Annotated[
        str | None, typer.Option(help="What is computed in, as generation.dtype of a recipe.")
    ] = None,
    cache_gb: Annotated[
        float | None,
        typer.Option(min=1e-6, help="GB for keys and values, as generation.cache_gb of a recipe."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="How lanes share a large model, such as tp4; else each holds all of it."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="A string or special token that ends an answer; may be said again. By default "
            "those of the run MODEL is from."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="What scores answers, such as code or module:function; by default what the run "
            "MODEL is from has trained by, if that is one function, else math."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many problems, or episodes.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Fixes what is sampled.")] = 0,
    question_column: Annotated[
        str | None,
        typer.Option(help="Column of the question, such as prompt; as data.question_column."),
    ] = None,
    answer_column: Annotated[
        str | None,
        typer.Option(
            help="Column of the right answer, such as reward_model.ground_truth; as "
            "data.answer_column."
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="The prompt, with {question} in it; by default that of the run MODEL is from."
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            help="Use the model's chat template; by default as the run MODEL is from did, else "
            "where it has one."
        ),
    ] = None,
    system_prompt: Annotated[
        str | None,
        typer.Option(
            help="What stands before the question in the chat template; by default that of the run "
            "MODEL is from."
        ),
    ] = None,
    chat_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A variable of the chat template, such as enable_thinking=false; may be said "
            "again. By default those that the run MODEL is from has trained with.",
        ),
    ] = None,
    lanes: Annotated[str, typer.Option(help="Lanes, such as cpu:2.")] = "auto",
    deadline_seconds: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            help="Longest that one call may take; by default that of the recipe, or of the run "
            "MODEL is from, else 600.",
        ),
    ] = None,
    on_bad_row: Annotated[str, typer.Option(help="fail or skip.")] = "fail",
    workload: Annotated[
        str | None,
        typer.Option(
            help="Whose way of examining; by default that of the recipe in --data, of the workload "
            "that reads problems, or of the run MODEL is from."
        ),
    ] = None,
    json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="A table in Markdown, one row for each data set.")
    ] = False,
) -> None:
    """Accuracy and pass@k of a model on problems with known answers, or success of a policy."""
    from m2flow.cli.examining import chat_options, figure_lines, markdown_table
    from m2flow.generation.supported import ENGINES
    from m2flow.plan import parse_lanes
    from m2flow.workloads.common import Examination, workload_named
    from m2flow.workloads.common.examining import examiner_of
    from m2flow.workloads.common.resume import check_model

    if data is None or is_there(model):  # of a published policy MODEL may be the word "tiny"
        check_model(model)
    for option, number in {
        "--temperature": temperature,
        "--top-p": top_p,
        "--min-p": min_p,
        "--cache-gb": cache_gb,
        "--deadline-seconds": deadline_seconds,
    }.items():
        if number is not None and not math.isfinite(number):
            raise UserError("is not finite", key=option, value=number)
    if on_bad_row not in ("fail", "skip"):
        raise UserError("is unknown", key="--on-bad-row", value=on_bad_row, expected="fail or skip")
    if engine not in ENGINES:
        expected = " or ".join(ENGINES)
        raise UserError("is unknown", key="--engine", value=engine, expected=expected)
    if json and markdown:
        raise UserError("is another form than --json", key="--markdown", hint="give one of the two")
    if stop and not all(stop):
        raise UserError("is empty", key="--stop", expected="a string that ends an answer")
    files: Sequence[Path | None] = data or (None,)
    examiners = [
        workload_named(workload) if workload else examiner_of(model, file) for file in files
    ]
    asked = Examination(
        model,
        None,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        engine=engine,
        dtype=dtype,
        cache_gb=cache_gb,
        layout=layout,
        stop=None if stop is None else tuple(stop),
        reward=reward,
        limit=limit,
        seed=seed,
        question_column=question_column,
        answer_column=answer_column,
        template=template,
        chat=chat,
        system_prompt=system_prompt,
        chat_options=chat_options(chat_option),
        lanes=parse_lanes(lanes),
        skip_bad_rows=on_bad_row == "skip",
        deadline_seconds=deadline_seconds,
    )
    # What a reward or a library prints must not stand in what a program reads.
    with redirect_stdout(sys.stderr) if json or markdown else nullcontext():
        found = [
            examiner.examine(replace(asked, data=file))
            for examiner, file in zip(examiners, files, strict=True)
        ]
    if json:
        print(to_json(found if len(found) > 1 else found[0]))
    elif markdown:
        print("\n".join(markdown_table(found)))
    else:
        print("\n".join(line for figures in found for line in figure_lines(figures)))


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Write report.html from what a run directory holds."""
    from m2flow.observe.ending import record_of
    from m2flow.observe.report import write_report

    record_of(run_dir)  # refuses what is no run
    print(write_report(run_dir))


@app.command()
def dash(
    run_dirs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN_DIR]...", help="Run directories; by default the newest in runs/."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any.")] = 0,
) -> None:
    """Show runs side by side in a browser, live, on this machine alone."""
    from m2flow.observe.dashboard import Dashboard
    from m2flow.observe.dashboard.following import runs_in

    folders = run_dirs or runs_in(Path("runs"), most=8)
    if not folders:
        raise UserError("no run to show", key="runs/", hint="name run directories: m2flow dash DIR")
    with Dashboard(folders, port) as dashboard:
        print(f"{dashboard.url}\nCtrl-C ends it.", flush=True)
        try:
            dashboard.wait()
        except KeyboardInterrupt:
            print("Ended.")


@app.command()
def doctor(
    run_dir: Annotated[
        Path | None,
        typer.Argument(help="A run directory: say what became of the run, and what to do."),
    ] = None,
    json: Json = False,
    links: Annotated[
        bool,
        typer.Option(
            "--links",
            help="Measure the ways between lanes instead: here, or across `RAY_ADDRESS`.",
        ),
    ] = False,
) -> None:
    """What this machine has, what is missing, and what mends it; or what became of a run."""
    from m2flow.cli.doctor import run_doctor, run_links

    if run_dir is not None:
        if links:
            raise UserError("is of this machine, and not of a run", key="--links")
        from m2flow.observe.ending import ending_of

        ending = ending_of(run_dir)
        print(to_json(asdict(ending)) if json else "\n".join(ending.lines))
        return

    raise typer.Exit(run_links(as_json=json) if links else run_doctor(as_json=json))


def with_mode(overrides: list[str] | None, mode: str | None, plan: Path | None = None) -> list[str]:
    """The overrides, with `--mode` as one of them; no mode may stand beside a plan."""
    written = next((one for one in overrides or [] if one.startswith("mode=")), None)
    if (mode or written) and plan:
        raise UserError(
            f"--plan {plan} says how to run already",
            key="--mode" if mode else "mode",
            value=mode or (written or "").removeprefix("mode="),
            hint="give one of the two",
        )
    return [*(overrides or []), *([f"mode={mode}"] if mode else [])]


CommandLineError: type[typer.BadParameter] = typer.BadParameter.__mro__[2]
"""Base of what Typer raises for words it cannot read; Click's or its own copy, by its version."""

INTERRUPTED = 130


def main() -> None:
    """Entry point: runs a command, and turns errors into exit codes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII alone shows a `?`
    is_training = "train" in sys.argv[1:2]
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except CommandLineError as error:
        print(f"error: {in_one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except RunFailed as error:
        cause = next((one for one in causes(error) if isinstance(one, CannotWrite)), None)
        what = "the run failed" if is_training else "failed"
        again = ", go on with --resume" if cause and is_training else ""
        print(f"{what}: {cause or first_cause(error)}{again}", file=sys.stderr)
        raise SystemExit(1) from error
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        print(f"failed: {first_cause(error)}", file=sys.stderr)
        traceback.print_exception(error)
        raise SystemExit(1) from error
    if code == INTERRUPTED:
        again = "; --resume goes on from the last checkpoint, if there is one"
        print(f"interrupted{again if is_training else ''}", file=sys.stderr)
    raise SystemExit(code or 0)


def in_one_line(error: typer.BadParameter) -> str:
    """What Typer could not read, and where to look."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if error.ctx is None:
        return f"{message}; see `m2flow --help`"
    if message.startswith("No such option") and (word := getattr(error, "option_name", "")):
        params = error.ctx.command.params
        options = [name for param in params for name in param.opts if name.startswith("-")]
        message = f"{word}: no such option; {suggestion(word, options or ['--help'])}"
        if any(param.name == "overrides" for param in params):
            key = word.strip("-").replace("-", "_")
            message += f"; keys of the recipe are given as {key}=VALUE"
    return f"{message}; see `{error.ctx.command_path} --help`"


def causes(error: BaseException) -> list[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    found = [error]
    while found[-1].__cause__ is not None:
        found.append(found[-1].__cause__)
    return found


def first_cause(error: BaseException) -> str:
    """The first thing that went wrong, then how it came up to here."""
    lines = []
    for cause in reversed(causes(error)):
        lines.append(f"{type(cause).__name__}: {cause}")
        lines += getattr(cause, "__notes__", [])
    return "\n".join(lines)
