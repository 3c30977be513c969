"""Embodied workloads: policies that act in simulators. So far what their stages cost."""
