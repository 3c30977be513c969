"""Profiles of flows on real lanes: measured when they are not known, stored when they are.

Importing this starts nothing, and brings in neither torch nor Ray.
"""

from m2flow.runtime.profiling.measuring import measure_flow, profile_flow
from m2flow.runtime.profiling.obtaining import Batches, Lanes, obtain
from m2flow.runtime.profiling.stored import cached, keep, stored_at

__all__ = [
    "Batches",
    "Lanes",
    "cached",
    "keep",
    "measure_flow",
    "obtain",
    "profile_flow",
    "stored_at",
]
