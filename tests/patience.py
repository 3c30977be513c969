"""How long tests wait: for what has to happen, and for what must not be waited for."""

SOON = 60.0
"""Seconds within which what has to happen has happened, on however busy a machine."""

LONG = 3600.0
"""Seconds of a deadline that no test lives to see."""
