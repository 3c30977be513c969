"""The recipes that come with m2flow, by name: `quickstart` is the file `quickstart.yaml`.

A wheel holds them within the package; in a checkout they lie in `recipes/`, beside `src/`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

SUFFIX = ".yaml"


def shipped_recipes() -> Mapping[str, Path]:
    """The file of each recipe that comes with m2flow, by name."""
    package = Path(__file__).parents[2]
    installed, checkout = package / "recipes", package.parents[1] / "recipes"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def recipe_file(path: Path, folder: Path = Path()) -> Path:
    """The file that `path`, seen from `folder`, means: itself, or m2flow's recipe of that name.

    A file that exists comes first. A name may have `.yaml` behind it, and no folder before it.
    """
    file = folder / path
    if file.is_file() or path.name != str(path):
        return file
    return shipped_recipes().get(path.name.removesuffix(SUFFIX), file)


def about(recipe: Path) -> str:
    """What a recipe's file says of itself: the first sentence of the comment that opens it."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), recipe.read_text().splitlines())
    comment = " ".join(line.removeprefix("#").strip() for line in lines)
    return re.split(r"[.;](?: |$)", comment)[0]
