"""Families of flows with their workers, data, recipe types and prices."""
