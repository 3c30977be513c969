"""Stored profiles: one file for each key, under the folder that holds what can be made again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from m2flow.errors import CannotWrite, UserError, writing
from m2flow.flow.graph import FlowGraph
from m2flow.plan.file import read_profile, to_json
from m2flow.plan.profile import Profile, differences

CACHE_VARIABLE = "M2FLOW_CACHE"

Key = Mapping[str, Mapping[str, object]]
"""What a profile depends on; see `Profile.key`."""


def cache_folder() -> Path:
    """Return `$M2FLOW_CACHE`, else `~/.cache/m2flow`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "m2flow")


def stored_at(key: Key) -> Path:
    """Return the file in which the profile of a key lies, or would lie."""
    text = json.dumps(key, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return cache_folder() / "profiles" / f"{name}.json"


def cached(key: Key, graph: FlowGraph | None = None) -> Profile | None:
    """Return the stored profile of a key, if there is one that can be read.

    A profile that another m2flow has written in another form counts as none, and so does one that
    does not know each stage of the graph, if a graph is given.
    """
    try:
        profile = read_profile(stored_at(key))
    except (UserError, OSError, RuntimeError):  # no file, no permission, no home
        return None
    if graph is not None and any(node.name not in profile.stages for node in graph.nodes):
        return None
    return None if differences(key, profile.key) else profile


def keep(profile: Profile) -> Path:
    """Store a profile under its key, and return its file. Readers see all of it or nothing."""
    path = stored_at(profile.key)
    partial = path.with_suffix(f".{os.getpid()}")
    with writing("the profile", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(to_json(profile), encoding="utf-8")
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return path


def try_to_keep(profile: Profile) -> str | None:
    """Store a profile as `keep` does, or return why it cannot be: nothing else depends on it."""
    try:
        keep(profile)
    except (CannotWrite, OSError, RuntimeError) as error:
        return str(error)
    return None


def given(path: Path, key: Key, *, whatever_its_key: bool = False) -> Profile:
    """Return the profile in a file that the user names.

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
