"""What the documentation says is there: files, links, commands, keys, plans, and code that runs."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer
import yaml

import m2flow
from m2flow.cli.app import app
from m2flow.engine.plan import EdgePlan, LaneSpec, Placement, Plan, StagePlan
from m2flow.environments.registry import FAMILIES
from m2flow.observe.progress import Quiet
from m2flow.observe.run_directory import read_metrics
from m2flow.plan import validate
from m2flow.plan.file import from_json
from m2flow.workloads.common import train
from m2flow.workloads.common.planning import flow_of
from m2flow.workloads.common.reading import read_recipe, validated
from m2flow.workloads.common.shipped import recipe_file
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.named import check_task, task_of

PROJECT = Path(__file__).resolve().parents[1]
README = PROJECT / "README.md"
DOCS = [README, *sorted((PROJECT / "docs").rglob("*.md")), PROJECT / "recipes" / "README.md"]
PAGES = [*DOCS, PROJECT / "CONTRIBUTING.md", PROJECT / "AGENTS.md"]
QUICKSTART = PROJECT / "recipes" / "quickstart.yaml"

FENCE = re.compile(
    r"^(?P<mark><!-- runnable -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
QUOTED = re.compile(r"`([^`\n]+)`")
PATH_IN_REPOSITORY = re.compile(
    r"(?:src|docs|examples|recipes|benchmarks|tests)/[\w./-]*\w|Makefile|constraints\.txt"
)
GENERATED_HERE = re.compile(r"benchmarks/results/.*")
LANGUAGES = {"python", "sh", "yaml", "json", "text"}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    body: str
    runnable: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(PROJECT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, match.start()) + 1,
            match["language"],
            match["body"],
            match["mark"] is not None,
        )
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for page in DOCS for block in blocks_of(page)]


def in_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def prose_of(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text())


# --- links and files ------------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose_of(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert target.is_relative_to(PROJECT), f"{page.name} links out of the repository: {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_files_that_are_named_exist(page: Path) -> None:
    for quoted in QUOTED.findall(prose_of(page)):
        path = quoted.rstrip("/")
        if PATH_IN_REPOSITORY.fullmatch(path) and not GENERATED_HERE.fullmatch(path):
            assert (PROJECT / path).exists(), f"{page.name} names {quoted}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_tests_that_are_named_exist(page: Path) -> None:
    for path, name in TESTS.findall(page.read_text()):
        found = re.search(rf"^ *def {name}\(", (PROJECT / path).read_text(), re.MULTILINE)
        assert found, f"{path} has no {name}"


TESTS = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


DEFECTS = PROJECT / "docs" / "explanation" / "defects.md"


def test_each_loud_failure_of_the_field_has_its_test() -> None:
    _, _, section = DEFECTS.read_text().partition("## Loud failures\n")
    table, _, _ = section.partition("## ")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 8
    assert all(TESTS.search(row) for row in rows)


def test_defects_seen_elsewhere_have_their_tests() -> None:
    rows = [line for line in DEFECTS.read_text().splitlines() if line.startswith("| ")]
    defects = [row for row in rows if not row.startswith(("| failure |", "| what |"))]
    assert len(defects) > 60
    for row in defects:
        assert "`tests/" in row, row


def test_docstrings_name_what_they_speak_of() -> None:
    """Who sees one alone, in a help text or an editor, knows no docstring before it."""
    begins = re.compile(r"(The same|Those|Of these|Of those)\b")
    found = [
        f"{path.relative_to(PROJECT)}:{node.lineno}: {node.value.value.splitlines()[0]}"
        for path in sorted((PROJECT / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and begins.match(node.value.value)
    ]
    assert not found


def test_every_page_is_listed_in_the_index() -> None:
    index = PROJECT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text())}
    pages = {page for page in DOCS if page.is_relative_to(index.parent) and page != index}
    assert pages <= linked, f"not in docs/index.md: {sorted(pages - linked)}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for target in re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(), re.M):
            assert target in targets, f"{page.name}: make {target}"


def test_what_bench_quick_runs_has_a_short_version() -> None:
    """It ran a process of another benchmark by itself, and could not succeed."""
    asked = ["make", "-s", "--eval=told: ; @echo $(BENCHMARKS)", "told"]
    told = subprocess.run(asked, cwd=PROJECT, capture_output=True, text=True, check=True)
    scripts = told.stdout.split()
    assert "benchmarks/auto.py" in scripts
    for script in scripts:
        text = (PROJECT / script).read_text()
        assert "__main__" in text, script
        assert "quick" in text or "arguments(" in text, script


def test_the_reference_counts_optimizer_steps_as_recipes_do() -> None:
    page = (PROJECT / "docs" / "reference" / "recipe.md").read_text()
    (line,) = re.findall(r"^\| optimizer steps of the run \| (.*) \|$", page, re.M)
    recipe = read_recipe("quickstart", {"algorithm.epochs": 3})
    assert isinstance(recipe, ReasoningRecipe)
    sizes = {"steps": recipe.steps, "minibatches": recipe.minibatches, "algorithm.epochs": 3}
    product = 1
    for key in re.findall(r"`([^`]+)`", line):
        product *= sizes[key]
    assert product == recipe.derived()["optimizer_steps"]


def test_the_extra_of_every_simulator_can_be_found() -> None:
    text = "\n".join(page.read_text() for page in DOCS)
    named = {one for some in re.findall(r"m2flow\[([\w,-]+)\]", text) for one in some.split(",")}
    assert {family.extra for family in FAMILIES.values()} <= named


def test_what_ci_runs_is_said() -> None:
    """The script of CI and the two pages that say what it runs name the same targets in order."""
    runs = re.findall(r"\bmake ([a-z-]+)(?:; fi)?$", (PROJECT / ".ci" / "run").read_text(), re.M)
    assert runs == ["test", "test-browser", "test-sandbox", "test-simulators", "test-vllm"]
    for page in ("AGENTS.md", "CONTRIBUTING.md"):
        lines = (PROJECT / page).read_text().splitlines()
        said = [line for line in lines if "what CI runs" in line]
        assert [re.findall(r"make ([a-z-]+)", line) for line in said] == [[one] for one in runs]


def test_the_newest_release_in_the_changelog_is_this_version() -> None:
    heads = re.findall(r"^## \[(.+?)\](.*)$", (PROJECT / "CHANGELOG.md").read_text(), re.M)
    assert heads[0] == ("Unreleased", "")
    version, date = heads[1]
    assert version == m2flow.__version__
    assert re.fullmatch(r" - \d{4}-\d{2}-\d{2}", date)


# --- commands -------------------------------------------------------------------------------------

GROUP: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = GROUP.commands
OPTIONS = {name for param in GROUP.params for name in param.opts}


def words_of_commands(script: str) -> Iterator[list[str]]:
    """The words behind `m2flow` of each such command in a shell script.

    What a command within `$(...)` would print is left out.
    """
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(re.sub(r"\$\([^()]*\)", "", line), comments=True)
        if words[-3:-1] == ["sh", "-c"]:
            yield from words_of_commands(words[-1])
            continue
        words = list(itertools.dropwhile(lambda word: re.match(r"\w+=|exec$", word), words))
        words = list(itertools.takewhile(lambda word: word not in {">", "|", "&&"}, words))
        if words and Path(words[0]).name == "m2flow":
            yield words[1:]


def check_command(words: list[str], where: object, *, complete: bool) -> None:
    """Parse the words as the command line would, without running anything."""
    if words[0] in OPTIONS:
        return
    assert words[0] in COMMANDS, f"{where}: there is no command {words[0]!r}"
    command = COMMANDS[words[0]]
    known = {name for param in command.params for name in param.opts} | {"--help"}
    for word in words[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{where}: {words[0]} has no option {word}"
    if complete:
        context = command.make_context(words[0], list(words[1:]))
        if "overrides" in context.params:
            recipe = recipe_file(Path(context.params["recipe"] or ""), PROJECT)  # or --replay
            existing = recipe if recipe.is_file() else QUICKSTART  # one that the reader writes
            read_recipe(existing, context.params["overrides"] or [])


@pytest.mark.parametrize("block", in_language("sh"), ids=str)
def test_commands_in_blocks_parse(block: Block) -> None:
    for words in words_of_commands(block.body):
        check_command(words, block, complete=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_commands_in_the_text_exist(page: Path) -> None:
    for quoted in QUOTED.findall(prose_of(page)):
        for words in words_of_commands(quoted):
            if words and words[0] != "COMMAND":
                check_command(words, page.name, complete=False)


def test_commands_are_found() -> None:
    """Else the tests above would hold whatever the pages say."""
    commands = [w for block in in_language("sh") for w in words_of_commands(block.body)]
    assert {words[0] for words in commands} == set(COMMANDS)


# --- code, recipes and plans ----------------------------------------------------------------------


def test_blocks_name_their_language() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block}: language {block.language!r}"


@pytest.mark.parametrize("block", in_language("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.body, str(block), "exec")


@pytest.mark.parametrize("block", [b for b in in_language("python") if b.runnable], ids=str)
def test_runnable_python_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.body)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_the_problems_of_the_tutorial_suffice_for_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = [b for b in BLOCKS if b.page.name == "tutorial.md" and "problems.jsonl" in b.body]
    problems, recipe, _ = own
    subprocess.run([sys.executable, "-c", problems.body], check=True, timeout=600)
    Path("mine.yaml").write_text(recipe.body)
    read = read_recipe("mine.yaml", {"model": {}})
    assert isinstance(read, ReasoningRecipe)
    check_task(read, task_of(read))


def for_kubernetes(block: Block) -> bool:
    return block.body.startswith("apiVersion:")


@pytest.mark.parametrize(
    "block", [b for b in in_language("yaml") if not for_kubernetes(b)], ids=str
)
def test_yaml_is_a_recipe(block: Block) -> None:
    validated(yaml.safe_load(block.body))


@pytest.mark.parametrize("block", [b for b in in_language("yaml") if for_kubernetes(b)], ids=str)
def test_kubernetes_runs_a_command_of_ours(block: Block) -> None:
    (words,) = words_of_commands(yaml.safe_load(block.body)["spec"]["entrypoint"])
    check_command(words, block, complete=True)


@pytest.mark.parametrize("block", in_language("json"), ids=str)
def test_json_is_a_plan_for_the_quick_start(block: Block) -> None:
    recipe = read_recipe(QUICKSTART)
    plan = from_json(Plan, block.body, str(block))
    validate(plan, flow_of(recipe).trace(), recipe.prompts_per_step)


def calls_in(tree: ast.AST, method: str) -> list[str]:
    """What a method of the tree's first class that has it calls, in order."""
    function = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == method
    )
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [ast.unparse(call.func) for call in sorted(calls, key=lambda call: call.lineno)]


