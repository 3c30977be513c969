"""Profiles from measurements: what was seen of real steps, and the curves that explain it.

Pure: it starts nothing and reads no clock. `m2flow.runtime.profiling` makes what it is given.
"""

from m2flow.plan.measured.fitting import Evidence, fit, fit_to
from m2flow.plan.measured.observed import Observed
from m2flow.plan.measured.trials import trial_plans

__all__ = ["Evidence", "Observed", "fit", "fit_to", "trial_plans"]
