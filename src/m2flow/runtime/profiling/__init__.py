"""Profiles of flows on real lanes: measured when they are not known, stored when they are.

Importing this starts nothing, and brings in neither torch nor Ray.
"""

from m2flow.runtime.profiling.measuring import profile_flow
from m2flow.runtime.profiling.stored import cached, keep, stored_at, try_to_keep

__all__ = ["cached", "keep", "profile_flow", "stored_at", "try_to_keep"]
