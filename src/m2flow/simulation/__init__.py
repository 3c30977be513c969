"""The engine under a virtual clock: what a plan would take, without lanes."""
