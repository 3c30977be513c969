"""Why a plan was chosen: `explained` makes it data, `in_words` text, `to_document` JSON."""

from m2flow.plan.explaining.document import decision_document, to_document
from m2flow.plan.explaining.explanation import Explanation, RunnerUp, explained
from m2flow.plan.explaining.flips import flips
from m2flow.plan.explaining.other_lanes import Flip
from m2flow.plan.explaining.path import Bottleneck, bottleneck
from m2flow.plan.explaining.picture import picture
from m2flow.plan.explaining.words import in_words, summary

__all__ = [
    "Bottleneck",
    "Explanation",
    "Flip",
    "RunnerUp",
    "bottleneck",
    "decision_document",
    "explained",
    "flips",
    "in_words",
    "picture",
    "summary",
    "to_document",
]
