"""Secrets have no place in a recipe: `config.yaml` of each run, and its report, have all its keys.

A key is told by its last words, so that `password_file` may say where the secret is. A token of
text (`pad_token`) is none. Options of a command (`--token WORD`) are told likewise, and a URL with
a password (`scheme://name:password@host`) is a secret under any key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from m2flow.errors import UserError

SECRETS = (
    "secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "apikey",
)  # fmt: skip
"""Last words of keys whose values nobody may read."""

KINDS_OF_KEYS = ("api", "access", "auth", "private", "secret")
"""What stands before `key` where it is a secret."""

TOKENS_OF_TEXT = (
    "pad", "eos", "bos", "unk", "sep", "cls", "mask", "start", "end", "stop", "image", "video",
    "audio", "special", "per",
)  # fmt: skip
"""What stands before `token` where it is none."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_VARIABLE_KEY = re.compile(r"[A-Z0-9_]+_KEY")  # of an environment: OPENAI_KEY
_URL_WITH_PASSWORD = re.compile(r"\w://[^/\s:@]*:[^/\s@]+@")


def refuse_secrets(recipe: Mapping[str, Any]) -> None:
    """Refuse a text or a number that looks like a secret, by its key or by what it is.

    Args:
        recipe: its keys and values, with tables within.

    Raises:
        UserError: names the key, and not the value.
    """
    for key in _secrets(recipe):
        raise UserError(
            "looks like a secret, and config.yaml of the run would keep it",
            key=key,
            hint="take it out, and have what needs it read an environment variable",
        )


def is_secret(key: str) -> bool:
    """Whether a key, with dots or without, looks like that of a secret."""
    name = key.rpartition(".")[2]
    *_, before, last = ["", "", *_WORD.findall(name)]
    before, last = before.lower(), last.lower()
    if last == "key":
        return before in KINDS_OF_KEYS or _VARIABLE_KEY.fullmatch(name) is not None
    return last in SECRETS or (last == "token" and before not in TOKENS_OF_TEXT)


def _secrets(value: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> Iterator[str]:
    """Keys of secrets in a table or a list, with dots."""
    before: object = None  # what stands before a word of a list, such as a command
    for name, held in value.items() if isinstance(value, Mapping) else enumerate(value):
        key = f"{prefix}{name}"
        if isinstance(held, Mapping | list | tuple):
            yield from _secrets(held, f"{key}.")
        elif held not in (None, "", True, False) and (
            is_secret(key) or _is_secret_value(held, before)
        ):
            yield key
        before = None if isinstance(value, Mapping) else held


def _is_secret_value(held: object, before: object) -> bool:
    """Whether a value is a secret whatever its key is; `before` is the word before it in a list."""
    if not isinstance(held, str):
        return False
    option, given = held.partition("=")[::2]
    if not held.startswith("-"):
        option, given = (before, held) if isinstance(before, str) else ("", "")
    told = option.startswith("-") and given != "" and is_secret(option.lstrip("-"))
    return told or _URL_WITH_PASSWORD.search(held) is not None
