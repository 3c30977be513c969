"""Hypothesis without deadlines: the first call of a torch operation may be slow."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("torch", deadline=None)
settings.load_profile("torch")
