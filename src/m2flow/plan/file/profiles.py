"""Profile files, written by `to_json`."""

from __future__ import annotations

from pathlib import Path

from m2flow.plan.file.codec import from_json, read_text
from m2flow.plan.profile import Profile


def profile_from_json(text: str, where: str = "profile") -> Profile:
    """Read a profile.

    Raises:
        UserError: the text is no JSON; a key is unknown, missing or of the wrong type; or a value
            is impossible (a curve that falls, a negative size).
    """
    return from_json(Profile, text, where)


def read_profile(path: Path | str) -> Profile:
    """Read a profile file.

    Raises:
        UserError: there is no such file, or it is no profile.
    """
    return profile_from_json(read_text(path, "profile", "profile"), str(path))
