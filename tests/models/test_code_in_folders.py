"""Code that lies in a model folder never runs, and nobody is asked whether it may."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2flow.errors import UserError
from m2flow.models.causal_lm import TinySpec, build_tiny, load_model, load_tokenizer
from m2flow.models.classifier import label_index, load_classifier
from m2flow.models.critic import load_critic
from m2flow.models.tokenizer import character_tokenizer
from m2flow.workloads.reasoning.workers import ModelSource

PLANTED = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import Qwen2Config, Qwen2ForCausalLM
class Planted(Qwen2ForCausalLM): pass
class PlantedConfig(Qwen2Config): model_type = "planted"
"""

ARCHITECTURES = ["PlantedForTokenClassification", "PlantedForSequenceClassification"]
AUTO = (
    "AutoModelForCausalLM", "AutoModelForTokenClassification", "AutoModelForSequenceClassification",
)  # fmt: skip

READERS: dict[str, Callable[[Path], Any]] = {
    "policy": load_model,
    "critic": load_critic,
    "classifier": load_classifier,
    "label": lambda folder: label_index(folder, None),
    "end tokens": lambda folder: ModelSource(str(folder)).stop_ids(),
    "tokenizer": load_tokenizer,
}


class Terminal(io.StringIO):
    """Somebody who has typed something."""

    def isatty(self) -> bool:
        return True


def changed(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(params=["", "y\n"], ids=["nobody is there", "somebody says yes"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with `planted.py` beside it, which leaves a mark when it runs."""
    typed = request.param
    monkeypatch.setattr(sys, "stdin", Terminal(typed) if typed else io.StringIO())
    folder = tmp_path / "model"
    spec = TinySpec(hidden_size=16, num_hidden_layers=1, intermediate_size=32)
    build_tiny(spec, vocab_size=7, eos_token_id=5, pad_token_id=6, seed=0).save_pretrained(folder)
    character_tokenizer("01234").save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    (folder / "planted.py").write_text(PLANTED.format(mark=str(tmp_path / "mark")))
    tokenizer = {"AutoTokenizer": ["planted.Planted", None]}
    changed(folder / "tokenizer_config.json", auto_map=tokenizer, tokenizer_class="Planted")
    auto_map = {"AutoConfig": "planted.PlantedConfig"} | dict.fromkeys(AUTO, "planted.Planted")
    changed(folder / "config.json", auto_map=auto_map)
    return folder


@pytest.mark.parametrize("what", READERS)
def test_a_model_of_its_own_code_is_refused(what: str, folder: Path) -> None:
    changed(folder / "config.json", model_type="planted", architectures=ARCHITECTURES)
    with pytest.raises(UserError, match=r"its code comes with the model, and m2flow runs none"):
        READERS[what](folder)
    assert not (folder.parent / "mark").exists()


@pytest.mark.parametrize("what", ["policy", "critic", "end tokens", "tokenizer"])
def test_of_a_model_that_transformers_has_its_code_is_not_run(what: str, folder: Path) -> None:
    READERS[what](folder)
    assert not (folder.parent / "mark").exists()
