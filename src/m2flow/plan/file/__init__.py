"""Plans, profiles and other data classes as JSON files, by one codec."""

from m2flow.plan.file.codec import from_json, to_json
from m2flow.plan.file.plans import plan_from_json, read_plan
from m2flow.plan.file.profiles import profile_from_json, read_profile

__all__ = [
    "from_json",
    "plan_from_json",
    "profile_from_json",
    "read_plan",
    "read_profile",
    "to_json",
]