def test_the_flow_of_the_readme_is_the_real_one() -> None:
    (block,) = (block for block in blocks_of(README) if block.body.startswith("class GRPO"))
    source = (PROJECT / "src" / "m2flow" / "workloads" / "reasoning" / "flow.py").read_text()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    real = ast.Module([classes["GRPO"], classes["PolicyGradient"]], [])  # with what it inherits
    shown = ast.parse(block.body)
    for method in ("step", "sync"):
        remaining = iter(calls_in(real, method))
        for call in calls_in(shown, method):
            assert call in remaining, f"GRPO.{method} in README.md calls {call} out of place"
    assert ast.get_docstring(classes["GRPO"]) == ast.get_docstring(shown.body[0])  # type: ignore[arg-type]


# --- figures ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generate_figures() -> ModuleType:
    return script_of_docs("generate_figures")


def test_measured_tables_are_those_of_the_results(generate_figures: ModuleType) -> None:
    for page in generate_figures.PAGES:
        assert page.read_text() == generate_figures.up_to_date(page), (
            f"{page.relative_to(PROJECT)}: run: python docs/generate_figures.py"
        )


def test_every_measured_table_is_shown_and_none_is_typed(generate_figures: ModuleType) -> None:
    shown = {
        name
        for page in generate_figures.PAGES
        for _, name, _, _ in generate_figures.MARKED.findall(page.read_text())
    }
    assert shown == set(generate_figures.TABLES)
    marks = {page for page in DOCS if "<!-- figures:" in page.read_text()}
    assert marks == set(generate_figures.PAGES)
    assert all(
        len(re.findall("<!-- figures:", page.read_text()))
        == len(generate_figures.MARKED.findall(page.read_text()))
        for page in marks
    )


