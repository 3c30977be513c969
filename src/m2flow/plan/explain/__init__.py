"""Why a plan was chosen: `explained` makes it data, `in_words` text; JSON by the codec of files."""

from m2flow.plan.explain.explanation import Alternative, Explanation, explained
from m2flow.plan.explain.flips import Flip, flips
from m2flow.plan.explain.picture import picture
from m2flow.plan.explain.words import in_words, summary

__all__ = [
    "Alternative",
    "Explanation",
    "Flip",
    "explained",
    "flips",
    "in_words",
    "picture",
    "summary",
]
