"""`m2flow plan` with a planner: clusters that are not here, profiles, choices explained."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2flow.plan import validate
from m2flow.plan.file import to_json
from m2flow.plan.profile import Profile
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import parse_cluster
from m2flow.workloads.common.planning import flow_of, lanes_of
from m2flow.workloads.common.profile_key import profile_key
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.reasoning.work import prices

M2flow = Callable[..., Any]

HEAVY = ("generator", "learner")

CONFIG = {
    "model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 704, "vocab_size": 1000,
}  # fmt: skip


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("m2flow.plan.lanes.available_cores", lambda: (0, 1))
    monkeypatch.setenv("M2FLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def profile_for(recipe_path: Path, *words: str) -> Profile:
    """A profile as if it had been measured on the recipe's lanes."""
    recipe = read_recipe(recipe_path, words)
    graph = flow_of(recipe).trace()
    cluster = parse_cluster("1x2xCPU")
    computed = analytic_profile(graph, cluster, prices(recipe, graph), recipe.prompts_per_step)
    key = profile_key(recipe, lanes_of(recipe))
    return Profile(computed.stages, computed.workers, computed.publish, computed.links, key=key)


def test_lanes_of_which_nothing_is_known_yet(tiny: Path, m2flow: M2flow) -> None:
    """A run begins with a guess: that is the plan that is shown."""
    tiny.write_text(tiny.read_text().replace("mode: eager\n", ""))
    outcome = m2flow("plan", tiny, "--json", "lanes=cpu:2")
    assert outcome.code == 0
    assert json.loads(outcome.out)["mode"] == "collocated"
    assert "nothing is known of these lanes yet: a run begins collocated" in outcome.err
    assert "collocated" in m2flow("plan", tiny, "--explain", "lanes=cpu:2").out


# --- clusters -------------------------------------------------------------------------------------


