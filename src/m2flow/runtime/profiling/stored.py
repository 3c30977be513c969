"""Stored profiles: one file for each key, under the folder that holds what can be made again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from m2flow.errors import UserError
from m2flow.plan.file import read_profile, to_json
from m2flow.plan.profile import Profile, differences

CACHE_VARIABLE = "M2FLOW_CACHE"

MORE = 1.25
"""What lacks trials is measured again where there are so many times as many seconds."""

Key = Mapping[str, Mapping[str, object]]
"""What a profile depends on; see `Profile.key`."""


def cache_folder() -> Path:
    """`$M2FLOW_CACHE`, else `~/.cache/m2flow`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "m2flow")


def stored_at(key: Key) -> Path:
    """Where the profile of a key lies, or would lie."""
    text = json.dumps(key, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return cache_folder() / "profiles" / f"{name}.json"


def cached(key: Key, budget: float | None = None) -> Profile | None:
    """The stored profile of a key, if there is one that can be read.

    One that another m2flow has written in another form counts as none: it is measured again.

    Args:
        key: what the profile depends on.
        budget: seconds that measuring again may take. A profile that lacks trials, because it was
            given clearly less, counts as none then.
    """
    path = stored_at(key)
    if not path.is_file():
        return None
    try:
        profile = read_profile(path)
    except UserError:
        return None
    if differences(key, profile.key):
        return None
    short = profile.cut_by is not None and budget is not None and budget > MORE * profile.cut_by
    return None if short else profile


def keep(profile: Profile) -> Path:
    """Store a profile under its key; where it lies. Readers see all of it or nothing."""
    path = stored_at(profile.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(to_json(profile), encoding="utf-8")
    os.replace(partial, path)
    return path


def lack(profile: Profile) -> str:
    """What a profile lacks, as words to be added; nothing if it is complete."""
    if profile.cut_by is None:
        return ""
    return f" (cut short by its budget of {profile.cut_by:.0f} s; a larger one measures the rest)"


def given(path: Path, key: Key, *, whatever_its_key: bool = False) -> Profile:
    """A profile file that the user names.

    Args:
        path: the file.
        key: of what is to be planned.
        whatever_its_key: take it though it was made for something else.

    Raises:
        UserError: it is no profile, or it was made for something else; says what differs.
    """
    profile = read_profile(path)
    different = differences(key, profile.key)
    if different and not whatever_its_key:
        raise UserError(
            f"was made for something else: {'; '.join(different)}",
            key=str(path),
            hint="measure again with `m2flow profile`, or use it all the same: --reuse-profile",
        )
    return profile
