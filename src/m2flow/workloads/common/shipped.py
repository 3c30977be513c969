"""What comes with m2flow beside its code: recipes by name, and the files of a new project.

A wheel holds these folders within the package; in a checkout they lie beside `src/`.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from m2flow.errors import UserError, reading

SUFFIX = ".yaml"


def shipped_recipes() -> Mapping[str, Path]:
    """The file of each recipe that comes with m2flow, by name."""
    return {path.stem: path for path in sorted(_folder("recipes").glob(f"*{SUFFIX}"))}


def recipe_file(path: Path, folder: Path = Path()) -> Path:
    """The file that `path`, seen from `folder`, means: itself, or m2flow's recipe of that name.

    A file that exists comes first. A name may have `.yaml` behind it, and no folder before it.

    Raises:
        UserError: the system does not say whether there is such a file.
    """
    file = folder / path
    with reading(file):
        if file.is_file() or path.name != str(path):
            return file
    return shipped_recipes().get(path.name.removesuffix(SUFFIX), file)


def about(recipe: Path) -> str:
    """What a recipe's file says of itself: the first sentence of the comment that opens it."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), recipe.read_text().splitlines())
    comment = " ".join(line.removeprefix("#").strip() for line in lines)
    return re.split(r"[.;](?: |$)", comment)[0]


def write_project(folder: Path) -> Sequence[Path]:
    """Write a project of one's own: a flow, a recipe, a reward, their test, and what they are.

    Args:
        folder: new or empty; `.git` may be there.

    Returns:
        The files.

    Raises:
        UserError: something is there already, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if there := sorted(path.name for path in folder.iterdir() if path.name != ".git"):
            raise UserError(
                f"is not empty: {there[0]} is there", key=str(folder), hint="name a new folder"
            )
        files = [path for path in sorted(_folder("examples/project").iterdir()) if path.is_file()]
        return [Path(shutil.copyfile(path, folder / path.name)) for path in files]
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", key=str(folder), expected="a folder"
        ) from None


def _folder(name: str) -> Path:
    package = Path(__file__).parents[2]
    installed = package / name
    return installed if installed.is_dir() else package.parents[1] / name