def test_a_figure_that_was_changed_by_hand_is_found(generate_figures: ModuleType) -> None:
    """Else the tests above would hold whatever the pages say."""
    page = next(page for page in generate_figures.PAGES if page.name == "measured.md")
    found = generate_figures.MARKED.search(page.read_text())
    assert found is not None
    figures = [float(text) for text in re.findall(r"\| (\d\.\d\d) \|", found[3])]
    results = generate_figures.read("quickstart_modes")["results"]["against_eager"]
    assert figures == [round(value, 2) for value in results.values()]


# --- reference ------------------------------------------------------------------------------------


def script_of_docs(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PROJECT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate_reference() -> ModuleType:
    return script_of_docs("generate_reference")


@pytest.mark.parametrize("name", ["recipe keys", "commands"])
def test_generated_reference_is_up_to_date(generate_reference: ModuleType, name: str) -> None:
    page: Path = generate_reference.PAGES[name][0]
    assert page.read_text() == generate_reference.up_to_date(name), (
        "run: python docs/generate_reference.py"
    )


def test_plan_reference_names_every_key() -> None:
    page = (PROJECT / "docs" / "reference" / "plan.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \| (\S+) ", page, re.M)
    kinds = (Plan, LaneSpec, Placement, StagePlan, EdgePlan)
    actual = [(f.name, _default_of(f)) for kind in kinds for f in dataclasses.fields(kind)]
    assert documented == actual


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory())}`"
    if field.default is dataclasses.MISSING:
        return "required"
    value = field.default
    return f"`{json.dumps(int(value) if value == 600.0 else value)}`"


def test_metrics_reference_names_every_figure() -> None:
    """What a step gives, asked of the functions that give it, with every option on."""
    from m2flow.algorithms.grpo import GRPOLoss
    from m2flow.flow import Batch
    from m2flow.training.policy import _TOTALS
    from m2flow.workloads.reasoning.experiment import sample_figures

    samples = Batch(
        {
            "reward": [0.0, 1.0],
            "failure": ["", ""],
            "finish_reason": ["stop", "length"],
            "num_tokens": [3, 4],
            "num_prompt_tokens": [2, 2],
        }
    )
    figures = {*sample_figures(samples, 2)}
    totals = {name for name in _TOTALS if name.startswith(("tokens", "samples"))}
    learner = {*GRPOLoss(kl_coefficient=0.1, entropy_coefficient=0.1).figures, *totals}
    figures |= {f"train/{name}" for name in learner}
    page = (PROJECT / "docs" / "reference" / "metrics.md").read_text()
    missing = {name for name in figures if f"`{name}`" not in page}
    assert not missing, f"docs/reference/metrics.md does not name {sorted(missing)}"


SMALL_RUNS = {
    "reasoning": (
        "quickstart",
        {
            "steps": 1,
            "prompts_per_step": 2,
            "warmup.steps": 2,
            "evaluation.problems": 2,
            "algorithm.kl_coefficient": 0.1,
            "algorithm.entropy_coefficient": 0.1,
            "training.recompute_logprobs": True,
        },
    ),
    "reasoning, with a critic": (
        "ppo_quickstart",
        {"steps": 1, "prompts_per_step": 2, "warmup.steps": 2, "evaluation.problems": 2},
    ),
    "reasoning, drawn again": (
        "quickstart",
        {
            "steps": 1,
            "prompts_per_step": 2,
            "warmup.steps": 2,
            "evaluation.problems": 0,
            "algorithm.name": "dapo",
        },
    ),
    "embodied": (
        "quickstart-embodied",
        {
            "steps": 1,
            "rollouts_per_step": 2,
            "policy.features": 8,
            "rollout.horizon": 4,
            "update.epochs": 1,
            "update.minibatches": 1,
            "evaluation.episodes": 1,
            "evaluation.films": 0,
        },
    ),
    "embodied, in groups": (
        "quickstart-embodied",
        {
            "steps": 1,
            "rollouts_per_step": 2,
            "policy.features": 8,
            "rollout.horizon": 4,
            "rollout.automatic_reset": False,
            "update.minibatches": 1,
            "evaluation.episodes": 0,
            "algorithm": {"name": "grpo", "group_size": 2, "success_bounds": [0.0, 1.0]},
        },
    ),
    "embodied, with replay": (
        "sac-mlp-pendulum",
        {
            "steps": 2,
            "rollouts_per_step": 2,
            "rollout.horizon": 8,
            "replay.begin": 4,
            "replay.batch_size": 4,
            "replay.updates": 1,
            "evaluation.episodes": 1,
            "evaluation.films": 0,
        },
    ),
}


@pytest.mark.parametrize("kind", SMALL_RUNS)
def test_metrics_reference_names_what_runs_write(kind: str, tmp_path: Path) -> None:
    recipe, options = SMALL_RUNS[kind]
    run_dir = train(
        recipe, {**options, "mode": "eager"}, run_dir=tmp_path / "run", progress=Quiet()
    )
    written = {key for row in read_metrics(run_dir) for key in row}
    assert len(written) > 20
    named = {re.sub(r"^(seconds/)(?!step$)[\w.#]+$", r"\1<stage>", key) for key in written}
    named = {re.sub(r"^publish/\w+/", "publish/<worker>/", key) for key in named}
    page = (PROJECT / "docs" / "reference" / "metrics.md").read_text()
    missing = {name for name in named if f"`{name}`" not in page}
    assert not missing, f"docs/reference/metrics.md does not name {sorted(missing)}"
