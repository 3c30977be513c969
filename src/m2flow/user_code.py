"""Code of the user's that a recipe names: rewards, tools, agents, experts, environments.

A module is looked for where Python looks, and then in the folder in which the command was given.
Lanes look there, too: Ray tells them the folder in which the launcher was connected to it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from m2flow.errors import UserError, nearest, suggestion

FUNCTION = "module:function"


def user_module(name: str) -> ModuleType | None:
    """Import a module; None where there is none of that name.

    Raises:
        Exception: what the module raised, a module among it that it imports and that is not there.
    """
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None
    except SystemExit as error:  # of a script, which would end the command with its own exit code
        raise ImportError(f"it calls exit({error.code}) where it is imported") from error


def user_function(
    path: str, key: str, expected: str = FUNCTION, names: Iterable[str] = ()
) -> Callable[..., Any]:
    """The function of a dotted path.

    Args:
        path: `module:function`.
        key: of the recipe, for errors.
        expected: what the key takes, for errors.
        names: that the key takes as well, for errors.

    Raises:
        UserError: there is no such module or function, or the module cannot be imported.
    """

    def refused(message: str, hint: str | None = None) -> UserError:
        return UserError(message, key=key, value=path, expected=expected, hint=hint)

    module_name, _, name = path.partition(":")
    if not (module_name and name):
        with_colon = [":".join(path.rsplit(".", 1))] if "." in path else []
        close = nearest(path, [*names, *with_colon])
        raise refused("names no function", f"did you mean {close!r}?" if close else None)
    try:
        module = user_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise refused(f"{module_name} cannot be imported ({reason})") from error
    if module is None:
        raise refused(f"there is no module {module_name}, neither in {Path.cwd()} nor installed")
    function = getattr(module, name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value)]
        raise refused(f"{module_name} has no {name}", suggestion(name, names) if names else None)
    if not callable(function):
        raise refused(f"{name} is no function")
    made: Callable[..., Any] = function
    return made


def gives_coroutines(function: Callable[..., Any]) -> bool:
    """Whether it is an `async def`, or an object whose `__call__` is one."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def what_raised(error: BaseException) -> str:
    """An error in a line, if its text is one: `KeyError: 'x' (file.py:12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((one for one in reversed(frames) if not one.filename.startswith("<")), frames[-1])
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"{text} ({Path(place.filename).name}:{place.lineno})"


async def caught(
    function: Callable[..., Awaitable[Any]], *arguments: Any
) -> tuple[Any, BaseException | None]:
    """What a coroutine function gives, and what it raised, `exit()` and a cancellation of its own
    among it; one from outside passes.
    """
    import asyncio  # not in processes of simulators

    try:
        return await function(*arguments), None
    except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        return None, error
