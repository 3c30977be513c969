"""A module of the user's, which a recipe names."""

from __future__ import annotations

import importlib
from types import ModuleType


def user_module(name: str) -> ModuleType | None:
    """Import a module; None where there is none of that name.

    Raises:
        Exception: what the module raised, a module among it that it imports and that is not there.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None
