"""The live page: runs side by side in a browser, while they train.

`following` reads what has been added to run directories, `curves` makes figures small enough to
draw, `server` hands both to the page in `static/`. Charts are drawn by uPlot 1.6.32 (MIT), which
lies in `static/` with its licence, so the page fetches nothing from anywhere else.
"""

from m2flow.observe.dashboard.server import Dashboard

__all__ = ["Dashboard"]
