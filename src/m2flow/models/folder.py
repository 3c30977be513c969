"""A model folder of Hugging Face layout: whether all of it is there.

Looks at names, sizes and headers only. Whatever is missing, cut off or damaged is a `UserError`
that names it; nothing is repaired.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from m2flow.errors import UserError, reading

if TYPE_CHECKING:
    import torch

_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")


def model_folder(path: str | Path) -> Path:
    """The folder, if it is one."""
    folder = Path(path).expanduser()
    with reading(folder):
        is_folder, is_there = folder.is_dir(), folder.exists()
    if not is_folder:
        problem = "is a file" if is_there else "does not exist"
        raise UserError(
            f"the model folder {problem}",
            key=str(path),
            expected="a folder with config.json, *.safetensors and tokenizer files",
            hint="a model of the Hugging Face hub: `hf download ORG/NAME --local-dir FOLDER` first",
        )
    return folder


def checked_folder(path: str | Path) -> Path:
    """The folder of a model that names an architecture, and whose weights are all there."""
    folder = model_folder(path)
    if "model_type" not in read_json(folder / "config.json", "the architecture"):
        raise UserError(
            "config.json names no architecture", key=str(folder), expected="a field model_type"
        )
    for file in weight_files(folder):
        check_safetensors(file)
    return folder


def check_not_quantized(config: Mapping[str, Any], source: str, key: str = "model") -> None:
    """Refuse quantized weights: they are not trained, and only other engines generate from them.

    Args:
        config: the content of a `config.json`.
        source: what it is of.
        key: what has named it.
    """
    quantized = config.get("quantization_config")
    if quantized:
        kind = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise UserError(
            f"the weights are quantized ({kind or 'quantization_config'})",
            key=key,
            value=source,
            hint="take the model in bfloat16",
        )


def read_json(file: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file that describes `what`."""
    if not file.is_file():
        within = file.parent / "model"  # such as in a checkpoint of a run
        raise UserError(
            f"{file.name} is missing, which describes {what}",
            key=str(file.parent),
            hint=f"name {within}, where it is"
            if (within / file.name).is_file()
            else "the folder is half-written, or it is no model folder",
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{file.name} cannot be read: {error}",
            key=str(file.parent),
            expected="JSON",
            hint="copy the file again",
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{file.name} holds no JSON object", key=str(file.parent))
    return content


def from_folder(auto: Any, folder: Path, **settings: Any) -> Any:
    """Read with a class of transformers what lies in a model folder. Code in it never runs.

    Args:
        auto: the class, such as `AutoConfig`.
        folder: the folder.
        settings: further arguments of its `from_pretrained`.

    Raises:
        UserError: it cannot be read without code of its own.
    """
    try:
        return auto.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **settings
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(
            "its code comes with the model, and m2flow runs none but that of transformers",
            key=str(folder),
            expected="a model and a tokenizer that transformers has built in, and no auto_map",
        ) from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model; every one exists."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(read_json(index, "the shards").get("weight_map", {}).values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing or not shards:
            raise UserError(
                f"{len(missing)} of {len(shards)} weight files are missing: {', '.join(missing)}",
                key=str(folder),
                hint="finish the download or the copy",
            )
        return [folder / name for name in shards]
    single = folder / "model.safetensors"
    if not single.is_file():
        other = sorted(f.name for f in folder.glob("*") if f.suffix in {".bin", ".pt", ".gguf"})
        raise UserError(
            "the weights are missing: neither model.safetensors nor model.safetensors.index.json",
            key=str(folder),
            hint=f"convert {other[0]} to safetensors" if other else "the folder is half-written",
        )
    return [single]


def is_copied(path: str | Path, dtype: torch.dtype) -> bool:
    """Whether a model takes memory of its own as it is loaded, in place of its files' pages.

    So it is where files have another dtype, and where experts lie singly in them: a mixture's
    modules have them stacked.

    Args:
        path: the folder.
        dtype: of the weights that are loaded.

    Raises:
        UserError: the folder, its `config.json` or its weights are missing or incomplete.
    """
    kind = str(dtype).removeprefix("torch.").replace("float", "F").upper()  # such as BF16
    for file in weight_files(checked_folder(path)):
        with safe_open(file, framework="pt") as weights:
            for tensor in weights.keys():  # noqa: SIM118  (it cannot be gone through)
                if _SINGLE_EXPERT.search(tensor) or weights.get_slice(tensor).get_dtype() != kind:
                    return True
    return False


def weight_count(path: str | Path, lanes: int = 1) -> int:
    """Elements of all tensors in a model folder, by the headers of its files.

    Args:
        path: the folder.
        lanes: that layers are divided over; what is outside of layers is whole on each of them.

    Returns:
        those on a lane.

    Raises:
        UserError: the folder, its `config.json` or its weights are missing or incomplete.
    """
    count = 0.0
    for file in weight_files(checked_folder(path)):
        with safe_open(file, framework="pt") as weights:
            for tensor in weights.keys():  # noqa: SIM118  (it cannot be gone through)
                size = math.prod(weights.get_slice(tensor).get_shape())
                in_a_layer = any(part.isdecimal() for part in tensor.split("."))
                count += size / lanes if in_a_layer else size
    return math.ceil(count)


def check_safetensors(file: Path) -> None:
    """The file is as long as its header says; a copy that was cut off is not."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise UserError(
            f"{file.name} is cut off or damaged: {error}",
            key=str(file.parent),
            hint="copy the file again",
        ) from error