def test_a_cluster_that_is_not_here(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--cluster", "1x2xCPU")
    assert (outcome.code, outcome.err) == (0, "")
    for part in (
        "2 lanes", "bottleneck: ", "runner-up: ", "profile that is analytic",
        "assumed, as nothing was measured:", "prompts of 4 tokens", "answers of 3 tokens",
    ):  # fmt: skip
        assert part in outcome.out, part
    assert "Gantt" not in outcome.out
    assert "switching  " not in outcome.out  # the table comes with --explain


def test_two_sorts_of_accelerators(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--cluster", "1x2xH100+1x2xL40S", "--json")
    plan = outcome.plan
    assert [lane.kind for lane in plan.lanes] == ["h100", "h100", "l40s", "l40s"]
    Path("plan.json").write_text(outcome.out)
    assert m2flow("plan", tiny, "--plan", "plan.json", "--json").code == 0


def test_a_model_larger_than_a_lane_generates_on_several(tiny: Path, m2flow: M2flow) -> None:
    """66 GB of weights on accelerators of 48 GB."""
    model = ("--model", "Qwen2.5-32B")
    plan = m2flow("plan", tiny, "--cluster", "4x8xL40S", *model, "--json").plan
    spot = plan.placements["generator"]
    machines = {lane.id: lane.node for lane in plan.lanes}
    assert {len(gang) for gang in spot.replicas} <= {2, 4, 8}
    assert all(len({machines[lane] for lane in gang}) == 1 for gang in spot.replicas)
    outside = 2 * 2 * 152_064 * 5_120  # embedding and head, which each lane has
    layers = (65.5e9 - outside) / len(spot.replicas[0])
    assert spot.state_bytes == pytest.approx(outside + layers, rel=0.01)
    refused = m2flow("plan", tiny, "--cluster", "1x1xL40S", *model)
    assert refused.code == 2
    assert refused.error.startswith(
        "--cluster: generator.generate of Qwen2.5-32B fits on no 1 lane"
    )
    assert refused.error.endswith("expected more lanes, such as 4x8xL40S")


def test_vllm_stands_on_single_lanes(tiny: Path, m2flow: M2flow) -> None:
    """It need not be installed where the plan is made."""
    words = ("generation.engine=vllm", "--cluster", "4x8xL40S", "--model")
    plan = m2flow("plan", tiny, *words, "Qwen2.5-7B", "--json").plan
    assert {len(gang) for gang in plan.placements["generator"].replicas} == {1}
    refused = m2flow("plan", tiny, *words, "Qwen2.5-32B")
    assert refused.code == 2
    assert refused.error.startswith("--cluster: generator.generate of Qwen2.5-32B fits on no")
    assert "no number of such lanes would do" in refused.error


def test_the_choice_explained(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--cluster", "1x2xCPU", "--explain")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.isascii()  # it is no terminal
    for part in ("G generator.generate", "T learner.train", "what would change"):
        assert part in outcome.out, part


def test_the_json_is_a_plan_that_can_be_run(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--cluster", "1x2xCPU", "--json", "deadline_seconds=77")
    assert (outcome.code, outcome.err) == (0, "")
    document = json.loads(outcome.out)
    plan = outcome.plan
    validate(plan, flow_of(read_recipe(tiny)).trace(), 4)
    assert plan.deadline_seconds == 77
    assert plan.predicted_seconds == document["decision"]["predicted"]["seconds"]
    assert document["decision"]["source"] == "analytic"
    Path("plan.json").write_text(outcome.out)
    assert m2flow("plan", tiny, "--plan", "plan.json", "--explain").code == 0


def test_json_and_words_together(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--cluster", "1x2xCPU", "--json", "--explain")
    assert json.loads(outcome.out)["decision"]["title"] in outcome.err


def test_a_mode_that_the_user_wants(tiny: Path, m2flow: M2flow) -> None:
    best = json.loads(m2flow("plan", tiny, "--cluster", "1x2xCPU", "--json").out)
    for words in (["--mode", "disaggregated"], ["mode=disaggregated"]):
        outcome = m2flow("plan", tiny, *words, "--cluster", "1x2xCPU", "--json")
        asked = json.loads(outcome.out)
        assert asked["mode"] == "disaggregated"
        seconds = asked["decision"]["predicted"]["seconds"]
        assert seconds >= 0.98 * best["decision"]["predicted"]["seconds"]
        others = [one["mode"] for one in asked["decision"]["runners_up"]]
        assert best["mode"] in others


def test_a_plan_of_the_users_own_is_judged(tiny: Path, m2flow: M2flow) -> None:
    words = ["plan", tiny, "lanes=cpu:2", "--mode", "hybrid", "--json"]
    Path("mine.json").write_text(m2flow(*words).out)
    outcome = m2flow("plan", tiny, "--cluster", "1x2xCPU", "--plan", "mine.json", "--json")
    judged = json.loads(outcome.out)
    assert judged["mode"] == "hybrid"
    assert judged["decision"]["predicted"]["seconds"] > 0
    assert judged["decision"]["runners_up"]


def test_what_a_plan_of_the_users_own_leaves_out_is_filled_in(m2flow: M2flow) -> None:
    """Without sizes it was judged as if states took no memory, and moved in no time."""
    words = ["plan", "qwen2.5-7b-ppo-math", "prompts_per_step=16", "--cluster", "1x8xH100"]
    plan = json.loads(m2flow(*words, "--json").out)
    plan["stages"]["verifier.score"]["chunk"] = 3  # it is not one of the planner's own
    Path("whole.json").write_text(json.dumps(plan))
    for spot in plan["placements"].values():
        spot |= {"state_bytes": 0, "working_bytes": 0}
    for lane in plan["lanes"]:
        del lane["memory_bytes"]
    Path("bare.json").write_text(json.dumps(plan))
    whole, bare = (
        json.loads(m2flow(*words, "--plan", f"{name}.json", "--json").out)
        for name in ("whole", "bare")
    )
    assert bare["decision"]["predicted"] == whole["decision"]["predicted"]
    assert bare["decision"]["predicted"]["terms"]["switching"] > 0
    assert min(bare["placements"][name]["state_bytes"] for name in HEAVY) > 0
    assert bare["lanes"] == whole["lanes"]


def test_a_plan_of_the_users_own_for_other_lanes_is_refused(tiny: Path, m2flow: M2flow) -> None:
    Path("mine.json").write_text(m2flow("plan", tiny, "--cluster", "2x8xH100", "--json").out)
    for cluster, lacking in (("1x8xH100", 8), ("2x4xH100", 4), ("1x16xCPU", 8)):
        refusal = m2flow("plan", tiny, "--cluster", cluster, "--plan", "mine.json").error
        assert refusal.startswith(f"--plan: the cluster lacks {lacking} of the plan's gpu lanes on")
        assert refusal.endswith(f"(got '16 lanes'); expected lanes of {cluster}")


def test_a_plan_of_the_users_own_that_cannot_run_says_why(m2flow: M2flow) -> None:
    words = ["plan", "qwen2.5-7b-grpo-math", "prompts_per_step=16", "--cluster", "1x8xH100"]
    plan = json.loads(m2flow(*words, "--json").out)
    learner = plan["placements"]["learner"]
    learner |= {"replicas": [[n] for n in range(8)], "layout": "one", "state_bytes": 0}
    Path("mine.json").write_text(json.dumps(plan))
    refusal = m2flow(*words, "--plan", "mine.json").error
    assert refusal.startswith("--plan: learner.train: the profile does not know this stage in this")
    assert "(got 'one on 1 x gpu')" in refusal


def test_the_frontier_of_staleness(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--cluster", "1x2xCPU", "--max-staleness", 2, "--json")
    frontier = json.loads(outcome.out)["decision"]["frontier"]
    assert frontier[0]["max_staleness"] == 0
    rates = [point["items_per_second"] for point in frontier]
    assert rates == sorted(rates)
    words = m2flow("plan", tiny, "--cluster", "1x2xCPU", "--max-staleness", 2).out
    assert "throughput by staleness" in words
    assert "throughput by staleness" not in m2flow("plan", tiny, "--cluster", "1x2xCPU").out


def test_a_model_by_its_configuration(tiny: Path, m2flow: M2flow) -> None:
    Path("small").mkdir()
    Path("small/config.json").write_text(json.dumps(CONFIG))
    for name in ("small", "small/config.json"):
        outcome = m2flow("plan", tiny, "--cluster", "1x2xH100", "--model", name)
        assert (outcome.code, outcome.err) == (0, "")
    named = m2flow("plan", tiny, "--cluster", "1x8xH100", "--model", "Qwen/Qwen2.5-7B")
    assert (named.code, named.err) == (0, "")
    own = m2flow("plan", tiny, "--cluster", "1x8xH100", "model.path=/nowhere/qwen2.5-0.5b")
    assert (own.code, own.err) == (0, "")


def test_known_lengths_are_not_assumed(tiny: Path, m2flow: M2flow) -> None:
    lengths = ["--prompt-tokens", 9, "--answer-tokens", 4]
    told = m2flow("plan", tiny, "--cluster", "1x2xCPU", *lengths).out
    assert "prompts of" not in told
    assert "answers of" not in told
    assert "log-normal, 2% of the answers reach the limit" in told


def test_short_answers_under_a_long_limit_are_planned(tiny: Path, m2flow: M2flow) -> None:
    """They were refused: 2 % of the answers at the limit would be longer in the mean alone."""
    words = ("generation.max_new_tokens=32768", "--answer-tokens", 500, "--model", "Qwen2.5-0.5B")
    outcome = m2flow("plan", tiny, "--cluster", "1x2xH100", *words)
    assert (outcome.code, outcome.err) == (0, "")
    assert "log-normal, 0.021% of the answers reach the limit" in outcome.out


def test_the_recipes_limit_of_memory_holds_there(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--cluster", "1x2xCPU", "lane_memory=2MB", "--json")
    assert {lane["memory_bytes"] for lane in json.loads(outcome.out)["lanes"]} == {2_000_000}


def test_a_critic_is_planned_too(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("plan", tiny, "--cluster", "1x2xCPU", "algorithm.name=ppo", "--json")
    document = json.loads(outcome.out)
    assert "critic.train" in document["decision"]["predicted"]["stages"]


def test_lanes_of_two_kinds(tiny: Path, m2flow: M2flow) -> None:
    document = json.loads(m2flow("plan", tiny, "--cluster", "1x2xH100+1x2xCPU", "--json").out)
    assert [lane["kind"] for lane in document["lanes"]] == ["gpu", "gpu", "cpu", "cpu"]


def test_neither_torch_nor_ray_is_needed(tiny: Path) -> None:
    words = ["plan", str(tiny), "--cluster", "16x8xH100", "--model", "Qwen2.5-7B", "--explain"]
    code = (
        "import sys\n"
        "from m2flow.cli.app import main\n"
        f"sys.argv = ['m2flow', *{words!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'math_verify', 'reasoning_gym'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == "[]\n"
    assert "128 lanes" in ran.stdout


def test_modes_on_two_kinds_of_lanes_take_layouts_that_fit_both(m2flow: M2flow) -> None:
    """The learner's layout was the smallest that fits either; all lanes then had no such price."""
    few = "prompts_per_step=64"
    words = ["plan", "qwen2.5-7b-grpo-math", few, "--cluster", "1x8xH100+1x8xH200"]
    outcome = m2flow(*words, "--mode", "collocated", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.plan.placements["learner"].layout == "fsdp4"


@pytest.mark.parametrize(
    ("recipe", "cluster", "mode", "layouts"),
    [
        ("gsm8k", "1x7xH100", "collocated", {"learner": "fsdp7", "generator": "one"}),
        ("qwen2.5-7b-grpo-math", "9x4xH100", "collocated", {"learner": "fsdp4"}),
        ("gsm8k", "2x6xH100", "disaggregated", {"learner": "fsdp3", "generator": "one"}),
        ("gsm8k", "1x7xH100", "hybrid", {"learner": "fsdp7", "generator": "one"}),
        ("qwen2.5-7b-ppo-math", "1x3xH200", "collocated", {"critic": "fsdp3", "learner": "fsdp3"}),
        ("qwen2.5-7b-grpo-math", "1x6xH100", "disaggregated", {"learner": "fsdp3"}),
    ],
)
def test_a_mode_takes_layouts_that_divide_its_lanes(
    m2flow: M2flow, recipe: str, cluster: str, mode: str, layouts: dict[str, str]
) -> None:
    """The smallest that fits was taken, and refused by a name that nobody had given."""
    words = ["plan", recipe, "--cluster", cluster, "--model", "Qwen2.5-7B", "--mode", mode]
    outcome = m2flow(*words, "prompts_per_step=64", "--json")
    assert outcome.code == 0, outcome.err
    plan = outcome.plan
    assert plan.mode == mode
    assert {worker: plan.placements[worker].layout for worker in layouts} == layouts


@pytest.mark.parametrize(
    ("cluster", "error"),
    [
        (
            "1x7xH100",
            (
                "learner: the worker's 3 lanes cannot be divided into replicas of 4 lanes, and "
                "layouts of 2 or 4 or 7 lanes alone have a price"
            ),
        ),
        ("1x8xH100+1x4xL40S", "a plan of this mode does not keep the limits of these lanes"),
    ],
)
def test_a_mode_for_which_no_layout_will_do_is_refused(
    m2flow: M2flow, cluster: str, error: str
) -> None:
    words = ["plan", "gsm8k", "--cluster", cluster, "--model", "Qwen2.5-7B"]
    assert m2flow(*words, "--mode", "disaggregated").error == (
        f"--mode: {error} (got 'disaggregated'); --mode auto finds one that does"
    )


def test_a_layout_that_the_recipe_names_gives_way_to_no_other(m2flow: M2flow) -> None:
    words = ["plan", "gsm8k", "--cluster", "1x7xH100", "--model", "Qwen2.5-7B"]
    refusal = m2flow(*words, "--mode", "hybrid", "layouts.learner=fsdp4").error
    assert refusal.startswith("layouts.learner: the worker's 7 lanes cannot be divided into repl")
    assert "(got 'fsdp4'); expected a layout of 1 or 7 lanes" in refusal


# --- profiles -------------------------------------------------------------------------------------


def test_auto_plans_from_what_was_measured(tiny: Path, m2flow: M2flow) -> None:
    from m2flow.runtime.profiling import keep

    keep(profile_for(tiny, "lanes=cpu:2"))
    outcome = m2flow("plan", tiny, "--mode", "auto", "lanes=cpu:2")
    assert (outcome.code, outcome.err) == (0, "")
    assert "profile that is measured" in outcome.out


def test_a_profile_file(tiny: Path, m2flow: M2flow) -> None:
    Path("profile.json").write_text(to_json(profile_for(tiny, "lanes=cpu:2")))
    words = ["plan", tiny, "lanes=cpu:2", "--profile", "profile.json"]
    for mode in ("auto", "collocated"):
        outcome = m2flow(*words, "--mode", mode)
        assert (outcome.code, outcome.err) == (0, "")
    plan = json.loads(m2flow(*words, "--mode", "collocated", "--json").out)
    plan["lanes"][0]["gpu"] = 0
    Path("mine.json").write_text(json.dumps(plan))
    refusal = m2flow(*words, "--plan", "mine.json").error
    assert refusal.startswith("lanes: lane 0 of kind cpu names accelerator 0; expected")
    refusal = m2flow(*words, "samples_per_prompt=8", "--mode", "auto").error
    assert refusal.startswith("profile.json: was made for something else: ")
    assert "shapes.samples_per_prompt is 8 here and 4 there" in refusal
    assert "--reuse-profile" in refusal
    reused = m2flow(*words, "samples_per_prompt=8", "--mode", "auto", "--reuse-profile")
    assert (reused.code, reused.err) == (0, "")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--cluster", "16x"],
            (
                "--cluster: the part '16x' is not machines x devices x name (got '16x'); expected "
                "16x8xH100, 1x8xA100-80GB, 2x8xH100+1x16xL40S or 1x32xCPU"
            ),
        ),
        (["--cluster", "2x8xH1000"], "--cluster: no figures for such a device"),
        (["--cluster", "1x0xH100"], "--cluster: the part '1x0xH100' has no lane"),
        (
            ["--model", "Qwen2.5-7B"],
            (
                "--model: says what is computed for lanes that are not here (got 'Qwen2.5-7B'); "
                "add --cluster SPEC, such as --cluster 1x8xH100"
            ),
        ),
        (
            ["--cluster", "1x2xH100", "--model", "Qwen2.5-8B"],
            "model: neither a folder with a config.json nor a model whose shape is known",
        ),
        (
            ["--cluster", "1x2xH100", "model.path=/nowhere"],
            (
                "model.path: neither a folder with a config.json nor a model whose shape is known "
                "(got '/nowhere'); --model CONFIG.json or a known name says what shape it has"
            ),
        ),
        (
            ["--cluster", "1x2xCPU", "--answer-tokens", 7],
            (
                "--answer-tokens: no answers are so long in the mean under this limit (got 7.0); "
                "expected more than 0 and less than 6"
            ),
        ),
        (
            ["--mode", "auto", "lanes=cpu:2"],
            (
                "--mode: nothing has been measured for this recipe on these lanes (got 'auto'); "
                "`m2flow profile RECIPE` measures first, --cluster computes"
            ),
        ),
        (
            ["--cluster", "1x1xCPU", "--mode", "hybrid"],
            "mode: hybrid needs two lanes (got '1 lanes'); use --mode collocated",
        ),
        (
            ["--cluster", "1x2xCPU", "--mode", "eager"],
            "--mode: an eager run has one process, and nothing to plan (got 'eager')",
        ),
        (["--profile", "none.json", "lanes=cpu:2"], "profile: there is no such profile"),
        (["--cluster", "1x2xCPU", "--mode", "hybird"], "mode: is wrong (got 'hybird')"),
        (["--max-staleness", "-1"], "Invalid value for '--max-staleness'"),
        (["--cluster", "1x2xCPU", "--prompt-tokens", "-5"], "Invalid value for '--prompt-tokens'"),
        (["--cluster", "1x2xCPU", "--answer-tokens", "nan"], "--answer-tokens: is not finite"),
        (["--cluster", "1x2xCPU", "--prompt-tokens", "inf"], "--prompt-tokens: is not finite"),
    ],
)
def test_refusals(tiny: Path, refused: Callable[..., str], words: list[Any], error: str) -> None:
    assert refused("plan", tiny, *words).startswith(error)


def test_a_model_that_does_not_fit_says_what_would_do(tiny: Path, m2flow: M2flow) -> None:
    words = ["plan", tiny, "--model", "Qwen2.5-7B"]
    refusal = m2flow(*words, "--cluster", "1x1xH100").error
    assert refusal.startswith("--cluster: learner.train of Qwen2.5-7B fits on no 1 lane of H100")
    enough = refusal.split("such as ")[1]
    assert m2flow(*words, "--cluster", enough).code == 0
    lanes = parse_cluster(enough).num_lanes
    assert m2flow(*words, "--cluster", f"1x{lanes // 2}xH100").code == 2


def test_a_model_that_fits_nowhere_says_why(tiny: Path, m2flow: M2flow) -> None:
    words = ["plan", tiny, "--model", "Qwen2.5-32B", "--cluster", "1x2xCPU"]
    lacks = r"generator\.generate of Qwen2\.5-32B fits on no {} lanes of CPU: the nearest layout, "
    lacks += r"{}, lacks (\d+\.\d) GB on each"
    told = lacks.format(2, "tp2") + r" \(got '1x2xCPU'\); no number of such lanes would do: "
    found = re.fullmatch("--cluster: " + told + lacks.format(4096, "tp8"), m2flow(*words).error)
    assert found is not None
    assert 0 < float(found[2]) < float(found[1]) < 65.5  # float32 weights take 131 GB


def test_long_answers_of_a_large_model_have_a_plan(m2flow: M2flow) -> None:
    """8,192 answers a step ended in RunFailed: a simulated step is longer than a real deadline."""
    recipe = Path(__file__).parents[2] / "recipes" / "gsm8k.yaml"
    sizes = ("prompts_per_step=512", "samples_per_prompt=16", "minibatches=1")
    outcome = m2flow(
        "plan", recipe, "--cluster", "1x8xA100-80GB", "--model", "Qwen2.5-7B", *sizes,
        "generation.max_new_tokens=16384",
    )  # fmt: skip
    assert re.match(r"plan: \w+, 8 lanes, \d+ s a step", outcome.out)
    assert {"collocated", "disaggregated", "hybrid"} <= set(re.findall(r"\w+", outcome.out))


def test_more_lanes_are_not_slower_with_long_answers(m2flow: M2flow) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "gsm8k.yaml"
    seconds = []
    for cluster in ("1x8xA100-80GB", "2x8xA100-80GB"):
        outcome = m2flow(
            "plan", recipe, "--cluster", cluster, "--model", "Qwen2.5-1.5B",
            "generation.max_new_tokens=8192",
        )  # fmt: skip
        told = re.match(r"plan: \w+, \d+ lanes, ([\d.]+) s", outcome.out)
        assert told
        seconds.append(float(told[1]))
    assert seconds[1] <= seconds[0]


def test_slower_lanes_beside_fast_ones_do_not_lead_to_less(m2flow: M2flow) -> None:
    """All simulations went to ways to deal out stages of next to no work between the two kinds."""
    seconds = []
    for cluster in ("1x8xH100", "1x8xH100+1x8xL40S"):
        words = ("--cluster", cluster, "--model", "Qwen2.5-3B")
        outcome = m2flow("plan", "qwen2.5-7b-grpo-math", *words)
        told = re.match(r"plan: \w+, \d+ lanes, ([\d.]+) s", outcome.out)
        assert told
        seconds.append(float(told[1]))
    assert seconds[1] <= 1.02 * seconds[0]


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
def test_a_fixed_mode_takes_the_fewest_lanes_that_leave_room_for_others(
    m2flow: M2flow, mode: str
) -> None:
    """Two lanes hold a 7B model's state in tp2, but not beside the generator's."""
    outcome = m2flow(
        "plan", "qwen2.5-7b-grpo-math", "--cluster", "1x8xH100", "--mode", mode, "--json"
    )
    assert outcome.code == 0, outcome.err
    plan = json.loads(outcome.out)
    assert plan["mode"] == mode
    assert plan["placements"]["learner"]["layout"] == "fsdp4"
    assert plan["placements"]["generator"]["layout"] == "one"
    if mode == "collocated":
        assert plan["predicted_seconds"] == pytest.approx(129, abs=1)
