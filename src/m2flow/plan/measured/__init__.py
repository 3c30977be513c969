"""Profiles from measurements: what was seen of real steps, and the curves that explain it.

Pure: it starts nothing and reads no clock. `m2flow.runtime.profiling` makes steps on purpose; every
run may give its own.
"""

from m2flow.plan.measured.evidence import Evidence, Step
from m2flow.plan.measured.learning import fitted, learn
from m2flow.plan.measured.trials import trial_plans

__all__ = ["Evidence", "Step", "fitted", "learn", "trial_plans"]
