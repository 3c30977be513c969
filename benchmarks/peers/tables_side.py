"""Measured seconds of vLLM's kernels, out of aiconfigurator's tables; runs in its environment.

Reads a JSON list of points from standard input, and writes a JSON object to standard output: the
configuration of each model (`configs`), and `seconds` of each point. A point is `[model, system,
lanes, what, batch, tokens]`: `what` is "prefill" of `batch` prompts of `tokens` tokens, or
"decode", one more token of `batch` requests that hold `tokens` each.

The tables are of operations, some of them interpolated; a step is the sum over a model's layers.
What an engine does between operations is not in it.
"""

import contextlib
import json
import logging
import sys
import tempfile
import warnings
from importlib import resources
from pathlib import Path

BACKEND, VERSION = "vllm", "0.24.0"
"""Of the tables that the package has for H100 and H200."""


def config_of(model):
    """The `config.json` of a model, as the package has it."""
    name = f"{model.replace('/', '--')}_config.json"
    folder = resources.files("aiconfigurator_core") / "model_configs"
    return json.loads((folder / name).read_text())


def written(configs, folder):
    """A folder for each model: by their names alone the package finds only some of its own."""
    found = {}
    for number, (model, config) in enumerate(configs.items()):
        found[model] = Path(folder) / str(number)
        found[model].mkdir()
        (found[model] / "config.json").write_text(json.dumps(config))
    return found


def step_seconds(databases, engine, folders, point):
    """Seconds of a point."""
    from aiconfigurator_core.sdk import config, models

    model, system, lanes, what, batch, tokens = point
    divided = config.ModelConfig(tp_size=lanes, moe_tp_size=lanes, moe_ep_size=1)
    asked = config.RuntimeConfig(batch_size=batch, isl=tokens, osl=2)
    mode = "static_ctx" if what == "prefill" else "static_gen"
    made = models.get_model(str(folders[model]), divided, BACKEND)
    return engine.run_static_latency_only(made, databases[system], asked, mode) / 1e3


def main():
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    points = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        from aiconfigurator_core.sdk import perf_database
        from aiconfigurator_core.sdk.backends.factory import get_backend

        systems = {point[1] for point in points}
        databases = {
            system: perf_database.get_database(system, BACKEND, VERSION) for system in systems
        }
        engine = get_backend(BACKEND)
        configs = {model: config_of(model) for model in dict.fromkeys(point[0] for point in points)}
        with tempfile.TemporaryDirectory() as folder:
            folders = written(configs, folder)
            seconds = [step_seconds(databases, engine, folders, point) for point in points]
    json.dump({"seconds": seconds, "configs": configs}, sys.stdout)


if __name__ == "__main__":
    main()
