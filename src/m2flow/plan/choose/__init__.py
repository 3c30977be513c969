"""The choice of a plan: structures, lanes dealt by work, coordinate descent in the simulator."""

from m2flow.plan.choose.choosing import check_fits, choose
from m2flow.plan.choose.judge import sized

__all__ = ["check_fits", "choose", "sized"]
